"""What is wrong between the sections of a policy file that are right by themselves. Pure.

Sections tell faults between their own fields (`PolicySection.faults`). Here are those that take two
of them, each judged where all it looks at could be read: a wrong `drain` hides no wrong budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from services.autoscaler.policy import (
    Budget,
    Fault,
    MetricsSource,
    PolicySpec,
    Pool,
    PoolSize,
    Predictive,
    PredictiveMode,
    Ratio,
    Role,
    Schedule,
    SelectPolicy,
)
from services.autoscaler.schedules import limits_under
from services.common.config_source import did_you_mean


@dataclass(frozen=True, slots=True)
class Parts:
    """What could be read of a spec; None = wrong in itself."""

    sizes: tuple[PoolSize, ...] | None  # None = not all of them
    pools: tuple[Pool | None, ...]
    schedules: tuple[Schedule | None, ...]
    budget: Budget | None
    ratio: Ratio | None
    predictive: Predictive | None
    metrics: MetricsSource | None
    tick_seconds: int | None

    @classmethod
    def of(cls, spec: PolicySpec) -> Self:
        """All of a spec."""
        return cls(
            spec.pools, spec.pools, spec.schedules, spec.budget, spec.ratio, spec.predictive,
            spec.metrics, spec.tick_seconds,
        )  # fmt: skip


def spec_faults(parts: Parts) -> Iterator[Fault]:
    """Tell every fault, at its place in the file."""
    yield from _timing_faults(parts)
    yield from _repeated("spec.schedules", [None if s is None else s.name for s in parts.schedules])
    if parts.sizes is None:
        return
    sizes = parts.sizes
    yield from _repeated("spec.pools", [size.name for size in sizes])
    roles = [size.role for size in sizes]
    if sorted(roles) != sorted(Role):
        yield Fault("spec.pools", f"must be one of role Prefill and one of Decode: {_told(roles)}")
        return  # every other rule is about the two together
    always = list(_size_faults("spec.pools", parts, sizes))
    yield from always
    yield from _start_faults(parts, sizes)
    for i, schedule in enumerate(parts.schedules):
        if schedule is not None:
            found = _schedule_faults(f"spec.schedules[{i}]", parts, sizes, schedule)
            yield from (f for f in found if all(f.message != a.message for a in always))


def _told(roles: Sequence[Role]) -> str:
    return ", ".join(f"{roles.count(role)} of {role}" for role in Role)


def _repeated(path: str, names: Sequence[str | None]) -> Iterator[Fault]:
    for i, name in enumerate(names):
        if name is not None and name in names[:i]:
            yield Fault(f"{path}[{i}].name", f'"{name}" is there already')


def _timing_faults(parts: Parts) -> Iterator[Fault]:
    """Figures live at least a tick, and no size is changed twice for the same ones."""
    tick, metrics, predictive = parts.tick_seconds, parts.metrics, parts.predictive
    if metrics is not None:
        stale = metrics.stale_after_seconds
        if tick is not None and stale < tick:
            yield Fault(
                "spec.metrics.staleAfterSeconds",
                f"{stale} is less than tickSeconds, {tick}: figures would be missing at every tick",
            )
        for i, pool in enumerate(parts.pools):
            yield from _window_faults(i, pool, stale)
    if predictive is None or tick is None or predictive.mode is PredictiveMode.OFF:
        return
    if predictive.interval_seconds < tick:
        yield Fault(
            "spec.predictive.intervalSeconds",
            f"{predictive.interval_seconds} is less than tickSeconds, {tick}",
        )


def _window_faults(i: int, pool: Pool | None, stale_s: int) -> Iterator[Fault]:
    if pool is None or pool.behavior.scale_down.select_policy is SelectPolicy.DISABLED:
        return
    window = pool.behavior.scale_down.stabilization_window_seconds
    if window < stale_s:
        yield Fault(
            f"spec.pools[{i}].behavior.scaleDown.stabilizationWindowSeconds",
            f"{window} is less than metrics.staleAfterSeconds, {stale_s}: "
            "a pool could shrink twice for the same figure",
        )


def _size_faults(
    path: str, parts: Parts, sizes: Sequence[PoolSize], schedule: Schedule | None = None
) -> Iterator[Fault]:
    """Limits of both pools, under one schedule or none, beside budget and ratio."""
    active = [] if schedule is None else [schedule]
    limits = [limits_under(size, active) for size in sizes]
    least = [limit.min_replicas for limit in limits]
    most = [limit.max_replicas for limit in limits]
    if any(low > high for low, high in zip(least, most, strict=True)):
        return  # told at the pool or at the schedule
    if (0 in least) and any(least):
        yield Fault(path, "minReplicas must be 0 for both pools or for none")
    if parts.budget is not None:
        yield from _budget_faults(path, parts.budget, sizes, least, most)
    if parts.ratio is not None:
        yield from _ratio_faults(path, parts.ratio, sizes, least, most)


def _budget_faults(
    path: str,
    budget: Budget,
    sizes: Sequence[PoolSize],
    least: Sequence[int],
    most: Sequence[int],
) -> Iterator[Fault]:
    yield from _cap_faults(path, "minReplicas", budget, sizes, least)
    at_most = _accelerators(sizes, most)
    if at_most < budget.min_accelerators:
        yield Fault(
            path,
            f"maxReplicas take {at_most} accelerators together, "
            f"budget.minAccelerators is {budget.min_accelerators}",
        )


def _cap_faults(
    path: str, key: str, budget: Budget, sizes: Sequence[PoolSize], counts: Sequence[int]
) -> Iterator[Fault]:
    needed, cap = _accelerators(sizes, counts), budget.accelerator_cap
    if cap is not None and needed > cap:
        yield Fault(path, f"{key} take {needed} accelerators together, the budget allows {cap}")


def _accelerators(sizes: Sequence[PoolSize], counts: Sequence[int]) -> int:
    pairs = zip(sizes, counts, strict=True)
    return sum(size.accelerators_per_replica * count for size, count in pairs)


def _ratio_faults(
    path: str, ratio: Ratio, sizes: Sequence[PoolSize], least: Sequence[int], most: Sequence[int]
) -> Iterator[Fault]:
    """Some sizes within the limits have to keep the ratio."""
    if ratio.bounds is None:
        return
    low, high = ratio.bounds
    if low > high:
        return  # told at the ratio
    prefill = next(i for i, size in enumerate(sizes) if size.role is Role.PREFILL)
    decode = 1 - prefill
    # Fewest prefill replicas to most of decode, and the other way round.
    fewest, largest = max(least[prefill], 1), max(least[decode], 1)
    if fewest > high * most[decode] or most[prefill] < low * largest:
        yield Fault(
            path,
            f"no sizes within minReplicas and maxReplicas have {low} to {high} prefill replicas "
            "for each decode replica, as spec.ratio wants",
        )


def _schedule_faults(
    path: str, parts: Parts, sizes: Sequence[PoolSize], schedule: Schedule
) -> Iterator[Fault]:
    by_name = {size.name: size for size in sizes}
    for name in schedule.pools:
        at = f"{path}.pools.{name}"
        pool = by_name.get(name)
        if pool is None:
            yield Fault(at, f"no such pool{did_you_mean(name, list(by_name))}")
            continue
        limits = limits_under(pool, [schedule])
        if limits.min_replicas > limits.max_replicas:
            yield Fault(
                at,
                f"minReplicas, {limits.min_replicas}, is more than maxReplicas, "
                f"{limits.max_replicas} (what is left out is the pool's own)",
            )
        if limits.min_replicas == 0 and not pool.scale_to_zero.enabled:
            yield Fault(f"{at}.minReplicas", "0 needs scaleToZero.enabled of the pool")
    yield from _size_faults(f"{path}.pools", parts, sizes, schedule)


def _start_faults(parts: Parts, sizes: Sequence[PoolSize]) -> Iterator[Fault]:
    """What there is at the start fits, and forecasts see past it."""
    if parts.budget is not None:
        first = [size.initial_replicas or 0 for size in sizes]
        yield from _cap_faults("spec.pools", "initialReplicas", parts.budget, sizes, first)
    predictive = parts.predictive
    if predictive is None or predictive.mode is PredictiveMode.OFF:
        return
    slowest = max(sizes, key=lambda size: size.startup.expected_seconds)
    expected_s = slowest.startup.expected_seconds
    if predictive.look_ahead_seconds < expected_s:
        yield Fault(
            "spec.predictive.lookAheadSeconds",
            f"{predictive.look_ahead_seconds} is less than a replica of {slowest.name} takes to "
            f"start, {expected_s} s: it would come too late",
        )
