"""Replicas as Ray actors whose nodes are pods of KubeRay. Never run on a cluster.

Actors are another driver's; here is what their nodes need. `KubeRay` leaves pods to Ray's own
autoscaler and tells it what is to be there. `KubeRayDirect` changes the cluster's resource itself,
which Ray's autoscaler would undo: it refuses where that is on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.autoscaler.driver import Capabilities, Driver, DriverError
from services.autoscaler.kube_api import KubeApi, KubeError, Resource
from services.autoscaler.kube_pods import Pod, read_pod
from services.autoscaler.observation import Replica, ReplicaState
from services.autoscaler.policy import OnDeadline
from services.autoscaler.ray_thread import RayThread
from services.telemetry.logs import get_logger

log = get_logger(__name__)

_TRIES = 3  # of a change that meets another one
_CONFLICT = 409


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is taken of one node, and which nodes will do."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


def ask_ray(bundles: Sequence[Bundle]) -> None:
    """Tell Ray's autoscaler what has to fit at the same time, until it is told anew. Blocks."""
    import ray
    from ray.autoscaler.sdk import request_resources

    try:
        request_resources(
            bundles=[dict(bundle.resources) for bundle in bundles],
            bundle_label_selectors=[dict(bundle.labels) for bundle in bundles],
        )
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        raise DriverError(f"Ray: {error}") from error


class _OnNodes:
    """What both have in common: a replica is an actor, and stays one."""

    capabilities = Capabilities(can_flip=False, names_victims=True)

    def __init__(self, actors: Driver) -> None:
        self._actors = actors

    async def drain(self, replica_id: str, deadline_s: float, on_deadline: OnDeadline) -> None:
        """Drain the actor."""
        await self._actors.drain(replica_id, deadline_s, on_deadline)

    async def flip(self, replica_id: str, pool: str) -> None:
        """Refuse: an actor holds the place of the pool it was started in."""
        raise DriverError(f"{replica_id}: an actor cannot change its pool")


class KubeRay(_OnNodes):
    """Pods follow actors: those that wait for a place bring one, empty ones are removed by Ray.

    What Ray is told holds until the next time, for all of the cluster. So it is always told the
    sum of all pools: a word about one of them would take back what the others were promised.
    """

    def __init__(
        self,
        actors: Driver,
        bundles: Mapping[str, Sequence[Bundle]],
        request: Callable[[Sequence[Bundle]], None] = ask_ray,
    ) -> None:
        """Prepare; nothing is asked for yet.

        Args:
            actors: starts, drains and ends the replicas.
            bundles: what one replica takes, by pool.
            request: tells Ray's autoscaler; on a thread, since it may block.
        """
        super().__init__(actors)
        self._bundles = {pool: tuple(each) for pool, each in bundles.items()}
        self._request = request
        self._thread = RayThread()

    async def replicas(self) -> Mapping[str, tuple[Replica, ...]]:
        """Return the actors, and tell Ray of them: a head that was restarted may have forgotten."""
        found = await self._actors.replicas()
        await self._tell({pool: len(found.get(pool, ())) for pool in self._bundles})
        return found

    async def start(self, pool: str, count: int) -> None:
        """Ask for room, then for the actors that fill it."""
        if pool not in self._bundles:
            raise DriverError(f"no resources are known of pool {pool!r}")
        found = await self._actors.replicas()
        there = {name: len(found.get(name, ())) for name in self._bundles}
        await self._tell({**there, pool: there[pool] + count})
        await self._actors.start(pool, count)

    async def cancel(self, replica_ids: Sequence[str]) -> None:
        """End actors that start; the next look takes their room back."""
        await self._actors.cancel(replica_ids)

    async def stop(self, replica_id: str) -> None:
        """End the actor; the next look takes its room back, then Ray removes the empty pod."""
        await self._actors.stop(replica_id)

    async def close(self) -> None:
        """Let go; what Ray was told goes on to hold."""
        await self._actors.close()

    async def _tell(self, counts: Mapping[str, int]) -> None:
        bundles = [
            bundle
            for pool, count in counts.items()
            for _ in range(count)
            for bundle in self._bundles[pool]
        ]
        await self._thread.run(lambda: self._request(bundles))


