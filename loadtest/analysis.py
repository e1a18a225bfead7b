"""From what a run left behind to its result. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from loadtest.arrivals import Burst, Constant, Gamma, Offline, Open, Poisson, Trace
from loadtest.checks import Evidence, Window, check_answers, check_run, judge, settling
from loadtest.faults import outcomes
from loadtest.figures import Figures, burst, hurt, interference, makespans, reuse
from loadtest.intervals import wilson
from loadtest.percentiles import CURVE_STEPS, distribution
from loadtest.records import Phase, PoolSize, RequestRecord, Sample, Status
from loadtest.result import (
    Distribution,
    FaultOutcome,
    Group,
    Interval,
    PoolPoint,
    RunResult,
    TimelinePoint,
)
from loadtest.run_log import RunLog
from loadtest.scenario import Scenario
from loadtest.slo import Slo
from loadtest.ttft_bands import ttft_bands

CONFIDENCE = 0.95
_STEADY_KINDS = (Constant, Poisson, Gamma)
_TIMELINE_POINTS = 120
_TIMELINE_STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)

# Everything a record knows that has a distribution: in ms, or a count.
_FIGURES: Mapping[str, Callable[[RequestRecord], float | None]] = {
    "ttft_ms": lambda record: _ms(record.ttft_s),
    "ttft_sent_ms": lambda record: _ms(record.ttft_sent_s),
    "tpot_ms": lambda record: _ms(record.tpot_s),
    "e2e_ms": lambda record: _ms(record.e2e_s),
    "handoff_gap_ms": lambda record: _ms(record.handoff_gap_s),
    "max_stall_ms": lambda record: _ms(record.max_stall_s),
    "dispatch_delay_ms": lambda record: _ms(record.dispatch_delay_s),
    "isl": lambda record: record.isl,
    "osl": lambda record: record.osl,
}
_GROUP_CURVE_STEPS = 50
_GROUP_FIGURES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a result comes from."""

    machine: Mapping[str, Any]
    commit: str


def analyse(
    log: RunLog,
    scenario: Scenario,
    origin: Origin,
    *,
    ideal_hit_ratio: float | None = None,
    measured_s: float | None = None,
) -> RunResult:
    """Turn records and samples into distributions, checks and a verdict.

    Args:
        measured_s: how long was measured, where blocks leave gaps in the measured phase.
    """
    window, measured = measured_part(log.records, scenario, log.duration_s)
    answered = [record for record in measured if record.status is Status.OK]
    faults = tuple(outcomes(log.faults, log.records, scenario.slo, log.duration_s))
    checks = check_answers(log.records, faults) + check_run(
        Evidence(
            window=window,
            ended_s=log.duration_s,
            measured=measured,
            everything=log.records,
            samples=log.samples,
            has_instants=not isinstance(scenario.arrivals, Offline),
            is_open=isinstance(scenario.arrivals, Open | Trace),
            is_stationary=isinstance(scenario.arrivals, _STEADY_KINDS),
        )
    )
    verdict, reason = judge(checks, measured)
    if verdict == "OK" and log.is_interrupted:
        verdict, reason = "INTERRUPTED", "the run ended before its time, and was well until then"
    attainment = attained(measured, scenario.slo, log.duration_s)
    return RunResult(
        scenario=scenario.model_dump(mode="json"),
        scenario_digest=scenario.digest,
        target=asdict(log.facts),
        machine=dict(origin.machine),
        commit=origin.commit,
        seed=scenario.seed,
        started_at=log.started_at,
        duration_s=log.duration_s,
        verdict=verdict,
        verdict_reason=reason,
        counts=_counts(log, measured),
        errors=dict(Counter(record.code for record in measured if record.code)),
        rates=_rates(log, window, measured, attainment, measured_s),
        distributions=distributions(answered, curve_steps=CURVE_STEPS),
        attainment=attainment,
        stages_ms=_stages(answered),
        ttft_bands=ttft_bands(measured),
        groups=tuple(_groups(measured, scenario.slo, log.duration_s)),
        figures=_figures(log, scenario, measured, faults, ideal_hit_ratio),
        checks=checks,
        timeline=tuple(_timeline(log)),
        faults=faults,
        notes=tuple(log.notes),
    )


