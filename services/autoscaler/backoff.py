"""Starts that end before they serve are made again ever later. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.autoscaler.observation import ReplicaState
from services.autoscaler.sizing import Sizing
from services.autoscaler.staffing import Staffing

_FIRST_S = 10.0
_LONGEST_S = 300.0


def with_lost(sizing: Sizing, now: float) -> Sizing:
    """Count starts that are gone though nobody wanted that; one that came up ends the count."""
    state = sizing.state
    states = {r.replica_id: r.state for r in sizing.seen.replicas}
    lost = [r for r in state.starting if r not in states and r not in state.leaving]
    has_come = any(states.get(r) is ReplicaState.READY for r in state.starting)
    failures, retry_at = (0, None) if has_come else (state.failures, state.retry_at)
    if lost:
        failures += 1
        retry_at = now + min(_FIRST_S * 2 ** min(failures - 1, 16), _LONGEST_S)
    starting = tuple(r for r, s in states.items() if s is ReplicaState.STARTING)
    return replace(
        sizing,
        state=replace(state, starting=starting, failures=failures, retry_at=retry_at),
    )


def without_hopeless(plans: Sequence[Staffing], now: float) -> list[Staffing]:
    """Put off the starts of pools whose last ones failed."""
    return [replace(p, start=0) if is_waiting(p.sizing, now) else p for p in plans]


def is_waiting(sizing: Sizing, now: float) -> bool:
    """Tell whether a pool's next start has to wait."""
    return sizing.state.retry_at is not None and now < sizing.state.retry_at
