"""The registry without a store: the twin behind the same interface, for tests and one process."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.common.ids import BlockHash
from services.registry.base import HintAnswer, WorkerRecord
from services.registry.twin import RegistryTwin


class MemoryRegistryReader:
    """RegistryReader over a RegistryTwin; `is_down` makes it fail as a dead store does."""

    def __init__(self, twin: RegistryTwin, clock: Clock) -> None:
        self._twin = twin
        self._clock = clock
        self.is_down = False
        self.num_lookups = 0

    async def snapshot(self) -> tuple[WorkerRecord, ...]:
        """Return all workers."""
        self._check()
        return self._twin.snapshot(self._now_ms())

    async def lookup(self, hashes: Sequence[BlockHash]) -> HintAnswer:
        """Return workers and hint depths."""
        self._check()
        self.num_lookups += 1
        return self._twin.lookup(hashes, self._now_ms())

    async def close(self) -> None:
        """Nothing to close."""

    def _check(self) -> None:
        if self.is_down:
            raise StoreUnavailable("the store is down")

    def _now_ms(self) -> int:
        return round(self._clock.now() * 1000)
