"""Driver of pools whose replicas are Ray actors (services.autoscaler.driver.Driver).

What exists is in a table of its own: Ray tells of an actor only through the calls that wait for
its worker's end, which fail within milliseconds of a death.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from services.autoscaler.driver import Capabilities, DriverError
from services.autoscaler.observation import Replica, ReplicaState
from services.autoscaler.policy import OnDeadline
from services.autoscaler.ray_thread import RayThread
from services.runtime.ray_actor import WorkerOrder
from services.runtime.ray_cluster import Placement, RayCluster, RayWorker, new_name
from services.telemetry.logs import get_logger

log = get_logger(__name__)

_T = TypeVar("_T")
_STOP_GRACE_S = 5.0  # for what a stopped worker has to close; then its process is killed


@dataclass(frozen=True, slots=True)
class RayPool:
    """What Ray starts when a pool of the policy grows."""

    role: str  # "prefill" | "decode"
    order: WorkerOrder  # without a name and a log: each replica gets its own
    placement: Placement
    log_dir: Path | None = None  # on the node; None = Ray's own files


@dataclass(slots=True)
class _Entry:
    """One replica."""

    pool: str
    worker: RayWorker
    state: ReplicaState
    since: float


@dataclass(frozen=True, slots=True)
class _Leaving:
    """One that was stopped, until its process is gone."""

    worker: RayWorker
    kill_at: float


class LocalRay:
    """Replicas as actors of one namespace. A replica's id is its actor's name.

    Calls to Ray may block, so they are made on threads; the lock is theirs.
    """

    capabilities = Capabilities(can_flip=False, names_victims=True)

    def __init__(
        self, cluster: RayCluster, pools: Mapping[str, RayPool], now: Callable[[], float]
    ) -> None:
        """Prepare; what others have started in the namespace is found at the first look."""
        self._cluster = cluster
        self._pools = dict(pools)
        self._now = now
        self._thread = RayThread()
        self._entries: dict[str, _Entry] = {}
        self._leaving: list[_Leaving] = []
        self._by_role = {pool.role: name for name, pool in self._pools.items()}

    def _add(self, pool: str, worker: RayWorker) -> None:
        now = self._now()
        self._entries[worker.name] = _Entry(pool, worker, ReplicaState.STARTING, now)

    async def replicas(self) -> Mapping[str, tuple[Replica, ...]]:
        """Look at every actor; one that has died is left out from the next tick on."""
        return await self._on_thread(self._seen)

    def _seen(self) -> Mapping[str, tuple[Replica, ...]]:
        now = self._now()
        self._leaving = [one for one in self._leaving if not _is_gone(one, now)]
        self._adopt()
        found: dict[str, list[Replica]] = {name: [] for name in self._pools}
        for replica_id, entry in list(self._entries.items()):
            if entry.worker.poll() is not None:
                del self._entries[replica_id]
                continue
            if entry.state is ReplicaState.STARTING and entry.worker.is_serving:
                entry.state, entry.since = ReplicaState.READY, now
            found[entry.pool].append(Replica(replica_id, entry.state, entry.since))
        return {name: tuple(replicas) for name, replicas in found.items()}

    def _adopt(self) -> None:
        """Take over what a driver before this one, or the one that led till now, has started."""
        known = {one.worker.name for one in self._leaving} | self._entries.keys()
        for worker in self._cluster.adopt(known):
            pool = self._by_role.get(worker.name.rpartition("-")[0])
            if pool is not None:
                self._add(pool, worker)

    async def host_of(self, replica_id: str) -> str | None:
        """Return the address of the node a replica runs on; None = Ray has not placed it."""
        entry = self._entries.get(replica_id)
        begun = None if entry is None else entry.worker.begun
        return None if begun is None else begun.host

    async def start(self, pool: str, count: int) -> None:
        """Ask Ray for so many more actors; they may be pending until there is room."""
        await self._on_thread(lambda: self._start(pool, count))

    def _start(self, pool: str, count: int) -> None:
        template = self._pools[pool]
        for _ in range(count):
            name = new_name(template.role)
            log_path = "" if template.log_dir is None else str(template.log_dir / f"{name}.log")
            arguments = (*template.order.arguments, "--role", template.role, "--worker-id", name)
            order = replace(template.order, arguments=arguments, log_path=log_path)
            self._add(pool, self._cluster.launch(name, order, template.placement))

    async def cancel(self, replica_ids: Sequence[str]) -> None:
        """End those that do not serve yet."""
        await self._on_thread(lambda: self._cancel(replica_ids))

    def _cancel(self, replica_ids: Sequence[str]) -> None:
        for replica_id in replica_ids:
            entry = self._entries.get(replica_id)
            if entry is None or entry.worker.poll() is not None or entry.worker.is_serving:
                continue
            entry.worker.kill()
            del self._entries[replica_id]

    async def drain(self, replica_id: str, deadline_s: float, on_deadline: OnDeadline) -> None:
        """Let a worker pass on what it has and end.

        Routers move what a draining worker decodes as soon as another can take it, and what is
        left at the deadline ends with it: `on_deadline` makes no difference here.
        """
        await self._on_thread(lambda: self._drain(replica_id, deadline_s))

    def _drain(self, replica_id: str, deadline_s: float) -> None:
        entry = self._entries.get(replica_id)
        if entry is None or entry.state is ReplicaState.DRAINING:
            return
        entry.worker.stop(deadline_s)
        entry.state, entry.since = ReplicaState.DRAINING, self._now()

    async def stop(self, replica_id: str) -> None:
        """End a worker: at once, if it does not within a few seconds."""
        await self._on_thread(lambda: self._stop(replica_id))

    def _stop(self, replica_id: str) -> None:
        entry = self._entries.pop(replica_id, None)
        if entry is None:
            return
        if entry.worker.poll() is None and entry.worker.begun is None:
            entry.worker.kill()  # nothing runs that could be asked
            return
        entry.worker.stop(0.0)
        self._leaving.append(_Leaving(entry.worker, self._now() + _STOP_GRACE_S))

    async def flip(self, replica_id: str, pool: str) -> None:
        """Refuse: the actor would go on holding its old pool's place on its node."""
        raise DriverError(f"{replica_id}: Ray holds its place for the pool it was started in")

    async def close(self) -> None:
        """End what was to end; the other actors go on, and a later driver takes them over."""
        if self._thread.is_busy:
            log.warning("autoscaler.ray_hangs")
            return
        await self._on_thread(self._let_go)

    def _let_go(self) -> None:
        for one in self._leaving:
            one.worker.kill()
        self._leaving.clear()

    async def _on_thread(self, act: Callable[[], _T]) -> _T:
        return await self._thread.run(lambda: self._act(act))

    def _act(self, act: Callable[[], _T]) -> _T:
        """Run one method; whatever Ray cannot do now is for the next tick."""
        import ray

        try:
            return act()
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise DriverError(f"Ray: {error}") from error


def _is_gone(one: _Leaving, now: float) -> bool:
    if one.worker.poll() is None and now >= one.kill_at:
        one.worker.kill()
    return one.worker.returncode is not None
