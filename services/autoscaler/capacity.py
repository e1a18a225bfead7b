"""What one replica can do, in tokens a second: learnt from work seen, or from a profile. Pure.

Cold replicas are slow: a tick in which one of those that serve still warms up teaches nothing. A
prefill worker is busy only while it computes, and its pace then is what it can. A decode worker
makes as many tokens as its answers ask for: what it would make at its target follows from how its
steps grow with their answers. Until that is known, from half full on it is taken as in proportion;
below, what it makes can only raise the estimate.
"""

from __future__ import annotations

from dataclasses import replace

from services.autoscaler.observation import PoolSeen
from services.autoscaler.policy import CapacityModel, MetricType, Role, Slo
from services.autoscaler.quantity import parse_quantity
from services.autoscaler.sizing import Sizing
from services.autoscaler.state import Capacity
from services.autoscaler.step_line import Full, full_tokens_s, with_steps

_HALF_LIFE_BUSY_S = 600.0  # worker-seconds of work after which a sample weighs half
_MIN_BUSY_S = 5.0  # worker-seconds before there is an estimate at all
_LOADED = 0.5  # of its target: a decode pool below it does not show what it can


def tokens_per_second(capacity: Capacity, profile: float | None) -> float | None:
    """Return the rate learnt, of decode at its target; the profile's, where none is."""
    if capacity.full_tokens_s is not None:
        return capacity.full_tokens_s
    rate = _seen_rate(capacity)
    return profile if rate is None else rate


def rated(model: CapacityModel, capacity: Capacity, profile: float | None) -> float | None:
    """Return the rate that the policy counts with; None = not known yet."""
    if model.source == "Online":
        return tokens_per_second(capacity, profile)
    learnt = tokens_per_second(capacity, None)
    if profile is None or learnt is None or not model.correction.enabled:
        return profile
    least = float(parse_quantity(model.correction.min))
    most = float(parse_quantity(model.correction.max))
    return profile * min(max(learnt / profile, least), most)


def learn(sizing: Sizing, share: float | None, slo: Slo) -> Capacity:
    """Return what is known after a tick.

    Args:
        sizing: the pool.
        share: how full its replicas are, of the target; None = no figure is fresh.
        slo: bounds decode's gaps.
    """
    known = sizing.state.capacity
    staff = sizing.staff
    if not staff.ready or staff.num_settled < len(staff.ready) or not _has_work(sizing.seen):
        return known
    known = _summed(sizing, known, share)
    if sizing.pool.role is not Role.DECODE:
        return known
    line = with_steps(known.steps, sizing.seen.steps)
    found = full_tokens_s(line, _full(sizing, slo))
    return replace(known, steps=line, full_tokens_s=known.full_tokens_s if found is None else found)


def _full(sizing: Sizing, slo: Slo) -> Full:
    most = sizing.seen.most_answers
    for metric in sizing.pool.metrics:
        if metric.type is MetricType.KV_UTILIZATION and most is not None:
            most *= float(metric.target.number)
    return Full(None if slo.itl is None else slo.itl.target_milliseconds / 1000, most)


def _summed(sizing: Sizing, known: Capacity, share: float | None) -> Capacity:
    seen = sizing.seen
    tokens, rate = float(seen.work_tokens), _seen_rate(known)
    if sizing.pool.role is Role.DECODE:
        if share is not None and share >= _LOADED:
            tokens /= min(share, 1.0)
        elif rate is None or tokens / seen.busy_s <= rate:
            return known
    kept = 0.5 ** (seen.busy_s / _HALF_LIFE_BUSY_S)
    return replace(
        known, tokens=known.tokens * kept + tokens, busy_s=known.busy_s * kept + seen.busy_s
    )


def _seen_rate(capacity: Capacity) -> float | None:
    if capacity.busy_s < _MIN_BUSY_S or capacity.tokens <= 0:
        return None
    return capacity.tokens / capacity.busy_s


def _has_work(seen: PoolSeen) -> bool:
    return seen.work_tokens > 0 and seen.busy_s > 0
