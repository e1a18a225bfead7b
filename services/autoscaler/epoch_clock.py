"""The controller's clock: seconds of the Unix epoch that never go back."""

from __future__ import annotations

from services.common.clock import Clock
from services.telemetry.logs import get_logger

log = get_logger(__name__)

_JUMP_S = 30.0  # between both clocks, before it is more than drift: a machine slept, or was set


class EpochClock:
    """Counts by the monotonic clock from where the wall clock stood.

    What is kept in the store can be compared with it by whoever reads it, schedules can be looked
    up by it, and a wall clock that is set back does not make intervals negative.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = self._wall() - clock.now()

    def now(self) -> float:
        """Seconds since 1970."""
        ahead_s = self._wall() - (self._clock.now() + self._offset)
        if ahead_s > _JUMP_S:
            # The machine slept, most likely: schedules must not be late by that.
            log.warning("autoscaler.clock_jumped", seconds=round(ahead_s, 1))
            self._offset += ahead_s
        return self._clock.now() + self._offset

    def unix_ms(self) -> int:
        """The same in milliseconds."""
        return round(self.now() * 1000)

    def _wall(self) -> float:
        return self._clock.unix_ms() / 1000
