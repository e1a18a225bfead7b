"""Whether a process lives and can serve, as probes ask for it. Judged by values alone.

The event loop tells how things stand several times a second; a probe is answered by another thread.
So a loop that stands still is found out, where an answer of its own would only be late.
"""

from __future__ import annotations

from dataclasses import dataclass

LOOP_PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer to a probe; `reason` is for people and holds no secret."""

    is_good: bool
    reason: str = "ok"


@dataclass(frozen=True, slots=True)
class Reading:
    """How things stood at `told_at` (seconds of the clock that `Vitals` is asked with).

    `why_dead` and `why_not_ready` are empty where nothing is wrong. Idle is neither.
    """

    told_at: float
    why_dead: str = ""
    why_not_ready: str = ""


class Vitals:
    """The last reading. One thread tells, any thread asks."""

    def __init__(self, patience_s: float = LOOP_PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._last: Reading | None = None

    def tell(self, reading: Reading) -> None:
        """Put a newer reading in the place of the last one."""
        self._last = reading

    def is_live(self, now: float) -> Verdict:
        """Bad where only a restart helps: a dead engine, or a loop that stands still.

        Before the first reading a process starts, which has a probe and a patience of its own.
        """
        last = self._last
        if last is None:
            return Verdict(is_good=True, reason="starting")
        if stands_still := self._why_still(last, now):
            return Verdict(is_good=False, reason=stands_still)
        return Verdict(not last.why_dead, last.why_dead or "ok")

    def is_ready(self, now: float) -> Verdict:
        """Good where a request that comes now would be served."""
        last = self._last
        if last is None:
            return Verdict(is_good=False, reason="starting")
        why = self._why_still(last, now) or last.why_dead or last.why_not_ready
        return Verdict(not why, why or "ok")

    def _why_still(self, last: Reading, now: float) -> str:
        age_s = now - last.told_at
        if age_s <= self._patience_s:
            return ""
        return f"the event loop has stood still for {age_s:.1f} s"
