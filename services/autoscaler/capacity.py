"""What one replica can do, in tokens a second: learnt from work seen, or from a profile. Pure.

Cold replicas are slow. A tick in which one of those that serve still warms up teaches nothing, and
a decode pool that has little to do does not show what it can: its rate then only raises the
estimate.
"""

from __future__ import annotations

from services.autoscaler.observation import PoolSeen
from services.autoscaler.policy import CapacityModel, Role
from services.autoscaler.quantity import parse_quantity
from services.autoscaler.sizing import Sizing
from services.autoscaler.state import Capacity

_HALF_LIFE_BUSY_S = 600.0  # worker-seconds of work after which a sample weighs half
_MIN_BUSY_S = 5.0  # worker-seconds before there is an estimate at all
_LOADED = 0.5  # of a target: a decode pool below it is not at its limit


def tokens_per_second(capacity: Capacity, profile: float | None) -> float | None:
    """Return the rate learnt; the profile's, where none is."""
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


def learn(sizing: Sizing, load_share: float | None) -> Capacity:
    """Return what is known after a tick.

    Args:
        sizing: the pool.
        load_share: the worst metric, of its target; None = no figure is fresh.
    """
    known, seen = sizing.state.capacity, sizing.seen
    staff = sizing.staff
    if not staff.ready or staff.num_settled < len(staff.ready) or not _has_work(seen):
        return known
    rate = tokens_per_second(known, None)
    is_loaded = sizing.pool.role is Role.PREFILL or (load_share or 0.0) >= _LOADED
    if not is_loaded and (rate is None or seen.work_tokens / seen.busy_s <= rate):
        return known
    kept = 0.5 ** (seen.busy_s / _HALF_LIFE_BUSY_S)
    return Capacity(known.tokens * kept + seen.work_tokens, known.busy_s * kept + seen.busy_s)


def _has_work(seen: PoolSeen) -> bool:
    return seen.work_tokens > 0 and seen.busy_s > 0
