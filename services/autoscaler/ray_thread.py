"""Calls of Ray that block: on a thread, and none after one that has not come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from services.autoscaler.driver import DriverError

_T = TypeVar("_T")


class RayThread:
    """Belongs to the event loop; whoever waits may give up, the call itself runs on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether a call, given up or not, has not come back."""
        return self._lock.locked()

    async def run(self, act: Callable[[], _T]) -> _T:
        """Run it and return what it does. Raises DriverError while an earlier one runs on.

        Another for each tick would take all threads there are, and do what was asked for when it
        no longer is.
        """
        if self.is_busy:
            raise DriverError("Ray has not answered an earlier request yet")
        return await asyncio.to_thread(self._locked, act)

    def _locked(self, act: Callable[[], _T]) -> _T:
        with self._lock:
            return act()