def attained(records: Sequence[RequestRecord], slo: Slo, ended_s: float) -> Interval | None:
    """Return the share of good requests among those that can be judged; None without limits."""
    if not slo.has_limits:
        return None
    verdicts = [slo.judge(record, ended_s) for record in records]
    judged = [verdict for verdict in verdicts if verdict is not None]
    return wilson(sum(judged), len(judged), CONFIDENCE)


def distributions(
    answered: Sequence[RequestRecord],
    names: Sequence[str] = (*_FIGURES, "itl_ms"),
    *,
    curve_steps: int = 0,
) -> dict[str, Distribution]:
    """Describe what successful requests took; a figure that no request has is left out."""
    described = {}
    for name in names:
        weights: list[int] | None = None
        if name == "itl_ms":
            gaps = [gap for record in answered for gap in record.itls_s]
            values = [gap_s * 1000 for gap_s, _ in gaps]
            weights = [num_tokens for _, num_tokens in gaps]
        else:
            read = _FIGURES[name]
            values = [value for r in answered if (value := read(r)) is not None]
        if values:
            described[name] = distribution(
                values, confidence=CONFIDENCE, weights=weights, curve_steps=curve_steps
            )
    return described


def measured_part(
    records: Sequence[RequestRecord], scenario: Scenario, ended_s: float
) -> tuple[Window, list[RequestRecord]]:
    """Return what counts: the measured phase, without its start where that settles late."""
    phases = scenario.phases
    measured = [record for record in records if record.phase is Phase.MEASURE]
    start_s, end_s = phases.warmup_s, ended_s
    if phases.measure_s is not None:
        end_s = min(end_s, phases.warmup_s + phases.measure_s)
    elif isinstance(scenario.arrivals, Trace) and measured:
        end_s = max(record.scheduled_s for record in measured)  # what came after only drained
    if not phases.warmup_s and isinstance(scenario.arrivals, _STEADY_KINDS):
        answered = [r for r in measured if r.status is Status.OK and r.ttft_s is not None]
        if cut := settling(answered):
            start_s = answered[cut].scheduled_s
            measured = [record for record in measured if record.scheduled_s >= start_s]
    return Window(start_s, max(end_s, start_s)), measured


def _counts(log: RunLog, measured: Sequence[RequestRecord]) -> dict[str, int]:
    by_status = Counter(record.status.value for record in measured)
    return {
        "measured": len(measured),
        **{status.value: by_status[status.value] for status in Status},
        "not_measured": len(log.records) - len(measured),
        "shed": log.num_shed,
        "retries": sum(record.retries for record in measured),
        "migrations": sum(record.migrations for record in measured),
    }


def _rates(
    log: RunLog,
    window: Window,
    measured: Sequence[RequestRecord],
    attainment: Interval | None,
    measured_s: float | None,
) -> dict[str, float]:
    length_s = window.length_s if measured_s is None else measured_s
    if not length_s:
        return {}
    sent = sum(record.sent_s is not None for record in measured)
    tokens = sum(
        chunk.num_tokens
        for record in log.records
        for chunk in record.chunks
        if window.start_s <= chunk.at_s < window.end_s
    )
    read = sum(
        record.isl
        for record in log.records
        if record.chunks and window.start_s <= record.chunks[0].at_s < window.end_s
    )
    rates = {
        "offered_rps": len(measured) / length_s,
        "achieved_rps": sent / length_s,
        "output_tok_s": tokens / length_s,
        "input_tok_s": read / length_s,
    }
    if attainment is not None:
        rates["goodput_rps"] = attainment.value * attainment.count / length_s
    return rates


def _stages(answered: Sequence[RequestRecord]) -> dict[str, Distribution]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for record in answered:
        for stage, value_ms in record.stages_ms.items():
            values[stage].append(value_ms)
    return {s: distribution(found, confidence=CONFIDENCE) for s, found in values.items()}


