"""Pools of Ray actors on pods of KubeRay, before a stand-in for Kubernetes. Neither is real."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

import pytest

from services.autoscaler.driver import Capabilities, DriverError
from services.autoscaler.kube_api import KubeApi
from services.autoscaler.kuberay_driver import Bundle, KubeRay, KubeRayDirect
from services.autoscaler.observation import Replica, ReplicaState
from services.autoscaler.policy import OnDeadline
from tests.support.cluster import eventually
from tests.support.kube_server import NAMESPACE, KubeServer, kube_server

pytestmark = pytest.mark.integration

PREFILL = Bundle({"prefill_slot": 1, "GPU": 1})
DECODE = Bundle({"decode_slot": 1, "GPU": 2}, {"pool": "decode"})


class Actors:
    """The memory twin of a driver of actors."""

    capabilities = Capabilities(can_flip=False, names_victims=True)

    def __init__(self) -> None:
        self.there: dict[str, list[Replica]] = {"prefill": [], "decode": []}
        self.hosts: dict[str, str] = {}
        self.done: list[str] = []
        self._count = 0

    def add(self, pool: str, host: str | None = None) -> str:
        self._count += 1
        name = f"{pool}-{self._count}"
        state = ReplicaState.STARTING if host is None else ReplicaState.READY
        self.there[pool].append(Replica(name, state, 0.0))
        if host is not None:
            self.hosts[name] = host
        return name

    def come_up(self, name: str, host: str) -> None:
        self.hosts[name] = host
        for pool, each in self.there.items():
            self.there[pool] = [
                replace(r, state=ReplicaState.READY) if r.replica_id == name else r for r in each
            ]

    async def host_of(self, name: str) -> str | None:
        return self.hosts.get(name)

    async def replicas(self) -> Mapping[str, tuple[Replica, ...]]:
        return {pool: tuple(each) for pool, each in self.there.items()}

    async def start(self, pool: str, count: int) -> None:
        self.done.append(f"start {count}")
        for _ in range(count):
            self.add(pool)

    async def cancel(self, replica_ids: Sequence[str]) -> None:
        for name in replica_ids:
            await self.stop(name)

    async def drain(self, replica_id: str, deadline_s: float, on_deadline: OnDeadline) -> None:
        self.done.append(f"drain {replica_id}")

    async def stop(self, replica_id: str) -> None:
        for pool, each in self.there.items():
            self.there[pool] = [r for r in each if r.replica_id != replica_id]

    async def flip(self, replica_id: str, pool: str) -> None:
        raise AssertionError

    async def close(self) -> None:
        self.done.append("close")


@pytest.fixture
def actors() -> Actors:
    made = Actors()
    made.add("prefill", "10.0.0.1")
    made.add("decode", "10.0.0.2")
    made.add("decode", "10.0.0.3")
    return made


# -- Ray's own autoscaler is on ---------------------------------------------------------------


async def test_ray_is_always_told_the_sum_of_both_pools(actors: Actors) -> None:
    """A word about one pool would take back what the other was promised."""
    told: list[list[Bundle]] = []
    driver = KubeRay(
        actors,
        {"prefill": [PREFILL], "decode": [DECODE]},
        lambda bundles: told.append(list(bundles)),
    )
    await driver.replicas()
    assert told == [[PREFILL, DECODE, DECODE]]
    await driver.start("prefill", 2)
    assert told[1:] == [[PREFILL, PREFILL, PREFILL, DECODE, DECODE]]
    assert len((await driver.replicas())["prefill"]) == 3
    await driver.drain("decode-2", 60.0, OnDeadline.MIGRATE)
    await driver.replicas()
    assert told[-1] == told[1]  # one that drains still has its place
    await driver.stop("decode-2")
    await driver.cancel(["prefill-4"])
    await driver.replicas()
    assert told[-1] == [PREFILL, PREFILL, DECODE]
    await driver.close()
    assert actors.done == ["start 2", "drain decode-2", "close"]


async def test_a_replica_of_several_ranks_asks_for_a_bundle_each(actors: Actors) -> None:
    told: list[int] = []
    pools = {"prefill": [PREFILL] * 4, "decode": [DECODE]}
    driver = KubeRay(actors, pools, lambda bundles: told.append(len(bundles)))
    await driver.start("prefill", 1)
    assert told == [4 * 2 + 2]


async def test_no_actor_is_started_where_ray_could_not_be_told(actors: Actors) -> None:
    def refuse(bundles: Sequence[Bundle]) -> None:
        raise DriverError("Ray: gone")

    driver = KubeRay(actors, {"prefill": [PREFILL], "decode": [DECODE]}, refuse)
    with pytest.raises(DriverError, match="gone"):
        await driver.start("decode", 1)
    with pytest.raises(DriverError, match="no resources are known"):
        await driver.start("other", 1)
    with pytest.raises(DriverError, match="cannot change its pool"):
        await driver.flip("decode-2", "prefill")
    assert actors.done == []


async def test_nothing_more_is_asked_of_a_ray_that_has_not_answered(actors: Actors) -> None:
    """Each tick would leave one more thread behind, until none is left for anything else."""
    goes_on, num_asked = threading.Event(), 0

    def hang(bundles: Sequence[Bundle]) -> None:
        nonlocal num_asked
        num_asked += 1
        goes_on.wait(60)

    driver = KubeRay(actors, {"prefill": [PREFILL], "decode": [DECODE]}, hang)
    first = asyncio.create_task(driver.replicas())
    await eventually(lambda: num_asked == 1)
    for _ in range(3):
        with pytest.raises(DriverError, match="not answered an earlier request"):
            await driver.replicas()
    goes_on.set()
    await first
    await driver.replicas()
    assert num_asked == 2


# -- it is off ----------------------------------------------------------------------------------


@pytest.fixture
async def kube() -> AsyncIterator[KubeServer]:
    async with kube_server() as server:
        for group in ("prefill-group", "decode-group", "decode-group"):  # -1, -2, -3
            add_node(server, group)
        server.ray_clusters["llama"] = {
            "metadata": {"name": "llama", "resourceVersion": "7"},
            "spec": {
                "rayVersion": "2.60.0",
                "workerGroupSpecs": [
                    {"groupName": "prefill-group", "replicas": 1, "maxReplicas": 4},
                    {"groupName": "decode-group", "replicas": 2, "template": {"spec": {}}},
                ],
            },
        }
        yield server


def add_node(kube: KubeServer, group: str, *, ready: bool = True) -> str:
    name = kube.add_pod(group, ready=ready)
    labels = {"ray.io/cluster": "llama", "ray.io/group": group}
    kube.pods[name]["metadata"]["labels"] |= labels
    return name


def group_of(kube: KubeServer, name: str) -> dict[str, object]:
    groups = kube.ray_clusters["llama"]["spec"]["workerGroupSpecs"]
    (found,) = (group for group in groups if group["groupName"] == name)
    return dict(found)


@pytest.fixture
async def direct(kube: KubeServer, actors: Actors) -> AsyncIterator[KubeRayDirect]:
    groups = {"prefill": "prefill-group", "decode": "decode-group"}
    made = KubeRayDirect(actors, KubeApi(kube.url, NAMESPACE), "llama", groups, actors.host_of)
    yield made
    await made.close()


async def test_a_start_has_a_pod_for_each_replica(
    kube: KubeServer, direct: KubeRayDirect, actors: Actors
) -> None:
    await direct.start("decode", 2)
    group = group_of(kube, "decode-group")
    assert group["replicas"] == 4
    assert group["template"] == {"spec": {}}  # the rest is as it was
    assert group_of(kube, "prefill-group")["replicas"] == 1
    assert len(actors.there["decode"]) == 4


async def test_a_start_uses_pods_that_are_empty(
    kube: KubeServer, direct: KubeRayDirect, actors: Actors
) -> None:
    kube.ray_clusters["llama"]["spec"]["workerGroupSpecs"][1]["replicas"] = 3
    await direct.start("decode", 1)
    assert group_of(kube, "decode-group")["replicas"] == 3
    assert kube.changes == []


async def test_a_stop_removes_the_pod_that_held_the_replica_in_one_change(
    kube: KubeServer, direct: KubeRayDirect, actors: Actors
) -> None:
    await direct.stop("decode-2")
    group = group_of(kube, "decode-group")
    assert group["replicas"] == 1
    assert group["scaleStrategy"] == {"workersToDelete": ["decode-group-2"]}
    assert len(kube.changes) == 1
    await direct.stop("decode-2")
    assert len(kube.changes) == 1


async def test_no_pod_leaves_while_a_replica_looks_for_a_place(
    kube: KubeServer, direct: KubeRayDirect, actors: Actors
) -> None:
    starting = actors.add("decode")
    await direct.stop("decode-2")
    assert kube.changes == []
    actors.come_up(starting, "10.0.0.2")  # it took the pod that had become empty
    await direct.replicas()
    assert kube.changes == []
    assert group_of(kube, "decode-group")["replicas"] == 2


async def test_cancelled_starts_take_pods_along_that_do_not_run_yet(
    kube: KubeServer, direct: KubeRayDirect, actors: Actors
) -> None:
    await direct.start("decode", 1)
    pending = add_node(kube, "decode-group", ready=False)
    await direct.cancel(["decode-4"])
    group = group_of(kube, "decode-group")
    assert (group["replicas"], group["scaleStrategy"]) == (2, {"workersToDelete": [pending]})


async def test_pods_stay_as_many_as_the_group_has_at_least(
    kube: KubeServer, direct: KubeRayDirect
) -> None:
    kube.ray_clusters["llama"]["spec"]["workerGroupSpecs"][1]["minReplicas"] = 2
    await direct.stop("decode-2")
    assert group_of(kube, "decode-group")["replicas"] == 2


async def test_nothing_is_changed_where_rays_own_autoscaler_is_on(
    kube: KubeServer, direct: KubeRayDirect, actors: Actors
) -> None:
    """It would restore every size that it did not choose: two writers of one number."""
    kube.ray_clusters["llama"]["spec"]["enableInTreeAutoscaling"] = True
    with pytest.raises(DriverError, match="use the driver KubeRay"):
        await direct.start("decode", 1)
    assert actors.done == []
    with pytest.raises(DriverError, match="enableInTreeAutoscaling is true"):
        await direct.stop("decode-2")
    assert {pool: len(each) for pool, each in (await direct.replicas()).items()} == {
        "prefill": 1,
        "decode": 1,
    }
    assert kube.changes == []
    kube.ray_clusters["llama"]["spec"]["enableInTreeAutoscaling"] = False
    await direct.replicas()  # what was left over is removed now
    assert group_of(kube, "decode-group")["replicas"] == 1


async def test_changes_by_others_are_read_again_and_kept(
    kube: KubeServer, direct: KubeRayDirect
) -> None:
    kube.conflicts = 2
    await direct.start("prefill", 1)
    assert group_of(kube, "prefill-group")["replicas"] == 2
    kube.conflicts = 100
    with pytest.raises(DriverError, match="changes all the time"):
        await direct.start("prefill", 2)
    assert kube.conflicts == 97


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"maxReplicas": 1}, "maxReplicas is 1"),
        ({"numOfHosts": 4}, "several hosts"),
        ({"groupName": "other"}, "has no worker group 'prefill-group'"),
    ],
)
async def test_what_a_group_does_not_allow_is_told(
    kube: KubeServer, direct: KubeRayDirect, change: dict[str, object], fault: str
) -> None:
    kube.ray_clusters["llama"]["spec"]["workerGroupSpecs"][0] |= change
    with pytest.raises(DriverError, match=fault):
        await direct.start("prefill", 1)
    assert kube.changes == []
