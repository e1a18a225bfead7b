"""`isthmus bench policy`: request traces through the router's real decisions, in virtual time.

Each policy meets the same prompts on the same simulated workers. What is compared: how much of
the ideal hit it finds, how evenly the work spreads, and how many first tokens are in time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.bench.result import Bar, BenchFailed, BenchResult, Figure
from services.common.progress import Progress
from services.common.quantile import nearest_rank
from services.router.policy import PolicyConfig
from services.sim.groups import GroupLoad, group_workload
from services.sim.mooncake import BadTrace, read_trace
from services.sim.placement import AFFINITY, OURS, PLAIN_COST, POLICIES, RANDOM, TWO_CHOICES
from services.sim.workload import Workload, ideal_hit
from services.sim.world import ClusterSpec, World

SLO_TTFT_S = 2.0
RIVALS = (AFFINITY, TWO_CHOICES, PLAIN_COST)
ATTAINMENT_SLACK = 0.01
# Share of the ideal hit, at least, and busiest worker to mean, at most, by name of the trace.
TRACE_BARS = {
    "mooncake_conversation_trace": (0.85, 1.25),
    "mooncake_synthetic_trace": (0.95, 1.5),
}
# Requests a second, how many arrive at one instant, and the hit to reach at any number of routers.
GROUP_CASES = ((30.0, 1, 0.99), (40.0, 1, 0.99), (30.0, 8, 0.97), (38.0, 8, 0.97))
GROUP_REQUESTS = 6000
GROUP_WORKERS = 8
GROUP_CACHE = 4800
GROUP_RATE_TOK_S = 9000.0
UNDISPLACED = "ours_undisplaced"  # shared state, but what new blocks push out is not priced
TABLE_POLICIES = (OURS, UNDISPLACED, PLAIN_COST, AFFINITY, TWO_CHOICES, RANDOM)
WARM_UP = 1 / 3  # of the requests of a group load are not counted


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy made of one load."""

    block_hit: float
    token_hit: float
    imbalance: float  # work of the busiest worker / mean
    attainment: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float

    def figures(self, prefix: str) -> dict[str, Figure]:
        """Name the figures."""
        return {
            f"{prefix}.block_hit": round(self.block_hit, 4),
            f"{prefix}.token_hit": round(self.token_hit, 4),
            f"{prefix}.busiest_to_mean": round(self.imbalance, 3),
            f"{prefix}.ttft_attainment": round(self.attainment, 4),
            f"{prefix}.ttft_mean_s": round(self.ttft_mean_s, 4),
            f"{prefix}.ttft_p50_s": round(self.ttft_p50_s, 4),
            f"{prefix}.ttft_p95_s": round(self.ttft_p95_s, 4),
            f"{prefix}.ttft_p99_s": round(self.ttft_p99_s, 4),
        }