class KubeRayDirect(_OnNodes):
    """Pods are ours: one for each replica, and none is removed that holds one."""

    def __init__(
        self,
        actors: Driver,
        api: KubeApi,
        cluster: str,
        groups: Mapping[str, str],
        host_of: Callable[[str], Awaitable[str | None]],
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            actors: starts, drains and ends the replicas.
            api: of the namespace the cluster is in.
            cluster: name of the RayCluster.
            groups: its worker group for each pool of the policy.
            host_of: address of the node a replica runs on; None = not known yet.
        """
        super().__init__(actors)
        self._api = api
        self._cluster = cluster
        self._groups = dict(groups)
        self._host_of = host_of
        self._untidy: set[str] = set()  # pools that may have pods without a replica by now

    async def replicas(self) -> Mapping[str, tuple[Replica, ...]]:
        """Return the actors; remove pods that an earlier call left without one."""
        found = await self._actors.replicas()
        try:
            await self._tidy_all(found)
        except DriverError as error:
            # Costs money and no more: what there is has to be known all the same.
            log.warning("autoscaler.pods_left", reason=str(error)[:400])
        return found

    async def start(self, pool: str, count: int) -> None:
        """Have a pod for each, then ask for the actors."""
        there = (await self._actors.replicas()).get(pool, ())
        await self._patch(pool, lambda group: _enlarged(group, len(there) + count))
        await self._actors.start(pool, count)

    async def cancel(self, replica_ids: Sequence[str]) -> None:
        """End actors that start, and remove their pods."""
        before = await self._actors.replicas()
        wanted = set(replica_ids)
        touched = {p for p, each in before.items() if wanted & {r.replica_id for r in each}}
        await self._actors.cancel(replica_ids)
        self._untidy |= touched
        await self._tidy_all(await self._actors.replicas())

    async def stop(self, replica_id: str) -> None:
        """End the actor, and remove its pod once no actor of its pool looks for a place."""
        before = await self._actors.replicas()
        pools = {p for p, each in before.items() if any(r.replica_id == replica_id for r in each)}
        await self._actors.stop(replica_id)
        self._untidy |= pools
        await self._tidy_all(await self._actors.replicas())

    async def close(self) -> None:
        """Let go; pods and actors go on."""
        await self._actors.close()
        await self._api.close()

    async def _tidy_all(self, found: Mapping[str, Sequence[Replica]]) -> None:
        for pool in sorted(self._untidy):
            await self._tidy(pool, found.get(pool, ()))

    async def _tidy(self, pool: str, replicas: Sequence[Replica]) -> None:
        """Remove pods without a replica, by name and with the size in one change.

        Not while any replica starts: it may be about to take one of them.
        """
        hosts = {await self._host_of(replica.replica_id) for replica in replicas}
        if None in hosts or any(r.state is ReplicaState.STARTING for r in replicas):
            return
        group = self._group_name(pool)
        selector = f"ray.io/cluster={self._cluster},ray.io/group={group}"
        pods = [pod for pod in map(read_pod, await self._api.pods(selector)) if pod.is_alive]
        empty = sorted((pod for pod in pods if pod.host not in hosts), key=_goes_first)
        await self._patch(pool, lambda spec: _reduced(spec, len(replicas), empty))
        self._untidy.discard(pool)

    async def _patch(self, pool: str, change: Callable[[Resource], Resource | None]) -> None:
        """Change one worker group; None = it is right already."""
        name, path = self._group_name(pool), self._path()
        for _ in range(_TRIES):
            cluster = await self._api.get(path)
            spec = cluster["spec"]
            if spec.get("enableInTreeAutoscaling"):
                raise DriverError(
                    f"RayCluster {self._cluster}: enableInTreeAutoscaling is true, Ray's own "
                    "autoscaler would undo every change: use the driver KubeRay"
                )
            groups = list(spec.get("workerGroupSpecs") or ())
            at = next((i for i, group in enumerate(groups) if group["groupName"] == name), None)
            if at is None:
                raise DriverError(f"RayCluster {self._cluster} has no worker group {name!r}")
            changed = change(groups[at])
            if changed is None:
                return
            # A list is replaced as a whole: the version says that the rest is as it was read.
            groups[at] = changed
            version = {"resourceVersion": cluster["metadata"]["resourceVersion"]}
            try:
                patch = {"metadata": version, "spec": {"workerGroupSpecs": groups}}
                await self._api.merge_patch(path, patch)
            except KubeError as error:
                if error.status != _CONFLICT:
                    raise
            else:
                return
        raise DriverError(f"RayCluster {self._cluster} changes all the time")

    def _group_name(self, pool: str) -> str:
        name = self._groups.get(pool)
        if name is None:
            raise DriverError(f"no worker group belongs to pool {pool!r}")
        return name

    def _path(self) -> str:
        return f"apis/ray.io/v1/namespaces/{self._api.namespace}/rayclusters/{self._cluster}"


def _enlarged(group: Resource, size: int) -> Resource | None:
    """Have a pod for each of so many replicas; empty ones that are left are used."""
    if int(group.get("numOfHosts") or 1) != 1:
        raise DriverError(f"worker group {group['groupName']}: replicas of several hosts")
    most = group.get("maxReplicas")
    if most is not None and size > int(most):
        raise DriverError(f"worker group {group['groupName']}: maxReplicas is {most}")
    if int(group.get("replicas") or 0) >= size:
        return None
    return {**group, "replicas": size, "scaleStrategy": {"workersToDelete": []}}


def _reduced(group: Resource, size: int, empty: Sequence[Pod]) -> Resource | None:
    """Have no more pods than replicas; those that leave are named, and are empty."""
    before = int(group.get("replicas") or 0)
    floor = max(size, int(group.get("minReplicas") or 0))
    leaving = [pod.name for pod in empty][: max(0, before - floor)]
    if not leaving:
        return None
    strategy = {"workersToDelete": leaving}
    return {**group, "replicas": before - len(leaving), "scaleStrategy": strategy}


def _goes_first(pod: Pod) -> tuple[bool, float]:
    """Those that do not run yet, then the newest."""
    return (pod.is_ready, -pod.since_unix_s)
