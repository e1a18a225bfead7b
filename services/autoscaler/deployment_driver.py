"""Replicas as pods of one Deployment a pool. Never run on a cluster.

A replica's id is its pod's name, which is the worker's id as well. All that is ever changed are a
Deployment's size, through its scale, and two annotations of pods that leave: victims are marked
before the size, and the size is not changed where Kubernetes would end others. The pod's grace
period has to be longer than what its worker needs to end once it is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from services.autoscaler.driver import Capabilities, DriverError
from services.autoscaler.kube_api import KubeApi, KubeError, Resource
from services.autoscaler.kube_pods import (
    DELETION_COST,
    DRAINING,
    DRAINING_COST,
    Pod,
    ending_cost,
    read_pod,
    why_not_these,
)
from services.autoscaler.observation import Replica, ReplicaState
from services.autoscaler.policy import OnDeadline
from services.autoscaler.worker_calls import WorkerCalls
from services.common.address import join_host_port
from services.common.clock import Clock

_TRIES = 3  # of a change that meets another one
_CONFLICT = 409
_GONE = 404
_MISSING = "/missing-"  # in the id of a pod that is not there; no pod's name has such a character


@dataclass(frozen=True, slots=True)
class _Pool:
    """A Deployment at a moment."""

    scale: Resource
    pods: tuple[Pod, ...] = ()  # none that has ended
    given_up: frozenset[str] = field(default=frozenset())  # alive, and the size is less by them

    @property
    def wanted(self) -> int:
        """The size that was asked for."""
        return int(self.scale["spec"].get("replicas") or 0)

    @property
    def staying(self) -> tuple[Pod, ...]:
        """Pods that the size is for."""
        return tuple(p for p in self.pods if p.is_alive and p.name not in self.given_up)

    @property
    def num_missing(self) -> int:
        """Pods that are asked for and not there, not even as pending ones."""
        return max(0, self.wanted - len(self.staying))


# Pods to be ended, and how many of those that are not there yet are not to come.
_Chosen = tuple[list[str], int]


class DeploymentDriver:
    """Implements Driver. Belongs to the event loop."""

    capabilities = Capabilities(can_flip=False, names_victims=True)

    def __init__(
        self,
        api: KubeApi,
        deployments: Mapping[str, str],
        calls: WorkerCalls,
        clock: Clock,
        worker_port: int,
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            api: of the namespace the Deployments are in.
            deployments: their names, by pool of the policy.
            calls: to the workers themselves.
            clock: the controller's.
            worker_port: of every worker's gRPC server.
        """
        self._api = api
        self._deployments = dict(deployments)
        self._calls = calls
        self._clock = clock
        self._worker_port = worker_port
        self._pool_of: dict[str, str] = {}  # of replicas, as last seen
        self._given_up: dict[str, set[str]] = {name: set() for name in deployments}
        self._missing_since: dict[str, float] = {}  # by pool

    async def replicas(self) -> Mapping[str, tuple[Replica, ...]]:
        """Return the pods of every pool, and those that are asked for and not there yet."""
        names = list(self._deployments)
        found = dict(zip(names, await asyncio.gather(*map(self._look, names)), strict=True))
        self._pool_of = {pod.name: name for name, pool in found.items() for pod in pool.pods}
        return {name: self._told(name, pool) for name, pool in found.items()}

    async def start(self, pool: str, count: int) -> None:
        """Raise the Deployment's size."""
        for _ in range(_TRIES):
            now = _Pool(await self._api.get(self._scale_path(pool)))
            if await self._resize(pool, now, now.wanted + count):
                return
        raise DriverError(f"the Deployment of pool {pool} changes all the time")

    async def cancel(self, replica_ids: Sequence[str]) -> None:
        """Lower sizes by pods that do not serve yet, and by pods that are not there yet."""
        by_pool: dict[str, list[str]] = {}
        for replica_id in replica_ids:
            name = await self._find(replica_id)
            if name is not None:
                by_pool.setdefault(name, []).append(replica_id)
        for name, ids in by_pool.items():
            await self._shrink(name, ids, _starting)

    async def drain(self, replica_id: str, deadline_s: float, on_deadline: OnDeadline) -> None:
        """Have the worker refuse new work, and mark its pod.

        Routers move what it decodes. Where the rest is to be aborted the pod still has its grace
        period when it is stopped: Kubernetes lets none of a Deployment's pods have less.
        """
        name = await self._find(replica_id)
        if name is None:
            raise DriverError(f"there is no pod {replica_id!r}")
        pod = _named((await self._look(name)).pods, replica_id)
        if pod is None or not pod.host:
            raise DriverError(f"the pod {replica_id!r} has no address")
        await self._calls.drain(join_host_port(pod.host, self._worker_port))
        # Last: what is marked has been told so.
        if not pod.is_draining:
            now = datetime.fromtimestamp(self._clock.unix_ms() / 1000, UTC)
            marks = {DRAINING: now.isoformat(), DELETION_COST: str(DRAINING_COST)}
            await self._mark(replica_id, marks)

    async def stop(self, replica_id: str) -> None:
        """Lower the Deployment's size by this pod."""
        name = await self._find(replica_id)
        if name is not None:
            await self._shrink(name, [replica_id], _staying)

    async def flip(self, replica_id: str, pool: str) -> None:
        """Refuse: a pod belongs to its Deployment."""
        raise DriverError(f"{replica_id}: a pod cannot change its Deployment")

    async def close(self) -> None:
        """Close connections; pods go on."""
        await self._calls.close()
        await self._api.close()

    def _told(self, name: str, pool: _Pool) -> tuple[Replica, ...]:
        # Their clock is the wall's; both run on, so ages can be taken over.
        ahead_s = self._clock.now() - self._clock.unix_ms() / 1000
        told = [Replica(pod.name, pod.state, pod.since_unix_s + ahead_s) for pod in pool.pods]
        if not pool.num_missing:
            self._missing_since.pop(name, None)
        since = self._missing_since.setdefault(name, self._clock.now()) if pool.num_missing else 0
        told += (
            Replica(f"{name}{_MISSING}{i}", ReplicaState.STARTING, since)
            for i in range(pool.num_missing)
        )
        return tuple(told)

    async def _look(self, name: str) -> _Pool:
        scale = await self._api.get(self._scale_path(name))
        selector = str((scale.get("status") or {}).get("selector") or "")
        if not selector or not isinstance(scale.get("spec"), dict):
            raise DriverError(f"the Deployment of pool {name} tells no selector")
        pods = map(read_pod, await self._api.pods(selector))
        there = tuple(pod for pod in pods if pod.is_terminating or pod.is_alive)
        given_up = self._given_up[name]
        given_up &= {pod.name for pod in there if pod.is_alive}
        return _Pool(scale, there, frozenset(given_up))

    async def _find(self, replica_id: str) -> str | None:
        """Return the pool of a pod, or of one that is not there yet; None = it is gone."""
        name, mark, _ = replica_id.partition(_MISSING)
        if mark:
            return name
        if replica_id not in self._pool_of:
            await self.replicas()
        return self._pool_of.get(replica_id)

    async def _shrink(
        self, name: str, ids: Sequence[str], choose: Callable[[_Pool, Sequence[str]], _Chosen]
    ) -> None:
        """Mark pods and lower the size by them, once: whoever asks again changes nothing."""
        for _ in range(_TRIES):
            pool = await self._look(name)
            victims, num_missing = choose(pool, ids)
            if not victims and not num_missing:
                return
            _check(pool, victims, num_missing)
            marks = {DELETION_COST: str(ending_cost(pool.pods, victims))}
            await asyncio.gather(*(self._mark(victim, marks) for victim in victims))
            if await self._resize(name, pool, pool.wanted - len(victims) - num_missing):
                self._given_up[name].update(victims)
                return
        raise DriverError(f"the Deployment of pool {name} changes all the time")

    async def _resize(self, name: str, pool: _Pool, size: int) -> bool:
        """Set a size; False = the Deployment has changed since it was read."""
        scale = {**pool.scale, "spec": {**pool.scale["spec"], "replicas": max(0, size)}}
        try:
            await self._api.put(self._scale_path(name), scale)
        except KubeError as error:
            if error.status == _CONFLICT:
                return False
            raise
        return True

    async def _mark(self, pod_name: str, annotations: Mapping[str, str]) -> None:
        path = f"api/v1/namespaces/{self._api.namespace}/pods/{pod_name}"
        try:
            await self._api.merge_patch(path, {"metadata": {"annotations": dict(annotations)}})
        except KubeError as error:
            if error.status != _GONE:
                raise

    def _scale_path(self, name: str) -> str:
        deployment = self._deployments.get(name)
        if deployment is None:
            raise DriverError(f"no Deployment belongs to pool {name!r}")
        return f"apis/apps/v1/namespaces/{self._api.namespace}/deployments/{deployment}/scale"


def _staying(pool: _Pool, ids: Sequence[str]) -> _Chosen:
    return [pod.name for pod in pool.staying if pod.name in ids], 0


def _starting(pool: _Pool, ids: Sequence[str]) -> _Chosen:
    """One that serves by now is left alone, and so is one that drains."""
    pods = [p.name for p in pool.staying if p.name in ids and p.state is ReplicaState.STARTING]
    return pods, min(sum(_MISSING in i for i in ids), pool.num_missing)


def _check(pool: _Pool, victims: Sequence[str], num_missing: int) -> None:
    """Raise where a smaller size would end other pods than these."""
    if not victims:
        return
    size = pool.wanted - num_missing
    if size > len(pool.staying):
        raise DriverError("pods that were asked for are not there yet: they would not come instead")
    if size < len(pool.staying):
        raise DriverError("the Deployment is about to lose others")
    why = why_not_these(pool.staying, victims)
    if why is not None:
        raise DriverError(f"{', '.join(victims)}: {why}")


def _named(pods: Sequence[Pod], name: str) -> Pod | None:
    return next((pod for pod in pods if pod.name == name), None)
