"""Which measurements may be believed: present, finite, and not too old. Pure."""

from __future__ import annotations

from math import isfinite

from services.autoscaler.observation import Load, Observation, PoolSeen
from services.autoscaler.policy import MetricsSource, MetricType

LATENCIES = (MetricType.TTFT, MetricType.ITL)
FOLLOW_LOAD = tuple(t for t in MetricType if t not in LATENCIES)


def fresh_value(seen: PoolSeen, name: str, source: MetricsSource, now: float) -> float | None:
    """Return a measurement; None if it is missing, stale, from the future, or no number."""
    reading = seen.readings.get(name)
    if reading is None or not _is_fresh(reading.measured_at, source, now):
        return None
    return reading.value if isfinite(reading.value) and reading.value >= 0 else None


def fresh_load(seen: Observation, source: MetricsSource, now: float) -> Load | None:
    """Return what came in; None if nobody told lately."""
    load = seen.load
    return load if load is not None and _is_fresh(load.measured_at, source, now) else None


def had_no_requests(seen: Observation, source: MetricsSource, now: float) -> bool:
    """Tell whether a latency is missing for want of requests, which is known and not stale."""
    load = fresh_load(seen, source, now)
    return (
        load is not None
        and load.num_requests == 0
        and seen.num_held == 0
        and seen.idle_s >= source.stale_after_seconds
    )


def _is_fresh(measured_at: float, source: MetricsSource, now: float) -> bool:
    # Clocks of two machines differ a little; a moment far ahead is a broken one.
    return abs(now - measured_at) <= source.stale_after_seconds
