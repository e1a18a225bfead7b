"""Whether fewer replicas could carry the load: refused where their targets would break. Pure."""

from __future__ import annotations

from services.autoscaler.policy import MetricsSource, Role
from services.autoscaler.proposals import load_share
from services.autoscaler.readings import FOLLOW_LOAD, LATENCIES
from services.autoscaler.sizing import Sizing

_ROUNDING = 1e-9


def with_consolidation(sizing: Sizing, source: MetricsSource, now: float) -> Sizing:
    """Shrink only so far that the load of now leaves headroom on those that stay."""
    check = sizing.pool.behavior.scale_down.consolidation_check
    least = max(sizing.desired, 1)  # none at all is decided for both pools together
    if not check.enabled or least >= sizing.before:
        return sizing
    headroom = 1 + check.headroom_percent / 100
    for size in range(least, sizing.before):
        if _carried(sizing, source, size, now) * headroom <= 1 + _ROUNDING:
            return sizing if size == least else _kept_at(sizing, size)
    return _kept_at(sizing, sizing.before)


def _carried(sizing: Sizing, source: MetricsSource, size: int, now: float) -> float:
    """Return how much of its limit the worst figure takes on so many."""
    worst = load_share(sizing, source, size, now, FOLLOW_LOAD)
    if sizing.pool.role is Role.PREFILL:
        # A queue that has drained says nothing of the work that goes on. A prefill worker is busy
        # only while it computes; a decode worker all the time it holds one answer.
        busy = sizing.before if sizing.state.busy is None else sizing.state.busy
        return max(worst or 0.0, busy / size)
    if worst is None:
        # Much of a latency is there with no load at all: it is asked only where nothing else is.
        worst = load_share(sizing, source, size, now, LATENCIES)
    return worst or 0.0


def _kept_at(sizing: Sizing, size: int) -> Sizing:
    reason = f"fewer than {size} could not carry what {sizing.before} do"
    return sizing.moved(size, "consolidation", reason)
