"""Pools as Deployments of a stand-in for Kubernetes, over HTTP. Not a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path

import pytest

from services.autoscaler.deployment_driver import DeploymentDriver
from services.autoscaler.driver import DriverError
from services.autoscaler.kube_api import KubeApi, KubeError
from services.autoscaler.kube_pods import DELETION_COST, DRAINING
from services.autoscaler.observation import ReplicaState
from services.autoscaler.policy import OnDeadline
from services.autoscaler.worker_calls import WorkerCalls
from services.common.clock import ManualClock
from services.common.errors import ConfigError
from tests.support.kube_server import NAMESPACE, READY_AT, KubeServer, kube_server

pytestmark = pytest.mark.integration

NOW_MS = round(datetime.fromisoformat("2026-11-30T08:10:00Z").timestamp() * 1000)
RESIZED = "PUT deployments/decode-workers/scale"


class Calls(WorkerCalls):
    """Workers that drain when asked; the test has no workers."""

    def __init__(self) -> None:
        super().__init__()
        self.drained: list[str] = []

    async def drain(self, address: str) -> None:
        self.drained.append(address)


@pytest.fixture
async def kube() -> AsyncIterator[KubeServer]:
    async with kube_server() as server:
        server.deploy("prefill-workers", 1)  # -1
        server.deploy("decode-workers", 3)  # -2, -3, -4
        yield server


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
async def driver(kube: KubeServer, calls: Calls) -> AsyncIterator[DeploymentDriver]:
    made = DeploymentDriver(
        KubeApi(kube.url, NAMESPACE),
        {"prefill": "prefill-workers", "decode": "decode-workers"},
        calls,
        ManualClock(1_000.0, NOW_MS),
        worker_port=7000,
    )
    yield made
    await made.close()


async def states(driver: DeploymentDriver, pool: str = "decode") -> dict[str, ReplicaState]:
    return {r.replica_id: r.state for r in (await driver.replicas())[pool]}


def alive(kube: KubeServer) -> list[str]:
    return [
        name
        for name, pod in kube.pods.items()
        if name.startswith("decode") and "deletionTimestamp" not in pod["metadata"]
    ]


async def test_pods_are_replicas_with_their_state_and_its_age(
    kube: KubeServer, driver: DeploymentDriver
) -> None:
    starting = kube.add_pod("decode-workers", ready=False)
    unplaced = kube.add_pod("decode-workers", ready=False, node=False)
    failed = kube.add_pod("decode-workers", ready=False, phase="Failed")
    kube.terminate("decode-workers-2")
    kube.deployments["decode-workers"].replicas = 6
    found = {r.replica_id: r for r in (await driver.replicas())["decode"]}
    assert {name: replica.state for name, replica in found.items()} == {
        "decode-workers-2": ReplicaState.DRAINING,
        "decode-workers-3": ReplicaState.READY,
        "decode-workers-4": ReplicaState.READY,
        starting: ReplicaState.STARTING,
        unplaced: ReplicaState.STARTING,
        "decode/missing-0": ReplicaState.STARTING,
        "decode/missing-1": ReplicaState.STARTING,
    }
    assert failed not in found
    ready_s = datetime.fromisoformat(READY_AT).timestamp() - NOW_MS / 1000
    assert found["decode-workers-3"].since == 1_000.0 + ready_s  # of the driver's own clock
    assert found["decode-workers-2"].since == 1_000.0  # told to end a minute before its last
    assert kube.changes == []


async def test_many_pods_are_read_page_by_page(kube: KubeServer, driver: DeploymentDriver) -> None:
    kube.page = 2
    assert len(await states(driver)) == 3


async def test_a_start_raises_the_size_and_nothing_else(
    kube: KubeServer, driver: DeploymentDriver
) -> None:
    await driver.start("decode", 2)
    assert kube.deployments["decode-workers"].replicas == 5
    assert list((await states(driver)).values()).count(ReplicaState.STARTING) == 2
    assert kube.changes == [RESIZED]


async def test_a_change_by_somebody_else_is_read_again(
    kube: KubeServer, driver: DeploymentDriver
) -> None:
    kube.conflicts = 2
    await driver.start("decode", 1)
    assert kube.deployments["decode-workers"].replicas == 4
    kube.conflicts = 100
    with pytest.raises(DriverError, match="changes all the time"):
        await driver.start("decode", 1)
    assert kube.deployments["decode-workers"].replicas == 4
    assert kube.conflicts == 97  # a budget of tries, not a loop


async def test_a_drain_tells_the_worker_then_marks_its_pod(
    kube: KubeServer, driver: DeploymentDriver, calls: Calls
) -> None:
    await driver.drain("decode-workers-3", 60.0, OnDeadline.MIGRATE)
    assert calls.drained == ["10.0.0.3:7000"]
    assert (await states(driver))["decode-workers-3"] is ReplicaState.DRAINING
    assert kube.annotations("decode-workers-3")[DELETION_COST] == "-1000"
    assert kube.deployments["decode-workers"].replicas == 3  # it still has work
    since = kube.annotations("decode-workers-3")[DRAINING]
    await driver.drain("decode-workers-3", 60.0, OnDeadline.MIGRATE)
    assert kube.annotations("decode-workers-3")[DRAINING] == since


async def test_stop_marks_the_victim_before_the_size_and_ends_that_very_pod(
    kube: KubeServer, driver: DeploymentDriver
) -> None:
    """RB-104: the pod that was chosen leaves, not whichever Kubernetes would take."""
    await driver.stop("decode-workers-4")
    assert alive(kube) == ["decode-workers-2", "decode-workers-3"]
    assert [change.split(" ")[1] for change in kube.changes] == [
        "pods/decode-workers-4",
        "deployments/decode-workers/scale",
    ]


async def test_one_that_drains_does_not_leave_in_place_of_one_that_is_stopped(
    kube: KubeServer, driver: DeploymentDriver
) -> None:
    for name in ("decode-workers-2", "decode-workers-3"):
        await driver.drain(name, 60.0, OnDeadline.MIGRATE)
    await driver.stop("decode-workers-3")
    assert alive(kube) == ["decode-workers-2", "decode-workers-4"]


async def test_a_stop_that_is_repeated_lowers_the_size_once(
    kube: KubeServer, driver: DeploymentDriver
) -> None:
    kube.is_acting = False  # Kubernetes has not begun to end it
    await driver.stop("decode-workers-4")
    await driver.stop("decode-workers-4")
    assert kube.deployments["decode-workers"].replicas == 2
    await driver.stop("decode-workers-3")  # another one may go at once
    assert kube.deployments["decode-workers"].replicas == 1
    kube.act()
    await driver.stop("decode-workers-4")
    await driver.stop("gone")
    assert kube.deployments["decode-workers"].replicas == 1
    assert alive(kube) == ["decode-workers-2"]


async def test_a_driver_that_begins_anew_does_not_shrink_twice_for_one_victim(
    kube: KubeServer, driver: DeploymentDriver, calls: Calls
) -> None:
    kube.is_acting = False
    await driver.stop("decode-workers-4")
    heir = DeploymentDriver(
        KubeApi(kube.url, NAMESPACE), {"decode": "decode-workers"}, calls, ManualClock(), 7000
    )
    try:
        with pytest.raises(DriverError, match="about to lose others"):
            await heir.stop("decode-workers-4")
        kube.act()
        await heir.stop("decode-workers-4")
    finally:
        await heir.close()
    assert kube.deployments["decode-workers"].replicas == 2
    assert alive(kube) == ["decode-workers-2", "decode-workers-3"]


async def test_nothing_is_stopped_where_a_starting_pod_would_go_instead(
    kube: KubeServer, driver: DeploymentDriver
) -> None:
    """RB-104."""
    starting = kube.add_pod("decode-workers", ready=False)
    kube.deployments["decode-workers"].replicas = 4
    with pytest.raises(DriverError, match=f"{starting} would be ended before"):
        await driver.stop("decode-workers-4")
    kube.deployments["decode-workers"].replicas = 5
    with pytest.raises(DriverError, match="are not there yet"):
        await driver.stop("decode-workers-4")
    assert kube.changes == []


async def test_nothing_is_stopped_while_a_rollout_is_under_way(
    kube: KubeServer, driver: DeploymentDriver
) -> None:
    kube.add_pod("decode-workers", template="b")
    kube.deployments["decode-workers"].replicas = 4
    with pytest.raises(DriverError, match="rollout"):
        await driver.stop("decode-workers-4")


async def test_a_stop_that_met_a_conflict_can_be_repeated_for_any_of_the_marked(
    kube: KubeServer, driver: DeploymentDriver
) -> None:
    kube.conflicts = 6
    for name in ("decode-workers-2", "decode-workers-3"):
        with pytest.raises(DriverError, match="changes all the time"):
            await driver.stop(name)
    await driver.stop("decode-workers-2")
    assert alive(kube) == ["decode-workers-3", "decode-workers-4"]
    await driver.stop("decode-workers-3")
    assert alive(kube) == ["decode-workers-4"]


async def test_cancel_ends_those_that_start_and_forgets_those_that_never_came(
    kube: KubeServer, driver: DeploymentDriver
) -> None:
    starting = kube.add_pod("decode-workers", ready=False)
    kube.deployments["decode-workers"].replicas = 6
    with pytest.raises(DriverError, match="not there yet"):
        await driver.cancel([starting])  # Kubernetes would make one pod less instead
    await driver.cancel(["decode-workers-2", starting, "decode/missing-0", "decode/missing-1"])
    assert kube.deployments["decode-workers"].replicas == 3
    assert alive(kube) == ["decode-workers-2", "decode-workers-3", "decode-workers-4"]
    await driver.cancel(["decode/missing-0", starting])
    assert kube.deployments["decode-workers"].replicas == 3


async def test_faults_of_the_server_are_told_as_such(
    kube: KubeServer, driver: DeploymentDriver
) -> None:
    with pytest.raises(DriverError, match="no Deployment belongs to pool 'other'"):
        await driver.start("other", 1)
    with pytest.raises(DriverError, match="cannot change its Deployment"):
        await driver.flip("decode-workers-2", "prefill")
    kube.pods["decode-workers-2"]["metadata"]["creationTimestamp"] = 5
    kube.pods["decode-workers-2"]["status"]["conditions"] = []
    with pytest.raises(DriverError, match="unknown form"):
        await driver.replicas()
    kube.refuse_with = 403
    with pytest.raises(KubeError, match="403 as the test asked for") as raised:
        await driver.replicas()
    assert raised.value.status == 403


async def test_a_server_that_is_gone_is_told(calls: Calls) -> None:
    api = KubeApi("http://127.0.0.1:1", NAMESPACE)
    driver = DeploymentDriver(api, {"decode": "d"}, calls, ManualClock(), 7000)
    try:
        with pytest.raises(DriverError, match="does not answer"):
            await driver.replicas()
    finally:
        await driver.close()


def test_an_account_is_read_from_the_pod_and_never_shown_in_the_clear(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not in a pod"):
        KubeApi.in_cluster({})
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(ConfigError, match="cannot be read"):
        KubeApi.in_cluster(environ, tmp_path)
    with pytest.raises(ConfigError, match="not https"):
        KubeApi("http://127.0.0.1:8001", NAMESPACE, token_file=tmp_path / "token")
