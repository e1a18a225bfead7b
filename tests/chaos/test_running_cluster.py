"""A running cluster is killed, frozen, flooded and fed garbage: every answer is right or an error.

Each test checks the same four things: answers equal a single worker's or the request ended with a
code, none outlives its deadline, nothing is held a little later, the processes are still there.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc.aio
import psutil
import pytest
import yaml
from redis import Redis

from services.bench.local_cluster import LocalCluster
from services.chaos.client import Heard, call
from services.pb import inference_pb2_grpc
from tests.support.generate import request
from tests.support.mixed_load import Body, MixedLoad, answers, mixed_bodies

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.slow]

SEED = 11
NUM_BODIES = 40
DEADLINE_LATE_S = 5.0  # a second where the machine has nothing else to do
DEADLINE_S = 20.0
NUM_HURRIED = 150
ANY_MODE = ("", "REMOTE", "REMOTE")


@pytest.fixture(scope="module")
def bodies() -> list[Body]:
    return mixed_bodies(SEED, NUM_BODIES)


@pytest.fixture(scope="module")
def expected(toy_dir: Path, bodies: list[Body]) -> list[Heard]:
    with LocalCluster(toy_dir, prefill=0, decode=1) as single:
        return asyncio.run(answers(single.grpc, bodies))


@pytest.fixture(scope="module")
def cluster(toy_dir: Path) -> Iterator[LocalCluster]:
    settings = {
        "ISTHMUS_WORKER__MAX_STEP_TOKENS": "80",  # a long prompt takes many chunks
        "ISTHMUS_ROUTER__DRAIN_S": "1",
        "ISTHMUS_WORKER__DRAIN_S": "1",
    }
    with LocalCluster(toy_dir, prefill=2, decode=2, settings=settings) as running:
        yield running


@pytest.fixture
def load(bodies: list[Body], expected: list[Heard]) -> MixedLoad:
    return MixedLoad(bodies, expected, SEED)


def pid_of(cluster: LocalCluster, name: str) -> int:
    """Pid of a process by its name."""
    return next(int(p["pid"]) for p in cluster.processes if p["name"] == name)


async def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll without blocking the clients."""
    end = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.1)


def all_live(cluster: LocalCluster) -> bool:
    """Whether the router uses all four workers."""
    return sum(w.state == "live" for w in cluster.cluster_status().workers) == 4


def num_open(cluster: LocalCluster) -> int:
    """Work items open at all workers."""
    return sum(worker.requests_open for worker in cluster.worker_statuses())


async def under_attack(
    cluster: LocalCluster, load: MixedLoad, attack: Callable[[], Awaitable[None]]
) -> None:
    """Attack while clients run, then look for everything that must not be."""
    running = asyncio.create_task(
        load.run(cluster, clients=4, timeout_s=DEADLINE_S, modes=ANY_MODE)
    )
    await asyncio.sleep(0.5)
    await attack()
    await asyncio.sleep(1.0)
    load.stop()
    await running
    assert load.num_answered > 0
    assert load.slowest_s < DEADLINE_S
    await asyncio.to_thread(cluster.assert_no_blocks_in_use)


async def test_killed_workers_cost_neither_an_error_nor_a_wrong_answer(
    cluster: LocalCluster, load: MixedLoad
) -> None:
    async def attack() -> None:
        before = {name: pid_of(cluster, name) for name in ("prefill-0", "decode-0")}
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.3)
        await until(
            lambda: all(pid_of(cluster, name) != pid for name, pid in before.items()),
            10,
            "the supervisor starts the killed workers again",
        )
        await until(lambda: all_live(cluster), 45, "the killed workers are live")

    await under_attack(cluster, load, attack)
    assert load.codes == {}


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "router-0"])
async def test_frozen_process_goes_on_as_itself(
    cluster: LocalCluster, load: MixedLoad, name: str
) -> None:
    """A worker frozen for longer than its watchdog used to take its own engine for dead."""
    pid = pid_of(cluster, name)

    async def attack() -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(4.0)
        finally:
            os.kill(pid, signal.SIGCONT)

    await under_attack(cluster, load, attack)
    await until(lambda: all_live(cluster), 10, "all workers are live")
    assert pid_of(cluster, name) == pid


async def test_router_that_stands_still_for_a_moment_loses_no_stream(
    cluster: LocalCluster,
) -> None:
    """Workers used to end what made more tokens meanwhile than they keep for a router."""
    endless = request([5, 6, 7], max_tokens=1900, n=2)
    endless.ignore_eos = True
    pid = pid_of(cluster, "router-0")
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        heard = [Heard() for _ in range(2)]
        calls = [
            asyncio.create_task(call(stub, endless, timeout_s=60.0, heard=one)) for one in heard
        ]
        await until(lambda: all(len(one.token_ids) == 2 for one in heard), 20, "tokens come")
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(1.5)
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*calls)
    assert [one.code for one in heard] == ["", ""]
    assert [len(ids) for one in heard for ids in one.token_ids.values()] == [1900] * 4
    await asyncio.to_thread(cluster.assert_no_blocks_in_use)


