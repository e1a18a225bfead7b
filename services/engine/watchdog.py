"""How long the engine has made no progress, in time in which its process ran. Pure."""

from __future__ import annotations

MAX_ASK_GAP_S = 1.0
_STEPS = 5.0  # no progress for as long as so many steps take is too long


def patience_s(floor_s: float, usual_s: float, predicted_s: float) -> float:
    """Return how long a step may take: long ones that were meant to be long are no fault."""
    return max(floor_s, _STEPS * usual_s, _STEPS * predicted_s)


class Watchdog:
    """Counts the time without progress between questions that come regularly.

    A process that is frozen, or whose machine is suspended, finds the clock far ahead when it
    goes on. That time is not the engine's fault: of a gap between two questions at most
    MAX_ASK_GAP_S counts, so that the engine gets its full patience in time it could use.
    """

    def __init__(self) -> None:
        self._progress_at: float | None = None
        self._asked_at = 0.0
        self._stalled_s = 0.0

    def stalled_s(self, progress_at: float, now: float) -> float:
        """Return the seconds without progress; ask at least once in MAX_ASK_GAP_S."""
        if progress_at != self._progress_at:
            self._progress_at = progress_at
            self._stalled_s = min(max(now - progress_at, 0.0), MAX_ASK_GAP_S)
        else:
            self._stalled_s += min(max(now - self._asked_at, 0.0), MAX_ASK_GAP_S)
        self._asked_at = now
        return self._stalled_s
