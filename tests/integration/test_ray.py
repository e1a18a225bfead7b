"""Workers as Ray actors, on one Ray of our own: scripted workers, a real router, a real store."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import psutil
import pytest

from services.autoscaler.driver import DriverError
from services.autoscaler.observation import ReplicaState
from services.autoscaler.policy import OnDeadline
from services.autoscaler.ray_driver import LocalRay, RayPool
from services.chaos.rig import RigRouter
from services.chaos.scripted_model import make_scripted_model
from services.chaos.scripted_worker import SPEED_VARIABLE
from services.common.clock import SystemClock
from services.pb import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from services.registry.embedded import EmbeddedStore
from services.runtime.ray_actor import USAGE, WorkerOrder
from services.runtime.ray_cluster import Placement, RayCluster, RayWorker, new_name
from tests.support.generate import Answer, collect, generate, request
from tests.support.waiting import wait_for

pytest.importorskip("ray")
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_S = 60.0
SLOTS = {"prefill_slot": 2.0, "decode_slot": 3.0}
CONFIG = """\
model: {{name: '{model}'}}
store: {{url: '{store}'}}
worker: {{num_blocks: 300, threads: 1, drain_s: 5.0}}
router: {{bypass_tokens: 0}}
"""


@dataclass
class Rig:
    """Everything but the workers."""

    cluster: RayCluster
    router: RigRouter
    config_text: str
    folder: Path

    def order(self, **changes: str) -> WorkerOrder:
        order = WorkerOrder(
            program="services.chaos.scripted_worker:main",
            arguments=(),
            config_text=self.config_text,
            host="127.0.0.1",
        )
        return replace(order, **changes)  # type: ignore[arg-type]  # of text fields only

    def driver(self) -> LocalRay:
        pools = {
            role: RayPool(role, self.order(), Placement({f"{role}_slot": 1.0}), self.folder)
            for role in ("prefill", "decode")
        }
        return LocalRay(self.cluster, pools, SystemClock().now)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One Ray for all tests of this file: it takes seconds to start."""
    folder = Path(tempfile.mkdtemp(prefix="isthmus-ray-"))  # short: it holds sockets
    with pytest.MonkeyPatch.context() as patch, ExitStack() as ending:
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv(SPEED_VARIABLE, "20000:3")
        before = signal.getsignal(signal.SIGTERM)
        cluster = RayCluster.start("test", folder, SLOTS, os.environ)
        ending.callback(cluster.close)
        assert signal.getsignal(signal.SIGTERM) is before
        store = EmbeddedStore.start(folder)
        ending.callback(store.stop)
        model = make_scripted_model(folder / "model")
        text = CONFIG.format(model=model, store=store.url)
        (folder / "rig.yaml").write_text(text)
        router = RigRouter("router", folder)
        for port in router._ports:
            ending.callback(port.release)
        router.spawn()
        ending.callback(router.child.wait, 20)
        ending.callback(router.child.send, signal.SIGKILL)  # nothing of it is looked at any more
        yield Rig(cluster, router, text, folder)


@pytest.fixture
async def driver(rig: Rig) -> AsyncIterator[LocalRay]:
    # What a test before has ended is named for a moment longer, and would be taken over.
    wait_for(lambda: not ray_names(), 20, "nothing is left of the test before")
    made = rig.driver()
    yield made
    for replicas in (await made.replicas()).values():
        for replica in replicas:
            await made.stop(replica.replica_id)
    await made.close()


async def until_ready(rig: Rig, driver: LocalRay, prefill: int, decode: int) -> None:
    """Wait until Ray says so and the router uses them."""
    for _ in range(int(WAIT_S / 0.05)):
        seen = await driver.replicas()
        ready = {
            pool: sum(one.state is ReplicaState.READY for one in found)
            for pool, found in seen.items()
        }
        is_whole = ready == {"prefill": prefill, "decode": decode}
        if is_whole and num_live(rig.router.grpc) == prefill + decode:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"not ready: {seen}, {rig.router.child.tail()}")


def ray_names() -> list[str]:
    import ray

    return list(ray.util.list_named_actors())


def num_live(address: str) -> int:
    """Workers the router uses; 0 while it does not answer."""
    with grpc.insecure_channel(address) as channel:
        try:
            seen = admin_pb2_grpc.AdminStub(channel).ClusterStatus(
                admin_pb2.ClusterStatusRequest(), timeout=2
            )
        except grpc.RpcError:
            return 0
    return sum(worker.state == "live" for worker in seen.workers)


def worker_of(driver: LocalRay, replica_id: str) -> RayWorker:
    return driver._entries[replica_id].worker


async def test_workers_serve_and_one_that_is_killed_is_gone_at_the_next_tick(
    rig: Rig, driver: LocalRay
) -> None:
    await driver.start("prefill", 1)
    await driver.start("decode", 1)
    await until_ready(rig, driver, 1, 1)
    body = request(range(5, 60), max_tokens=12)
    first = generate(rig.router.grpc, body)
    assert first.mode == "REMOTE"

    (victim,) = (await driver.replicas())["decode"]
    worker = worker_of(driver, victim.replica_id)
    assert worker.begun is not None
    assert worker.pid is not None
    assert await driver.host_of(victim.replica_id) == worker.begun.host
    os.kill(worker.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(worker.pid)] if psutil.pid_exists(worker.pid) else [], 10)
    wait_for(lambda: worker.poll() is not None, 10, "Ray tells of the death")
    assert (await driver.replicas())["decode"] == ()
    assert await driver.host_of(victim.replica_id) is None

    await driver.start("decode", 1)
    await until_ready(rig, driver, 1, 1)
    assert generate(rig.router.grpc, body).token_ids == first.token_ids


