"""How late a mock wrote against its own plan: what a client cannot be blamed for."""

from __future__ import annotations

from collections import deque

from services.common.quantile import rank_of

_MAX_KEPT = 200_000


class Lateness:
    """The latest writes."""

    def __init__(self) -> None:
        self._late_s: deque[float] = deque(maxlen=_MAX_KEPT)

    def note(self, late_s: float) -> None:
        """Take one write."""
        self._late_s.append(late_s)

    def told(self) -> dict[str, float]:
        """Return percentiles in milliseconds, and begin anew."""
        ordered = sorted(self._late_s)
        self._late_s.clear()
        told = {"writes": float(len(ordered))}
        if ordered:
            for share in (0.5, 0.99):
                late_ms = ordered[rank_of(len(ordered), share) - 1] * 1000
                told[f"late_p{round(share * 100)}_ms"] = late_ms
        return told
