"""What is right in a policy and probably not meant. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from services.autoscaler.policy import (
    Fault,
    MetricType,
    PolicySpec,
    Pool,
    PredictiveMode,
    Schedule,
    TargetType,
)
from services.autoscaler.schedules import active_schedules, limits_under, next_start

_NUM_STARTS = 8  # of each schedule looked at for what it meets


def policy_notes(spec: PolicySpec, unix_s: float) -> Iterator[Fault]:
    """Tell what to look at again; schedules are looked at from a moment on."""
    for i, pool in enumerate(spec.pools):
        yield from _zero_notes(f"spec.pools[{i}]", pool, spec.schedules)
        yield from _slo_notes(f"spec.pools[{i}]", pool, spec)
    yield from _profile_notes(spec)
    yield from _overlap_notes(spec, unix_s)


def _zero_notes(path: str, pool: Pool, schedules: Sequence[Schedule]) -> Iterator[Fault]:
    least = [pool.min_replicas, *(limits_under(pool, [s]).min_replicas for s in schedules)]
    if pool.scale_to_zero.enabled and min(least) > 0:
        yield Fault(
            f"{path}.scaleToZero.enabled",
            f"comes to nothing: minReplicas is never below {min(least)}",
        )


def _slo_notes(path: str, pool: Pool, spec: PolicySpec) -> Iterator[Fault]:
    """A pool that grows only once its latency is missed grows too late."""
    slos = {MetricType.TTFT: spec.slo.ttft, MetricType.ITL: spec.slo.itl}
    for i, metric in enumerate(pool.metrics):
        slo = slos.get(metric.type)
        if slo is None or metric.target.type is not TargetType.VALUE:
            continue
        target_ms = float(metric.target.number * 1000)
        if target_ms >= slo.target_milliseconds:
            yield Fault(
                f"{path}.metrics[{i}].target.value",
                f"{target_ms:g} ms is not below the SLO, {slo.target_milliseconds} ms: "
                "the pool grows only when it is missed",
            )


def _profile_notes(spec: PolicySpec) -> Iterator[Fault]:
    """How much decode carries by a profile depends on the gap that is allowed."""
    predictive = spec.predictive
    is_profiled = predictive.capacity_model.source == "Profile"
    if predictive.mode is not PredictiveMode.OFF and is_profiled and spec.slo.itl is None:
        yield Fault(
            "spec.predictive.capacityModel.source",
            "without slo.itl a profile says nothing of decode, and nothing is forecast for it",
        )


def _overlap_notes(spec: PolicySpec, unix_s: float) -> Iterator[Fault]:
    """Each schedule fits the budget alone; those that hold together have the highest limits."""
    cap = spec.budget.accelerator_cap
    if cap is None:
        return
    for i, schedule in enumerate(spec.schedules):
        start = unix_s
        for _ in range(_NUM_STARTS):
            start = next_start(schedule, start)
            active = active_schedules(spec.schedules, start)
            needed = sum(
                limits_under(pool, active).min_replicas * pool.accelerators_per_replica
                for pool in spec.pools
            )
            if needed > cap:
                names = ", ".join(s.name for s in active)
                yield Fault(
                    f"spec.schedules[{i}]",
                    f"at {datetime.fromtimestamp(start, UTC):%Y-%m-%d %H:%M} UTC {names} hold "
                    f"together: minReplicas take {needed} accelerators, the budget allows {cap}",
                )
                break