async def test_clients_that_vanish_leave_nothing_behind(
    cluster: LocalCluster, bodies: list[Body]
) -> None:
    """RB-001: at whatever moment they leave, in any mode."""
    rng = random.Random(SEED)
    limit = asyncio.Semaphore(40)

    async def vanish(stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
        async with limit:
            task = asyncio.create_task(
                call(stub, rng.choice(bodies), timeout_s=DEADLINE_S, mode=rng.choice(ANY_MODE))
            )
            await asyncio.wait([task], timeout=rng.expovariate(1 / 0.15))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*(vanish(stub) for _ in range(400)))
    # Less than the life of a ticket: nothing may wait for that.
    await asyncio.to_thread(cluster.assert_no_blocks_in_use, 2.0)


async def test_deadlines_end_requests(cluster: LocalCluster, bodies: list[Body]) -> None:
    """RB-091: from too short to begin to long enough to end, in one flood."""
    rng, codes = random.Random(SEED), Counter[str]()

    async def one(stub: inference_pb2_grpc.InferenceAsyncStub, body: Body, timeout_ms: int) -> None:
        hurried = Body()
        hurried.CopyFrom(body)
        hurried.timeout_ms = timeout_ms
        heard = await call(stub, hurried, timeout_s=DEADLINE_S)
        codes[heard.code] += 1
        assert heard.took_s < timeout_ms / 1000 + DEADLINE_LATE_S

    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        hurried = (one(stub, rng.choice(bodies), rng.randrange(1, 301)) for _ in range(NUM_HURRIED))
        await asyncio.gather(*hurried)
    assert set(codes) <= {"", "deadline_exceeded", "overloaded"}
    # Refused is what would be late, on a busy machine up to half of them. A cluster that refused
    # everybody would prove nothing.
    assert codes["overloaded"] <= NUM_HURRIED * 3 // 4
    await asyncio.to_thread(cluster.assert_no_blocks_in_use)


async def test_hostile_store_content_fails_no_request(
    cluster: LocalCluster, load: MixedLoad
) -> None:
    """RB-097: keys of wrong types, garbage in fields, then nothing at all."""
    config = yaml.safe_load((cluster.runtime_dir() / "isthmus.yaml").read_text())
    store: Redis = Redis.from_url(config["store"]["url"])

    def spoil() -> None:
        for key in list(store.scan_iter(count=1000)):
            if store.type(key) == b"hash":
                for name in list(store.hkeys(key))[:20]:
                    store.hset(key, name, b"\xff{[")
        time.sleep(1.0)
        for key in list(store.scan_iter(count=1000)):
            store.delete(key)
            store.lpush(key, "x")
        time.sleep(1.0)
        store.flushall()

    async def attack() -> None:
        await asyncio.to_thread(spoil)

    await under_attack(cluster, load, attack)
    store.close()
    assert load.codes == {}
    await until(lambda: all_live(cluster), 10, "all workers are registered again")


async def test_garbage_on_every_port_disturbs_nobody(
    cluster: LocalCluster, load: MixedLoad
) -> None:
    pids = cluster.pids()
    rng = random.Random(SEED)
    http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    zmtp = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)
    messages = [
        rng.randbytes(3000),
        http2,
        http2 + rng.randbytes(300),
        zmtp + rng.randbytes(200),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 2000,
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n",
        bytes(100_000),
    ]

    def throw() -> None:
        for pid in pids:
            for connection in psutil.Process(pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    for message in messages:
                        _send(socket.AF_INET, connection.laddr[:2], message)
        for path in cluster.runtime_dir().rglob("kv-*.sock"):
            for message in messages:
                _send(socket.AF_UNIX, str(path), message)

    async def attack() -> None:
        await asyncio.to_thread(throw)

    await under_attack(cluster, load, attack)
    assert load.codes == {}
    assert cluster.pids() == pids


def _send(family: socket.AddressFamily, address: object, message: bytes) -> None:
    """Send and go away; being refused or cut off is what should happen."""
    kind = socket.SOCK_SEQPACKET if family is socket.AF_UNIX else socket.SOCK_STREAM
    with socket.socket(family, kind) as client:
        client.settimeout(0.5)
        if isinstance(address, tuple):
            address = (address[0].removeprefix("::ffff:"), address[1])
        try:
            client.connect(address)  # type: ignore[arg-type]  # psutil's or a path
            client.sendall(message)
            client.settimeout(0.05)
            client.recv(1000)
        except OSError:
            return


async def test_stopped_cluster_tells_its_open_requests(toy_dir: Path) -> None:
    """Requests that outlive the drain used to be cut without a code."""
    settings = {"ISTHMUS_ROUTER__DRAIN_S": "0.3", "ISTHMUS_WORKER__DRAIN_S": "1"}
    endless = request([5, 6, 7], max_tokens=1900, n=8)
    endless.ignore_eos = True
    with LocalCluster(toy_dir, prefill=1, decode=1, settings=settings) as stopped:
        channel = grpc.aio.insecure_channel(stopped.grpc)
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [asyncio.create_task(call(stub, endless, timeout_s=60.0)) for _ in range(3)]
        await until(lambda: num_open(stopped) >= len(calls), 20, "the requests are at work")
        supervisor = stopped.pids()[0]
        os.kill(supervisor, signal.SIGTERM)
        heard = await asyncio.gather(*calls)
        await channel.close()
    assert [h.code for h in heard] == ["draining"] * 3
