"""Clocks: monotonic seconds for every duration, wall time only for what people read."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where a shell takes its time from; pure code is handed `now` instead."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def unix_ms(self) -> int:
        """Wall-clock milliseconds, for logs and advisory expiry only."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def unix_ms(self) -> int:
        """Wall-clock milliseconds."""
        return time.time_ns() // 1_000_000


class ManualClock:
    """A clock tests move by hand."""

    def __init__(self, now: float = 1_000.0, unix_ms: int = 1_700_000_000_000) -> None:
        self._now = now
        self._unix_ms = unix_ms

    def now(self) -> float:
        """Monotonic seconds."""
        return self._now

    def unix_ms(self) -> int:
        """Wall-clock milliseconds."""
        return self._unix_ms

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._now += seconds
        self._unix_ms += round(seconds * 1000)
