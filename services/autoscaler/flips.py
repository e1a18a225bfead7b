"""Replicas that change pools: seconds, where a new one takes minutes. Pure.

A pool whose asks were below its size for a while gives some up to a pool that grows, before its own
stabilisation window ends: a flip can be taken back as fast. Its rate policies hold all the same,
and one that grew within that window gives nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.autoscaler.decision import Flip
from services.autoscaler.rates import shrink_limit
from services.autoscaler.sizing import Sizing
from services.autoscaler.staffing import Staffing

_IDLE_S = 30.0  # of asks below its size before a pool counts as idle


def with_idle_given(sizings: Sequence[Sizing], now: float) -> list[Sizing]:
    """Lower idle pools by what others grow, so that the same replicas serve there."""
    given = list(sizings)
    for i, short in enumerate(sizings):
        missing = short.desired - max(short.before, short.staff.num_live)
        for j, idle in enumerate(given):
            if i == j or missing <= 0 or not _is_alike(short, idle):
                continue
            spare = min(_spare(idle, now), missing)
            reason = f"{spare} to pool {short.pool.name}, which is short"
            given[j] = idle.moved(idle.desired - spare, "flip", reason)
            missing -= spare
    return given


def with_flips(staffings: Sequence[Staffing]) -> tuple[list[Staffing], tuple[Flip, ...]]:
    """Let replicas that are to leave one pool fill the other's places."""
    plans, flips = list(staffings), []
    for i, target in enumerate(plans):
        for j, source in enumerate(plans):
            if i == j or not _is_alike(target.sizing, source.sizing):
                continue
            num = min(plans[i].start, len(plans[j].drain))
            moved = plans[j].drain[:num]
            names = (source.sizing.pool.name, target.sizing.pool.name)
            flips += [Flip(replica_id, *names) for replica_id in moved]
            plans[j] = replace(plans[j], drain=plans[j].drain[num:])
            plans[i] = replace(plans[i], start=plans[i].start - num)
    return plans, tuple(flips)


def _is_alike(one: Sizing, other: Sizing) -> bool:
    return one.pool.accelerators_per_replica == other.pool.accelerators_per_replica


def _spare(sizing: Sizing, now: float) -> int:
    """Return how many a pool can do without."""
    down_s = sizing.pool.behavior.scale_down.stabilization_window_seconds
    has_grown = any(c.delta > 0 and c.at > now - down_s for c in sizing.state.changes)
    if has_grown or sizing.desired != sizing.before:
        return 0
    # Asks of ticks without fresh figures or in panic are those of its size.
    wanted = max((a.replicas for a in sizing.state.highs if a.at > now - _IDLE_S), default=0)
    return max(sizing.before - max(wanted, shrink_limit(sizing, now), sizing.floor), 0)
