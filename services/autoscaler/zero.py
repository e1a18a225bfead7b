"""Both pools to no replica at all, and back: never one of them alone. Pure.

Pools shrink to one by their own rules. From there they leave together once nobody has asked for
anything long enough, and come back together as soon as a request waits at a router.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.autoscaler.observation import Load, Observation
from services.autoscaler.sizing import Sizing


def with_zero(
    sizings: Sequence[Sizing], seen: Observation, load: Load | None, min_accelerators: int
) -> list[Sizing]:
    """Take all pools to zero or back from it.

    Args:
        sizings: every pool, within its bounds.
        seen: what waits, and since when nothing came.
        load: fresh figures of what came in; None = nobody told, which is no proof of idleness.
        min_accelerators: that are always kept.
    """
    may_be_zero = min_accelerators == 0 and all(
        s.pool.scale_to_zero.enabled and s.limits.min_replicas == 0 for s in sizings
    )
    if not may_be_zero:
        return list(sizings)
    has_work = seen.num_held > 0 or (load is not None and load.num_requests > 0)
    if all(s.before == 0 for s in sizings):
        if has_work:
            return list(sizings)
        return [s.moved(0, "zero", "no request waits") for s in sizings]
    idle_s = max(s.pool.scale_to_zero.idle_seconds for s in sizings)
    is_idle = not has_work and load is not None and seen.idle_s >= idle_s
    if not is_idle or any(s.desired > 1 or not s.may_shrink for s in sizings):
        return list(sizings)
    return [s.moved(0, "zero", f"no request for {idle_s} s") for s in sizings]
