"""`isthmus bench policy`: request traces through the router's real decisions, in virtual time.

Each policy meets the same prompts on the same simulated workers. What is compared: how much of
the ideal hit it finds, how evenly the work spreads, and how many requests are in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from services.bench.result import Bar, BenchFailed, BenchResult, Figure
from services.common.progress import Progress
from services.sim.cluster import PREFILL, ClusterSpec
from services.sim.groups import GroupLoad, group_workload
from services.sim.mooncake import read_trace
from services.sim.performance import PerformanceModel
from services.sim.placement import (
    AFFINITY,
    OURS,
    PLAIN_COST,
    POLICIES,
    RANDOM,
    ROUND_ROBIN,
    TWO_CHOICES,
    UNDISPLACED,
)
from services.sim.report import Served, SimReport
from services.sim.simulate import simulate
from services.sim.trace_file import BadTrace
from services.sim.workload import Workload, ideal_hit

SLO_TTFT_S = 2.0
SLO_TPOT_S = 0.05
RIVALS = (AFFINITY, TWO_CHOICES, PLAIN_COST, ROUND_ROBIN)
ATTAINMENT_SLACK = 0.01
# Share of requests in time, at least, of the traces at this pace on pools of this size.
MIN_ATTAINMENT, TABLE_SPEEDUP, TABLE_POOLS = 0.93, 2.67, (8, 8)
# Share of the ideal hit, at least, and busiest worker to mean, at most, by name of the trace.
TRACE_BARS = {
    "mooncake_conversation_trace": (0.85, 1.25),
    "mooncake_synthetic_trace": (0.95, 1.5),
}
# Requests a second, how many arrive at one instant, and the hit to reach at any number of routers.
GROUP_CASES = ((30.0, 1, 0.99), (40.0, 1, 0.99), (30.0, 8, 0.97), (38.0, 8, 0.97))
GROUP_REQUESTS = 6000
GROUP_WORKERS = 8
GROUP_CACHE_BLOCKS = 4800 * 4  # 4,800 strides of 64 tokens
GROUP_RATE_TOK_S = 9000.0
TABLE_POLICIES = (OURS, UNDISPLACED, PLAIN_COST, AFFINITY, TWO_CHOICES, ROUND_ROBIN, RANDOM)
WARM_UP = 1 / 3  # of the requests of a group load are not counted


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
    except (OSError, BadTrace) as error:
        reason = getattr(error, "strerror", None) or error
        raise BenchFailed(f"cannot replay {path}: {reason}") from error
    result = BenchResult("policy", _setup(workload, spec, seed) | {"speedup": speedup})
    ideal = ideal_hit(workload)
    result.reference["ideal_block_hit"] = round(ideal, 4)
    outcomes: dict[str, SimReport] = {}
    for i, policy in enumerate(policies):
        tell(f"{workload.name}: {policy}", i / len(policies))
        outcomes[policy] = simulate(workload, spec, policy=policy, seed=seed)
        result.figures |= _figures(outcomes[policy], policy)
    if OURS in outcomes:
        result.bars += _trace_bars(workload.name, outcomes, ideal)
        pools = (spec.num_prefill, spec.num_decode)
        if workload.name in TRACE_BARS and (*pools, speedup) == (*TABLE_POOLS, TABLE_SPEEDUP):
            reached = round(_attainment(outcomes[OURS]), 4)
            result.bars.append(Bar("attainment", reached, MIN_ATTAINMENT, ">="))
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
        told[f"{load}.{policy}.{key}"] for key in ("token_hit", "attainment", "ttft_mean_s")
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
                model=_group_model(base.model),
            )
            name = f"{rate:g}rps_burst{burst}_r{num_routers}"
            for policy in policies:
                tell(f"{name}: {policy}", 0.0)
                report = simulate(workload, spec, policy=policy, seed=seed).skip(WARM_UP)
                result.figures |= _figures(report, f"{name}.{policy}")
                if policy == OURS:
                    result.bars.append(Bar(f"hit, {name}", report.token_hit, bar, ">="))
    return result


def _group_model(base: PerformanceModel) -> PerformanceModel:
    """Return slower workers with less room, so that groups have to be kept apart."""
    pace = base.prefill.model_copy(update={"fixed_s": 0.0, "token_s": 1 / GROUP_RATE_TOK_S})
    return base.model_copy(update={"prefill": pace, "kv_blocks": GROUP_CACHE_BLOCKS})


def _figures(report: SimReport, prefix: str) -> dict[str, Figure]:
    """Name the figures of one run."""
    told: dict[str, float | None] = {
        "block_hit": report.block_hit,
        "token_hit": report.token_hit,
        "busiest_to_mean": _imbalance(report),
        "attainment": _attainment(report),
        "ttft_mean_s": report.mean(_ttft_s),
        "ttft_p50_s": report.quantile(_ttft_s, 0.5),
        "ttft_p95_s": report.quantile(_ttft_s, 0.95),
        "ttft_p99_s": report.quantile(_ttft_s, 0.99),
        "tpot_p95_s": report.quantile(_tpot_s, 0.95),
    }
    return {
        f"{prefix}.{key}": None if value is None else round(value, 4) for key, value in told.items()
    }


def _ttft_s(served: Served) -> float | None:
    return served.ttft_s


def _tpot_s(served: Served) -> float | None:
    return served.tpot_s


def _attainment(report: SimReport) -> float:
    return report.attainment(SLO_TTFT_S, SLO_TPOT_S)


def _imbalance(report: SimReport) -> float:
    """Return the work of the busiest prefill worker over that of the mean one."""
    return report.pools[PREFILL].busiest_to_mean


def chosen_policies(name: str) -> tuple[str, ...]:
    """Return what a name stands for: one policy, or all."""
    return (name,) if name else POLICIES


def _setup(workload: Workload, spec: ClusterSpec, seed: int) -> dict[str, Figure]:
    return {
        "load": workload.name,
        "requests": len(workload.arrivals),
        "prefill_workers": spec.num_prefill,
        "decode_workers": spec.num_decode,
        "performance_model": spec.model.name,
        "kv_blocks": spec.model.kv_blocks,
        "routers": spec.num_routers,
        "slo_ttft_s": SLO_TTFT_S,
        "slo_tpot_s": SLO_TPOT_S,
        "seed": seed,
    }


def _trace_bars(name: str, outcomes: dict[str, SimReport], ideal: float) -> list[Bar]:
    ours, bars = outcomes[OURS], []
    if name in TRACE_BARS and ideal > 0:
        least_hit, most_imbalance = TRACE_BARS[name]
        bars.append(Bar("hit / ideal hit", round(ours.block_hit / ideal, 4), least_hit, ">="))
        imbalance = round(_imbalance(ours), 3)
        bars.append(Bar("busiest / mean work", imbalance, most_imbalance, "<="))
    if rivals := [_attainment(outcomes[rule]) for rule in RIVALS if rule in outcomes]:
        best = round(max(rivals) - ATTAINMENT_SLACK, 4)
        bars.append(Bar("attainment", round(_attainment(ours), 4), best, ">="))
    return bars
