"""An event loop whose time passes only when nothing is left to do: no waiting, no busy machine."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Timers fire in order, at their own times, at once."""

    def __init__(self) -> None:
        self._virtual_now = 1000.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual_now

    def skip(self, seconds: float) -> None:
        """Let time pass."""
        self._virtual_now += seconds


class _Skipping(selectors.SelectSelector):
    """Instead of waiting for a timer it moves the loop's time there."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits and no timer will wake it"
            self._loop.skip(timeout)
        return ready


class VirtualClock:
    """The clock of such a loop."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        """Virtual seconds."""
        return self._loop.time()

    def unix_ms(self) -> int:
        """Virtual milliseconds."""
        return round(self._loop.time() * 1000)


def run_virtual(loop: VirtualTimeLoop, main: Coroutine[Any, Any, T]) -> T:
    """Run to the end, in no time."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)
