"""A driver whose replicas are entries of a dictionary, and a reader that agrees with it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.autoscaler.driver import Capabilities, DriverError
from services.autoscaler.observation import Replica, ReplicaState
from services.autoscaler.policy import OnDeadline
from services.autoscaler.signal_reader import Read
from services.autoscaler.signals import RouterCounts, WorkerCounts
from services.common.clock import ManualClock
from services.common.errors import StoreUnavailable


@dataclass
class MemoryDriver:
    """Implements Driver. Tests say when starting replicas are ready, and what goes wrong."""

    clock: ManualClock
    pools: dict[str, dict[str, Replica]] = field(default_factory=dict)
    calls: list[tuple[str, ...]] = field(default_factory=list)
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(False, True))
    fails: set[str] = field(default_factory=set)  # names of methods
    hangs: set[str] = field(default_factory=set)
    swallows_cancel: bool = False
    _last: int = 0

    def _now(self) -> float:
        return self.clock.unix_ms() / 1000

    async def _enter(self, name: str, *args: str) -> None:
        self.calls.append((name, *args))
        if name in self.fails:
            raise DriverError(f"{name} fails")
        while name in self.hangs:
            try:
                await asyncio.sleep(0.005 if self.swallows_cancel else 3600)
            except asyncio.CancelledError:
                if not self.swallows_cancel:
                    raise

    def add(self, pool: str, state: ReplicaState = ReplicaState.READY) -> str:
        """Make a replica."""
        replica_id = f"{pool}-{self._last}"
        self._last += 1
        replica = Replica(replica_id, state, self._now())
        self.pools.setdefault(pool, {})[replica_id] = replica
        return replica_id

    def ready(self) -> None:
        """Let all that start serve."""
        for pool in self.pools.values():
            for replica_id, replica in pool.items():
                if replica.state is ReplicaState.STARTING:
                    pool[replica_id] = replace(replica, state=ReplicaState.READY, since=self._now())

    def ids(self, pool: str, state: ReplicaState = ReplicaState.READY) -> list[str]:
        """Names of replicas."""
        return [r.replica_id for r in self.pools.get(pool, {}).values() if r.state is state]

    async def replicas(self) -> Mapping[str, tuple[Replica, ...]]:
        """All there are."""
        await self._enter("replicas")
        return {name: tuple(pool.values()) for name, pool in self.pools.items()}

    async def start(self, pool: str, count: int) -> None:
        """Make some."""
        await self._enter("start", pool, str(count))
        for _ in range(count):
            self.add(pool, ReplicaState.STARTING)

    async def cancel(self, replica_ids: Sequence[str]) -> None:
        """Forget those that start."""
        await self._enter("cancel", *replica_ids)
        for pool in self.pools.values():
            for replica_id in replica_ids:
                if replica_id in pool and pool[replica_id].state is ReplicaState.STARTING:
                    del pool[replica_id]

    async def drain(self, replica_id: str, deadline_s: float, on_deadline: OnDeadline) -> None:
        """Mark it."""
        await self._enter("drain", replica_id, f"{deadline_s:g}", on_deadline.value)
        for pool in self.pools.values():
            if replica_id in pool:
                state = ReplicaState.DRAINING
                pool[replica_id] = replace(pool[replica_id], state=state, since=self._now())

    async def stop(self, replica_id: str) -> None:
        """Forget it."""
        await self._enter("stop", replica_id)
        for pool in self.pools.values():
            pool.pop(replica_id, None)

    async def flip(self, replica_id: str, pool: str) -> None:
        """Move it at once."""
        await self._enter("flip", replica_id, pool)
        for source in self.pools.values():
            replica = source.pop(replica_id, None)
            if replica is not None:
                self.pools.setdefault(pool, {})[replica_id] = replica
                return

    async def close(self) -> None:
        """Nothing is held."""


@dataclass
class MemoryReader:
    """Reads a cluster that agrees with the driver; tests set what routers say."""

    driver: MemoryDriver
    routers: tuple[RouterCounts, ...] = ()
    held: dict[str, int] = field(default_factory=dict)  # by replica: what it still has
    used: dict[str, int] = field(default_factory=dict)  # KV tokens
    is_down: bool = False

    async def read(self, now: float) -> Read:
        """All serving replicas have a lease."""
        if self.is_down:
            raise StoreUnavailable("the twin is down")
        workers = tuple(
            WorkerCounts(
                worker_id=replica.replica_id,
                role=name,
                incarnation=1,
                measured_at=now,
                is_draining=replica.state is ReplicaState.DRAINING,
                kv_tokens_used=self.used.get(replica.replica_id, 0),
                kv_tokens_total=10_000,
                num_held=self.held.get(replica.replica_id, 0),
                refuses_work=replica.state is ReplicaState.DRAINING,
                prefill_tokens=0,
                decode_tokens=0,
                busy_s=0.0,
            )
            for name, pool in self.driver.pools.items()
            for replica in pool.values()
            if replica.state is not ReplicaState.STARTING
        )
        return Read(self.routers, workers, {w.worker_id: "" for w in workers}, {})
