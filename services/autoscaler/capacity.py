"""What one replica can do, in tokens a second: learnt from work seen, or from a profile. Pure.

Cold replicas are slow: a tick in which one of those that serve still warms up teaches nothing. A
prefill worker is busy only while it computes, and its pace then is what it can. A decode worker
makes as many tokens as its answers ask for: from half full on, what it would make at its target is
in proportion; below, what it makes can only raise the estimate.
"""

from __future__ import annotations

from services.autoscaler.observation import PoolSeen
from services.autoscaler.policy import CapacityModel, Role
from services.autoscaler.quantity import parse_quantity
from services.autoscaler.sizing import Sizing
from services.autoscaler.state import Capacity

_HALF_LIFE_BUSY_S = 600.0  # worker-seconds of work after which a sample weighs half
_MIN_BUSY_S = 5.0  # worker-seconds before there is an estimate at all
_LOADED = 0.5  # of its target: a decode pool below it does not show what it can


def tokens_per_second(capacity: Capacity, profile: float | None) -> float | None:
    """Return the rate learnt, of decode at its target; the profile's, where none is."""
    if capacity.busy_s < _MIN_BUSY_S or capacity.tokens <= 0:
        return profile
    return capacity.tokens / capacity.busy_s


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


def learn(sizing: Sizing, share: float | None) -> Capacity:
    """Return what is known after a tick.

    Args:
        sizing: the pool.
        share: how full its replicas are, of the target; None = no figure is fresh.
    """
    known, seen = sizing.state.capacity, sizing.seen
    staff = sizing.staff
    if not staff.ready or staff.num_settled < len(staff.ready) or not _has_work(seen):
        return known
    tokens, rate = float(seen.work_tokens), tokens_per_second(known, None)
    if sizing.pool.role is Role.DECODE:
        if share is not None and share >= _LOADED:
            tokens /= min(share, 1.0)
        elif rate is None or tokens / seen.busy_s <= rate:
            return known
    kept = 0.5 ** (seen.busy_s / _HALF_LIFE_BUSY_S)
    return Capacity(known.tokens * kept + tokens, known.busy_s * kept + seen.busy_s)


def _has_work(seen: PoolSeen) -> bool:
    return seen.work_tokens > 0 and seen.busy_s > 0
