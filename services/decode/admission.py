"""Whether a worker takes a work item, and what follows a failed receive. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.limits import Limits
from services.engine.api import EngineLoad

_RECOMPUTE_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds on what one worker takes and holds."""

    max_requests: int = 1024  # open work items; one more is refused as overloaded
    request: Limits = field(default_factory=Limits)  # of one work item
    max_recomputes: int = 32  # local prefills after failed handoffs, per 10 s


@dataclass(frozen=True, slots=True)
class Verdict:
    """Taken, or refused with a code of ERROR_TABLE."""

    is_taken: bool
    code: str = ""
    message: str = ""


def admit(load: EngineLoad, *, is_draining: bool, limits: AdmissionLimits) -> Verdict:
    """Decide on a new work item. The pool-size check is the engine's: it knows its blocks."""
    if is_draining:
        return Verdict(False, "draining", "the worker is draining")
    if load.requests_open >= limits.max_requests:
        return Verdict(
            False, "overloaded", f"the worker holds {limits.max_requests} requests, its limit"
        )
    return Verdict(True)


@dataclass(frozen=True, slots=True)
class LadderStep:
    """The next rung after a failed receive."""

    recompute: bool
    reason: str


class FailureLadder:
    """Failed receive -> prefill here while the budget lasts -> typed error.

    The budget keeps a dead prefill pool from turning every decode worker into a prefill
    worker at the cost of the requests it is decoding.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._recomputes: list[float] = []

    def next_step(self, *, can_recompute: bool, now: float) -> LadderStep:
        """Return the rung for a failure at `now` (monotonic seconds)."""
        if not can_recompute:
            return LadderStep(False, "cancelled")
        self._recomputes = [t for t in self._recomputes if now - t < _RECOMPUTE_WINDOW_S]
        if len(self._recomputes) >= self._limits.max_recomputes:
            return LadderStep(False, "recompute_budget_spent")
        self._recomputes.append(now)
        return LadderStep(True, "local_prefill")