def _groups(measured: Sequence[RequestRecord], slo: Slo, ended_s: float) -> Iterator[Group]:
    """Split by kind, tenant and cache; a split that leaves everything in one part says nothing."""
    splits: tuple[tuple[str, Callable[[RequestRecord], str]], ...] = (
        ("kind", lambda record: record.kind),
        ("tenant", lambda record: record.tenant),
        ("cache", _cache_part),
        ("mode", lambda record: record.mode),
    )
    for split, part_of in splits:
        parts: defaultdict[str, list[RequestRecord]] = defaultdict(list)
        for record in measured:
            if part := part_of(record):
                parts[part].append(record)
        for part in sorted(parts) if len(parts) > 1 else ():
            records = parts[part]
            answered = [record for record in records if record.status is Status.OK]
            yield Group(
                name=f"{split} {part}",
                num_requests=len(records),
                distributions=distributions(
                    answered, _GROUP_FIGURES, curve_steps=_GROUP_CURVE_STEPS
                ),
                attainment=attained(records, slo, ended_s),
            )


def _cache_part(record: RequestRecord) -> str:
    if record.cached_tokens is None or record.status is not Status.OK:
        return ""
    return "hit" if record.cached_tokens else "miss"


def _figures(
    log: RunLog,
    scenario: Scenario,
    measured: Sequence[RequestRecord],
    faults: Sequence[FaultOutcome],
    ideal: float | None,
) -> Figures:
    figures = reuse(measured, ideal) | interference(measured, CONFIDENCE) | makespans(log.records)
    arrivals = scenario.arrivals
    if isinstance(arrivals, Burst) and scenario.slo.has_limits:
        figures |= burst(log.records, log.samples, scenario.slo, arrivals.off_s, log.duration_s)
    if faults:
        figures |= hurt(log.records, faults)
    return figures


def _timeline(log: RunLog) -> Iterator[TimelinePoint]:
    """Cut the whole run into equal steps."""
    if not log.duration_s:
        return
    wanted_s = log.duration_s / _TIMELINE_POINTS
    step_s = next((s for s in _TIMELINE_STEPS_S if s >= wanted_s), wanted_s)
    steps = [_Step() for _ in range(int(log.duration_s // step_s) + 1)]

    def at(instant_s: float) -> _Step:
        return steps[min(len(steps) - 1, max(0, int(instant_s // step_s)))]

    for record in log.records:
        _count(record, at)
    for sample in log.samples:
        at(sample.at_s).state = sample
    in_flight = 0
    for number, step in enumerate(steps):
        in_flight += step.sent - step.ended
        yield TimelinePoint(
            at_s=number * step_s,
            sent=step.sent,
            finished=step.finished,
            failed=step.failed,
            in_flight=in_flight,
            tokens=step.tokens,
            ttft_p50_ms=median(step.ttfts_ms) if step.ttfts_ms else None,
            replicas=dict(step.state.replicas) if step.state else {},
            queued=step.state.queued if step.state else None,
            pools={size.pool: _pool_point(size) for size in step.state.pools} if step.state else {},
        )


def _pool_point(size: PoolSize) -> PoolPoint:
    return PoolPoint(
        desired=size.desired,
        ready=size.ready,
        pending=size.pending,
        draining=size.draining,
        limited_by=size.limited_by,
    )


@dataclass(slots=True)
class _Step:
    sent: int = 0
    ended: int = 0  # of those that were sent
    finished: int = 0
    failed: int = 0
    tokens: int = 0
    ttfts_ms: list[float] = field(default_factory=list)
    state: Sample | None = None  # the last one in it


def _count(record: RequestRecord, at: Callable[[float], _Step]) -> None:
    if record.sent_s is not None:
        at(record.sent_s).sent += 1
    if record.done_s is not None:
        step = at(record.done_s)
        step.ended += record.sent_s is not None
        step.finished += record.status is Status.OK
        step.failed += record.status is not Status.OK
    for chunk in record.chunks:
        at(chunk.at_s).tokens += chunk.num_tokens
    if record.ttft_s is not None:
        at(record.chunks[0].at_s).ttfts_ms.append(record.ttft_s * 1000)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