def run_trace(
    path: Path,
    spec: ClusterSpec,
    policies: Sequence[str],
    *,
    speedup: float,
    seed: int,
    tell: Progress,
) -> BenchResult:
    """Replay one trace by each policy.

    Raises:
        BenchFailed: the file cannot be read as a trace.
    """
    try:
        workload = read_trace(path, speedup)
    except (OSError, BadTrace, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BenchFailed(f"cannot replay {path}: {reason}") from error
    result = BenchResult("policy", _setup(workload, spec, seed) | {"speedup": speedup})
    ideal = ideal_hit(workload)
    result.reference["ideal_block_hit"] = round(ideal, 4)
    outcomes = {}
    for i, policy in enumerate(policies):
        tell(f"{workload.name}: {policy}", i / len(policies))
        outcomes[policy] = simulate(workload, spec, policy, seed)
        result.figures |= outcomes[policy].figures(policy)
    if OURS in outcomes:
        result.bars += _trace_bars(workload.name, outcomes, ideal)
    return result


def run_table(
    traces: Sequence[Path],
    spec: ClusterSpec,
    routers: Sequence[int],
    *,
    speedup: float,
    seed: int,
    tell: Progress,
) -> BenchResult:
    """Compare all policies on groups of users and on traces, by number of routers.

    Raises:
        BenchFailed: a file cannot be read as a trace.
    """
    result = run_groups(spec, routers, TABLE_POLICIES, seed, tell)
    for path in traces:
        for num_routers in routers:
            cluster = replace(spec, num_routers=num_routers)
            part = run_trace(path, cluster, TABLE_POLICIES, speedup=speedup, seed=seed, tell=tell)
            name = f"{part.figures['load']}_x{speedup:g}_r{num_routers}"
            result.figures |= {f"{name}.{key}": value for key, value in part.figures.items()}
            result.reference |= {f"{name}.{key}": value for key, value in part.reference.items()}
            result.bars += [replace(bar, name=f"{bar.name}, {name}") for bar in part.bars]
    return result


def as_markdown(result: BenchResult) -> str:
    """Write a table of policies: hit, first tokens in time and mean TTFT, a row for each load."""
    suffix = f".{OURS}.token_hit"
    loads = [key.removesuffix(suffix) for key in result.figures if key.endswith(suffix)]
    rows = [" | ".join((load, *(_cell(result, load, p) for p in TABLE_POLICIES))) for load in loads]
    head = " | ".join(("load, routers", *TABLE_POLICIES))
    return "\n".join(
        f"| {row} |" for row in (head, "|".join(["---"] * (len(TABLE_POLICIES) + 1)), *rows)
    )


def _cell(result: BenchResult, load: str, policy: str) -> str:
    told = result.figures
    hit, in_time, mean_s = (
        told[f"{load}.{policy}.{key}"] for key in ("token_hit", "ttft_attainment", "ttft_mean_s")
    )
    return f"{hit} / {in_time} / {mean_s}"


def run_groups(
    base: ClusterSpec, routers: Sequence[int], policies: Sequence[str], seed: int, tell: Progress
) -> BenchResult:
    """Compare the policies on groups of users, by rate and number of routers."""
    result = BenchResult("policy")
    for rate, burst, bar in GROUP_CASES:
        workload = group_workload(GroupLoad(rate, GROUP_REQUESTS, burst), seed)
        for num_routers in routers:
            spec = replace(
                base,
                num_prefill=GROUP_WORKERS,
                num_routers=num_routers,
                cache_units=GROUP_CACHE,
                prefill_tok_s=GROUP_RATE_TOK_S,
            )
            name = f"{rate:g}rps_burst{burst}_r{num_routers}"
            for policy in policies:
                tell(f"{name}: {policy}", 0.0)
                outcome = simulate(workload, spec, policy, seed, warm_up=WARM_UP)
                result.figures |= outcome.figures(f"{name}.{policy}")
                if policy == OURS:
                    result.bars.append(Bar(f"hit, {name}", outcome.token_hit, bar, ">="))
    return result


def simulate(
    workload: Workload, spec: ClusterSpec, policy: str, seed: int, *, warm_up: float = 0.0
) -> Outcome:
    """Run one policy; the first `warm_up` of the requests are not counted."""
    # Displacement and shared state are what is ours; a plain cost has neither.
    config = PolicyConfig() if policy == OURS else PolicyConfig(displacement=0.0)
    world = World(workload, spec, OURS if policy == UNDISPLACED else policy, config, seed)
    world.run()
    counted = sorted(world.requests, key=lambda r: r.number)[int(len(world.requests) * warm_up) :]
    waits = sorted(r.ttft_s for r in counted)
    work = [worker.work_tokens for worker in world.prefill.values()]
    return Outcome(
        block_hit=sum(r.cached_units for r in counted) / sum(len(r.arrival.units) for r in counted),
        token_hit=sum(r.cached_tokens for r in counted) / sum(r.facts.num_tokens for r in counted),
        imbalance=max(work) / statistics.fmean(work),
        attainment=sum(wait <= SLO_TTFT_S for wait in waits) / len(waits),
        ttft_mean_s=statistics.fmean(waits),
        ttft_p50_s=nearest_rank(waits, 0.5),
        ttft_p95_s=nearest_rank(waits, 0.95),
        ttft_p99_s=nearest_rank(waits, 0.99),
    )


def chosen_policies(name: str) -> tuple[str, ...]:
    """Return what a name stands for: one policy, or all."""
    return (name,) if name else POLICIES


def _setup(workload: Workload, spec: ClusterSpec, seed: int) -> dict[str, Figure]:
    return {
        "load": workload.name,
        "requests": len(workload.arrivals),
        "prefill_workers": spec.num_prefill,
        "prefill_tok_s": spec.prefill_tok_s,
        "cache_blocks": spec.cache_units,
        "routers": spec.num_routers,
        "slo_ttft_s": SLO_TTFT_S,
        "seed": seed,
    }


def _trace_bars(name: str, outcomes: dict[str, Outcome], ideal: float) -> list[Bar]:
    ours, bars = outcomes[OURS], []
    if name in TRACE_BARS and ideal > 0:
        least_hit, most_imbalance = TRACE_BARS[name]
        bars.append(Bar("hit / ideal hit", round(ours.block_hit / ideal, 4), least_hit, ">="))
        bars.append(Bar("busiest / mean work", round(ours.imbalance, 3), most_imbalance, "<="))
    if rivals := [outcomes[r].attainment for r in RIVALS if r in outcomes]:
        best = round(max(rivals) - ATTAINMENT_SLACK, 4)
        bars.append(Bar("TTFT attainment", round(ours.attainment, 4), best, ">="))
    return bars
