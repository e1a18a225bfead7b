"""Real processes whose pools hold two requests, under load, while one of them stands still."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.bench.local_cluster import LocalCluster
from services.chaos.client import Heard
from tests.support.generate import request
from tests.support.mixed_load import Body, MixedLoad, answers

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_BLOCKS = 40
CLIENTS = 10
LOAD_S = 5.0
MAX_ROUNDS = 12  # of that: on a busy machine it takes longer until a pool has overflowed
DEADLINE_S = 30.0
# What a client may be told where there is no room; anything else is a fault.
TYPED = {"RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAVAILABLE"}


def make_bodies(seed: int, count: int) -> list[Body]:
    """Prompts with shared beginnings, some with choices; two of the long ones fill a pool."""
    rng = random.Random(seed)
    families = [[rng.randrange(3, 300) for _ in range(320)] for _ in range(5)]
    bodies = []
    for _ in range(count):
        prompt = rng.choice(families)[: rng.choice((20, 64, 150, 240, 320))]
        prompt = [*prompt, rng.randrange(3, 300)]
        body = request(prompt, max_tokens=rng.choice((2, 20, 60, 120)), n=rng.choice((1, 1, 1, 2)))
        body.ignore_eos = True
        body.sampling.seed = rng.randrange(1 << 40)
        bodies.append(body)
    return bodies


@pytest.fixture(scope="module")
def bodies() -> list[Body]:
    return make_bodies(5, 24)


@pytest.fixture(scope="module")
def expected(toy_dir: Path, bodies: list[Body]) -> list[Heard]:
    with LocalCluster(toy_dir, prefill=0, decode=1) as single:
        return asyncio.run(answers(single.grpc, bodies))


@pytest.fixture(scope="module", params=["memfd", "zmq"])
def cluster(toy_dir: Path, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    settings = {
        "ISTHMUS_TRANSFER__PLANES": request.param,
        "ISTHMUS_WORKER__MAX_STEP_TOKENS": "96",
        "ISTHMUS_MODEL__MAX_MODEL_LEN": "640",
    }
    flags = ("--num-blocks", str(NUM_BLOCKS))
    with LocalCluster(toy_dir, prefill=1, decode=1, flags=flags, settings=settings) as running:
        yield running


async def stand_still(pid: int, rng: random.Random, for_s: float) -> None:
    """Stop a process again and again for a fraction of a second: a peer that is slow."""
    loop = asyncio.get_running_loop()
    end = loop.time() + for_s
    while loop.time() < end:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.uniform(0.05, 0.3))
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(rng.uniform(0.1, 0.4))


def num_preemptions(cluster: LocalCluster) -> int:
    return sum(status.preemptions for status in cluster.worker_statuses())


async def press(cluster: LocalCluster, load: MixedLoad, pid: int) -> None:
    """Go on until requests have been preempted and every client could have had an answer."""
    rng, before = random.Random(3), await asyncio.to_thread(num_preemptions, cluster)
    for _ in range(MAX_ROUNDS):
        await stand_still(pid, rng, LOAD_S)
        is_preempted = await asyncio.to_thread(num_preemptions, cluster) > before
        if is_preempted and load.num_answered >= CLIENTS:
            return
    pytest.fail(f"nothing was preempted: {load.num_answered} answers prove nothing")


@pytest.mark.parametrize("slow", ["prefill", "decode"])
async def test_answers_are_right_while_pools_overflow(
    cluster: LocalCluster, bodies: list[Body], expected: list[Heard], slow: str
) -> None:
    """RB-010, RB-014, RB-085: preemption, eviction and early unpinning under slow transfers."""
    load = MixedLoad(bodies, expected, seed=7)
    modes = ("", "REMOTE", "REMOTE", "LOCAL", "STAY")
    clients = asyncio.ensure_future(
        load.run(cluster, clients=CLIENTS, timeout_s=DEADLINE_S, modes=modes)
    )
    pid = cluster.pid_of(slow)
    pressing = asyncio.ensure_future(press(cluster, load, pid))
    await asyncio.wait({clients, pressing}, return_when=asyncio.FIRST_COMPLETED)
    load.stop()
    await clients
    await pressing
    print(
        f"{slow} slow: {load.num_answered} answered, {load.codes}, {load.slowest_s:.1f} s at most"
    )
    assert set(load.codes) <= TYPED
    await asyncio.to_thread(cluster.assert_no_blocks_in_use, 15.0)
    statuses = await asyncio.to_thread(cluster.worker_statuses)
    for status in statuses:
        assert status.blocks_free + status.blocks_cached == status.blocks_total == NUM_BLOCKS
