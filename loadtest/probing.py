"""Runs the probes of a search against a target, and puts its result together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.analysis import CONFIDENCE, Origin, analyse
from loadtest.intervals import wilson
from loadtest.launch import Watch
from loadtest.percentiles import share_of
from loadtest.records import Phase, RequestRecord
from loadtest.result import Probe, RunResult, SearchResult
from loadtest.run_log import RunLog
from loadtest.scenario import Scenario
from loadtest.search import EarlyEnd, RateSearch, SearchOrder, State, knee_rps, state_of
from services.common.errors import ConfigError

if TYPE_CHECKING:
    from loadtest.runner import Runner

_LOOK_S = 0.25
_MIN_REQUESTS = 100  # of a probe; fewer cannot tell 95 % from less
_MAX_STRETCH = 5.0  # of a probe's time, to get them

RunProbe = Callable[[Scenario, Watch | None], RunLog]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pools:
    """How workers are split."""

    prefill: int
    decode: int


@dataclass(slots=True)
class _Decision:
    state: State | None = None


def search(
    scenario: Scenario, order: SearchOrder, origin: Origin, run: RunProbe, *,
    budget_s: float, now: Callable[[], float], tell: Tell,
) -> SearchResult:  # fmt: skip
    """Probe one rate after another until there is an answer, or the time is over.

    Args:
        run: sends the load, at most for the scenario's time; a watch may end it early.
        tell: takes a line after every probe.

    Raises:
        ConfigError: the budget is shorter than one probe.
    """
    began_s = now()
    rates = RateSearch(order)
    first: RunResult | None = None
    while (rate := rates.next_rate()) is not None:
        # Runs of the rate that is left must not repeat what was already seen: others of it.
        seed = scenario.seed + rates.num_reruns
        at_rate = stretched(scenario.at_rate(rate).model_copy(update={"seed": seed}), rate)
        probe_s = at_rate.phases.end_s or 0.0
        if first is None and probe_s > budget_s:
            raise ConfigError(
                f"one probe at {rate:g} requests/s takes {probe_s:g} s, and the budget of the "
                f"search is {budget_s:g} s"
            )
        if now() - began_s + probe_s > budget_s and first is not None:
            rates.give_up(f"{budget_s:g} s are over")
            break
        decision = _Decision()
        log = run(at_rate, _ends_early(at_rate, order, decision))
        result = analyse(log, at_rate, origin)
        first = first or result
        if log.is_interrupted and decision.state is None:
            rates.give_up("stopped while a probe ran")
            break
        if result.verdict == "CLIENT_BOUND":
            rates.give_up(
                f"this client is not up to {rate:.4g} requests/s: {result.verdict_reason}"
            )
            break
        probe = probe_of(result, rate, order, decision.state)
        rates.take(probe)
        tell(
            f"{rate:8.3f} requests/s: {probe.state}, {probe.attainment.value:.1%} of "
            f"{probe.attainment.count} good"
        )
    assert first is not None, "a search has at least one probe"
    return SearchResult(
        scenario=scenario.model_dump(mode="json"),
        scenario_digest=scenario.digest,
        target=first.target,
        machine=first.machine,
        commit=first.commit,
        seed=scenario.seed,
        started_at=first.started_at,
        duration_s=now() - began_s,
        target_share=order.target_share,
        verdict=rates.verdict or "UNRESOLVED",
        verdict_reason=rates.reason,
        best_rps=rates.best_rps,
        knee_rps=knee_rps(rates.probes),
        probes=tuple(rates.probes),
        verified=tuple(rates.verified),
    )


def search_splits(
    total: int, search_at: Callable[[Pools], SearchResult], has_time: Callable[[], bool]
) -> SearchResult:
    """Search with so many workers in two pools; the best split's result, with every probe.

    Once there is no time for another split, the best of those that were tried is not sure.

    Capacity rises with the size of the smaller pool until the other one is: from the middle on it
    is climbed in steps that are halved, instead of trying every split.
    """
    found: dict[int, SearchResult] = {}
    left_out: set[int] = set()

    def capacity(prefill: int) -> float:
        if not 0 < prefill < total:
            return -1.0
        if prefill not in found:
            if found and not has_time():
                left_out.add(prefill)
                return -1.0
            pools = Pools(prefill, total - prefill)
            found[prefill] = _placed(search_at(pools), pools)
        return found[prefill].best_rps or 0.0

    best, step = total // 2, max(1, total // 4)
    while step:
        higher = max((best, best - step, best + step), key=capacity)
        step = step if higher != best else step // 2
        best = higher
    chosen = found[best]
    others = [probe for prefill in sorted(found) for probe in found[prefill].probes]
    verdict, why = chosen.verdict, chosen.verdict_reason
    if left_out and verdict == "FOUND":
        verdict, why = "UNRESOLVED", f"there was no time for others; {why}"
    return chosen.model_copy(
        update={
            "verdict": verdict,
            "probes": tuple(others),
            "duration_s": sum(result.duration_s for result in found.values()),
            "verdict_reason": f"{best} prefill and {total - best} decode workers, the best of "
            f"{len(found)} splits: {why}",
        }
    )


def _placed(result: SearchResult, pools: Pools) -> SearchResult:
    changes = {
        "gpus": pools.prefill + pools.decode,
        "prefill_workers": pools.prefill,
        "decode_workers": pools.decode,
    }
    probes, verified = (
        tuple(probe.model_copy(update=changes) for probe in part)
        for part in (result.probes, result.verified)
    )
    return result.model_copy(update={"probes": probes, "verified": verified})


def probe_s(scenario: Scenario, rate_rps: float) -> float:
    """Return how long a probe takes at most in the time of its target."""
    return stretched(scenario, rate_rps).phases.end_s or 0.0


def stretched(scenario: Scenario, rate_rps: float) -> Scenario:
    """Give a slow rate the time it needs for enough requests."""
    phases = scenario.phases
    if phases.measure_s is None:
        return scenario
    wanted_s = min(_MIN_REQUESTS / rate_rps, _MAX_STRETCH * phases.measure_s)
    longer = phases.model_copy(update={"measure_s": max(phases.measure_s, wanted_s)})
    enough_s = max(scenario.budget_s, (longer.end_s or 0.0) + scenario.client.drain_s)
    return scenario.model_copy(update={"phases": longer, "budget_s": enough_s})


def probe_of(
    result: RunResult,
    rate_rps: float,
    order: SearchOrder,
    decided: State | None = None,
) -> Probe:
    """Read a run as a point of the curve."""
    attainment = result.attainment or wilson(0, 0, CONFIDENCE)
    state, reason = decided or state_of(attainment, order.target_share), "by the interval"
    if decided:
        reason = "ended early"
    if result.verdict == "SATURATED":  # it would miss if it ran longer
        state, reason = "missed", result.verdict_reason
    tpot = result.distributions.get("tpot_ms")
    tpot_ms = share_of(tpot, 0.5) if tpot is not None else None
    return Probe(
        offered_rps=rate_rps,
        achieved_rps=result.rates.get("achieved_rps", 0.0),
        attainment=attainment,
        state=state,
        reason=reason,
        duration_s=result.duration_s,
        output_tok_s=result.rates.get("output_tok_s", 0.0),
        user_tok_s=1000 / tpot_ms if tpot_ms else None,
        distributions={
            name: found.model_copy(update={"curve": ()})
            for name, found in result.distributions.items()
            if name in ("ttft_ms", "tpot_ms", "e2e_ms")
        },
    )


def _ends_early(scenario: Scenario, order: SearchOrder, decision: _Decision) -> Watch:
    early = EarlyEnd(order.target_share, scenario.phases.measure_s or 0.0)
    decided: dict[int, bool] = {}  # by number; a look at every token of every request takes long

    def judge(record: RequestRecord, now_s: float) -> bool | None:
        verdict = decided.get(record.number)
        if verdict is None and (verdict := scenario.slo.judge(record, now_s)) is not None:
            decided[record.number] = verdict
        return verdict

    async def watch(runner: Runner) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            now_s = runner.clock()
            measured = [r for r in runner.log.records if r.phase is Phase.MEASURE]
            measured.sort(key=lambda record: record.scheduled_s)
            verdicts = [judge(record, now_s) for record in measured]
            decision.state = early.look(verdicts, now_s - scenario.phases.warmup_s)
            if decision.state is not None:
                runner.stop()
                return

    return watch
