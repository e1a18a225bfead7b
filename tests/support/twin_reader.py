"""RegistryReader over the Python twin: a store in memory that can be told to fail."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.registry.base import LoadReport, WorkerInfo, WorkerRecord
from services.registry.cost import Candidate, Pairs, Verdict, Weights
from services.registry.scripts import RouteAsk
from services.registry.twin import RegistryTwin


class TwinReader:
    """What several routers may share."""

    def __init__(self, clock: Clock) -> None:
        self.twin = RegistryTwin(lease_ms=10**9)
        self.is_down = False
        self.batches: list[int] = []  # sizes of the route calls
        self.released: list[str] = []
        self._clock = clock

    def join(self, info: WorkerInfo, load: LoadReport) -> tuple[int, int]:
        """Register a worker; return its slot and generation."""
        answer = self.twin.join(
            info, "live", load, proposed_gen=1, is_rejoin=False, now_ms=self._now_ms()
        )
        return answer.slot, answer.gen

    async def snapshot(self) -> tuple[WorkerRecord, ...]:
        """Return all workers."""
        self._check()
        return self.twin.snapshot(self._now_ms())

    async def route(
        self,
        weights: Weights,
        candidates: Sequence[Candidate],
        pairs: Pairs,
        asks: Sequence[RouteAsk],
    ) -> tuple[Verdict | None, ...]:
        """Decide and reserve."""
        self._check()
        self.batches.append(len(asks))
        return self.twin.route(weights, candidates, pairs, asks, self._now_ms())

    async def release(self, ends: Sequence[tuple[str, bytes]]) -> None:
        """End reservations."""
        self._check()
        for rid, lies in ends:
            self.twin.release(rid, lies)
            self.released.append(rid)

    async def hold(self, rids: Sequence[str]) -> None:
        """Extend reservations."""
        self._check()
        for rid in rids:
            self.twin.reservations.hold(rid, self._now_ms())

    async def close(self) -> None:
        """Nothing is open."""

    def _now_ms(self) -> int:
        return round(self._clock.now() * 1000)

    def _check(self) -> None:
        if self.is_down:
            raise StoreUnavailable("it was told to be")