class Stream(threading.Thread):
    """One request on a thread of its own."""

    def __init__(self, address: str, index: int) -> None:
        super().__init__(daemon=True)
        self._address, self._index = address, index
        self.under_way = threading.Event()
        self.answer: Answer | None = None
        self.error: grpc.RpcError | None = None
        self.start()

    def tokens(self) -> list[int]:
        self.join(WAIT_S)
        assert self.error is None
        assert self.answer is not None
        return self.answer.token_ids[0]

    def run(self) -> None:
        body = request(range(5, 40 + self._index), max_tokens=400, ignore_eos=True)
        with grpc.insecure_channel(self._address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            try:
                self.answer = collect(self._noting(stub.Generate(body, timeout=WAIT_S)))
            except grpc.RpcError as error:
                self.error = error

    def _noting(
        self, frames: Iterator[inference_pb2.GenerateFrame]
    ) -> Iterator[inference_pb2.GenerateFrame]:
        for number, frame in enumerate(frames):
            if number == 5:
                self.under_way.set()
            yield frame


async def test_a_drained_worker_loses_no_stream_and_ends(rig: Rig, driver: LocalRay) -> None:
    """RB-105: routers pass over it before it refuses, and it ends when nothing is left."""
    await driver.start("prefill", 1)
    await driver.start("decode", 2)
    await until_ready(rig, driver, 1, 2)
    streams = [Stream(rig.router.grpc, index) for index in range(4)]
    for stream in streams:
        assert stream.under_way.wait(WAIT_S)
    victim = (await driver.replicas())["decode"][0].replica_id
    worker = worker_of(driver, victim)
    await driver.drain(victim, 60.0, OnDeadline.MIGRATE)
    undisturbed = [Stream(rig.router.grpc, index) for index in range(4)]
    for stream, other in zip(streams, undisturbed, strict=True):
        assert stream.tokens() == other.tokens()
    wait_for(lambda: worker.poll() is not None, WAIT_S, "the drained worker ends")
    assert worker.returncode == 0
    assert victim not in [one.replica_id for one in (await driver.replicas())["decode"]]


async def test_a_later_driver_takes_over_and_stops_what_it_finds(
    rig: Rig, driver: LocalRay
) -> None:
    await driver.start("decode", 1)
    await until_ready(rig, driver, 0, 1)
    (replica,) = (await driver.replicas())["decode"]
    later = rig.driver()
    await later.replicas()
    worker = worker_of(later, replica.replica_id)
    wait_for(lambda: worker.poll() is not None or worker.is_serving, 20, "it is looked at")
    assert [one.replica_id for one in (await later.replicas())["decode"]] == [replica.replica_id]
    assert worker.pid == worker_of(driver, replica.replica_id).pid
    process = psutil.Process(worker.pid)
    await later.stop(replica.replica_id)
    assert (await later.replicas())["decode"] == ()
    assert (await later.replicas())["decode"] == ()  # not found anew while it ends
    wait_for(lambda: worker.poll() is not None, WAIT_S, "the worker ends")
    process.wait(10)


async def test_what_has_no_room_is_starting_and_can_be_cancelled(
    rig: Rig, driver: LocalRay
) -> None:
    await driver.start("prefill", int(SLOTS["prefill_slot"]) + 1)
    wait_for(lambda: num_begun(driver) == SLOTS["prefill_slot"], WAIT_S, "slots are taken")
    replicas = (await driver.replicas())["prefill"]
    pending = [r.replica_id for r in replicas if worker_of(driver, r.replica_id).begun is None]
    assert len(pending) == 1
    await driver.cancel(pending)
    left = (await driver.replicas())["prefill"]
    assert {one.replica_id for one in left} == {r.replica_id for r in replicas} - set(pending)


def num_begun(driver: LocalRay) -> int:
    workers = [entry.worker for entry in driver._entries.values()]
    for worker in workers:
        worker.poll()
    return sum(worker.begun is not None for worker in workers)


async def test_a_replica_is_not_moved_to_another_pool(driver: LocalRay) -> None:
    assert not driver.capabilities.can_flip
    with pytest.raises(DriverError):
        await driver.flip("prefill-1", "decode")


def test_a_node_without_the_model_is_told_of_by_its_path(rig: Rig) -> None:
    notes: list[str] = []
    order = rig.order(model_path="/nowhere/model")
    placement = Placement({"prefill_slot": 1.0})
    worker = rig.cluster.launch(new_name("prefill"), order, placement, notes.append)
    assert worker.wait(WAIT_S) == USAGE
    assert "no model at /nowhere/model" in notes[0]


def test_the_ranks_of_a_replica_are_placed_together_and_given_back(rig: Rig) -> None:
    """What there is of tensor parallelism: bundles for the ranks; one actor in the first."""
    import ray

    name = new_name("decode")
    order = rig.order(arguments=("--role", "decode", "--worker-id", name))  # type: ignore[arg-type]
    placement = Placement({"decode_slot": 1.0}, num_bundles=2)
    worker = rig.cluster.launch(name, order, placement)
    wait_for(lambda: worker.poll() is not None or worker.is_serving, WAIT_S, "it serves")
    (group,) = [g for g in ray.util.placement_group_table().values() if g["name"] == name]
    assert (group["strategy"], group["state"]) == ("STRICT_PACK", "CREATED")
    assert len(group["bundles"]) == 2
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(WAIT_S) == 0
    (group,) = [g for g in ray.util.placement_group_table().values() if g["name"] == name]
    assert group["state"] == "REMOVED"


def test_what_a_worker_says_goes_to_its_log(rig: Rig) -> None:
    logs = [path.read_text() for path in rig.folder.glob("decode-*.log")]
    assert logs
    assert all("worker.loaded" in text for text in logs)
