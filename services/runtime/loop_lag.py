"""How late an event loop runs what is due: what everything it has to do waits for its core."""

from __future__ import annotations

import asyncio

from services.common.clock import Clock
from services.common.decayed import DecayedSums

LOOK_S = 0.05
_TAU_S = 1.0


class LoopLag:
    """Measures the loop it was started in."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sums = DecayedSums(2, _TAU_S)  # looks, seconds they were late
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look at regular times until `stop`."""
        self._due = self._clock.now() + LOOK_S
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._due = None

    def value_s(self) -> float:
        """Return what was usual in the last second, or what it is late now, if that is more."""
        if self._due is None:
            return 0.0
        looks, late_s = self._sums.values
        return max(late_s / looks if looks else 0.0, self._clock.now() - self._due)

    def _look(self) -> None:
        if self._due is not None:
            now = self._clock.now()
            self._sums.add(now, 1, max(0.0, now - self._due))
            self.start()
