"""A store that is killed, frozen, slow, emptied or full of lies under a router at work (G8)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest
import redis

from services.chaos.tcp_proxy import TcpProxy
from services.common.clock import SystemClock
from services.common.errors import StoreUnavailable
from services.kv.hashing import HashScope, chain_hashes
from services.registry.embedded import EmbeddedStore
from services.registry.reader import ReaderConfig, RedisRegistryReader
from services.registry.schema import NUM_BUCKETS
from services.registry.scripts import Invocation
from services.registry.store_client import StoreAddress
from services.router.config import LinkConfig, RouterConfig
from tests.support.cluster import (
    DIGEST,
    NO_BYPASS,
    NS,
    Cluster,
    eventually,
    make_call,
    make_router,
    reference,
    running_cluster,
)
from tests.support.fake_worker import decode_worker as decoder
from tests.support.fake_worker import prefill_worker as prefill

pytestmark = pytest.mark.integration

PREFIX = f"isthmus:{{{NS}}}:"
PROMPT = list(range(1, 257))
HINTS = chain_hashes(HashScope(DIGEST, "", ""), make_call(PROMPT).token_ids)[3::4]
HINTS_BACK_S = 5.0
PATIENT = ReaderConfig(floor_s=5.0, cap_s=5.0)  # a store without a core is not one that is away


def bucket_of(name: bytes) -> str:
    """Return the key a hint lies under."""
    return f"{PREFIX}b:{int.from_bytes(name[:2], 'little') % NUM_BUCKETS}"


class Store:
    """A store behind a proxy, and what can be done to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.embedded = EmbeddedStore.start(folder, use_tcp=True)
        self.port = int(self.embedded.url.rsplit(":", 1)[1])
        self.proxy = TcpProxy(("127.0.0.1", self.port))
        self.url = f"redis://127.0.0.1:{self.proxy.port}"

    def admin(self) -> redis.Redis:
        """Connect past the proxy."""
        return redis.Redis(host="127.0.0.1", port=self.port)

    def stop(self) -> None:
        """End everything."""
        self.proxy.stop()
        self.embedded.stop()

    def kill(self) -> None:
        """As kill -9 does."""
        os.kill(self.embedded.pid, signal.SIGKILL)

    def restart(self) -> None:
        """Come back empty at the same address."""
        self.embedded.stop()
        self.embedded = EmbeddedStore.start(self.folder, use_tcp=True, port=self.port)

    def freeze(self) -> None:
        """Stop the process, connections stay open."""
        os.kill(self.embedded.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.embedded.pid, signal.SIGCONT)

    def slow_down(self) -> None:
        """200 ms each way."""
        self.proxy.faults.delay_s = 0.2

    def speed_up(self) -> None:
        """As before."""
        self.proxy.faults.delay_s = 0.0

    def forget(self) -> None:
        """Lose data and scripts."""
        with closing(self.admin()) as admin:
            admin.flushall()
            admin.script_flush()

    def has_hints(self) -> bool:
        """Say whether somebody is known to hold all of PROMPT."""
        with closing(self.admin()) as admin:
            return all(admin.hexists(bucket_of(name), name[:8]) for name in HINTS)

    def retype(self) -> None:
        """Make every key one of another type."""
        with closing(self.admin()) as admin:
            for key in {*admin.keys(PREFIX + "*"), *(PREFIX + n for n in ("q", "rz", "s:0", "sc"))}:
                admin.delete(key)
                admin.lpush(key, "nonsense")

    def lie(self) -> None:
        """Forge hints, loads, reservations and speculation about every slot."""
        rng = random.Random(1)
        with closing(self.admin()) as admin:
            for name in HINTS:
                admin.hset(bucket_of(name), name[:8], rng.randbytes(rng.randrange(40)))
            for slot, record in admin.hgetall(PREFIX + "w").items():
                assert isinstance(record, bytes)
                future = struct.pack("<IIIIIdd", 1, *[2**32 - 1] * 4, 1e300, float("nan"))
                admin.hset(PREFIX + "q", slot, record[:2] + b"\xff\xff" + future)
            for slot in ("77", "-1", "x", "1000000"):
                admin.hset(PREFIX + "w", slot, rng.randbytes(64))
                admin.hset(PREFIX + "wi", slot, b'{"worker_id": [[[')
            for i in range(64):
                admin.set(f"{PREFIX}r:forged-{i}", rng.randbytes(16))
                admin.zadd(PREFIX + "rz", {rng.randbytes(rng.randrange(1, 20)): i})
                admin.hset(f"{PREFIX}s:{i}", rng.randbytes(8), rng.randbytes(rng.randrange(40)))
            admin.incr(PREFIX + "wv")


Hurt = Callable[[Store], None]


def nothing(store: Store) -> None:
    """It heals by itself."""


CASES: dict[str, tuple[Hurt, Hurt]] = {
    "killed": (Store.kill, Store.restart),
    "frozen": (Store.freeze, Store.thaw),
    "slow": (Store.slow_down, Store.speed_up),
    "emptied": (Store.forget, nothing),
    "wrong types": (Store.retype, Store.forget),
}


@asynccontextmanager
async def hurt_cluster(
    folder: Path, reader_config: ReaderConfig | None = None
) -> AsyncIterator[tuple[Store, Cluster]]:
    """Run two pools of two, of which p1 holds PROMPT."""
    store = Store(folder)
    workers = [prefill("p0"), prefill("p1"), decoder("d0"), decoder("d1")]
    for worker in workers:
        worker.cached_tokens = 256  # as if no hint were ever wrong
    workers[1].cached = HINTS
    try:
        async with running_cluster(store.url, workers, reader_config=reader_config) as cluster:
            yield store, cluster
    finally:
        with suppress(ProcessLookupError):
            store.thaw()
        store.stop()


async def is_found_by_its_hints(store: Store, cluster: Cluster) -> bool:
    """Say whether the store, and not the router alone, sends PROMPT to its holder."""
    if cluster.router.is_degraded[0] or not store.has_hints():
        return False
    timing = (await cluster.ask(make_call(PROMPT))).end.timing
    return timing.prefill_worker == "p1" and not timing.routed_locally


async def until_hints_are_back(store: Store, cluster: Cluster) -> None:
    """Wait until hints work: five seconds are the goal, a busy machine gets twenty."""
    end = time.monotonic() + 4 * HINTS_BACK_S
    while not await is_found_by_its_hints(store, cluster):
        assert time.monotonic() < end, "hints did not come back"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("case", CASES)
async def test_a_hurt_store_costs_no_request_and_hints_come_back(case: str, tmp_path: Path) -> None:
    """RB-033, RB-096, RB-097, G8: every answer is right, and prefixes are found again soon."""
    hurt, heal = CASES[case]
    async with hurt_cluster(tmp_path) as (store, cluster):
        await until_hints_are_back(store, cluster)
        hurt(store)
        for seed in range(25):
            call = make_call([seed + 1] * 100 if seed % 5 else PROMPT)
            assert (await cluster.ask(call)).tokens() == reference(call)
        heal(store)
        await until_hints_are_back(store, cluster)
        cluster.assert_clean()


async def test_lies_in_the_store_cost_no_request(tmp_path: Path) -> None:
    """I7: forged owners, loads and reservations mislead; the store stays in use all the same."""
    async with hurt_cluster(tmp_path, PATIENT) as (store, cluster):
        await until_hints_are_back(store, cluster)
        store.lie()
        for seed in range(25):
            call = make_call([seed + 1] * 100 if seed % 5 else PROMPT)
            answer = await cluster.ask(call)
            assert answer.tokens() == reference(call)
        assert not answer.end.timing.routed_locally
        await eventually(lambda: max(forged_loads(store)) < 2**31)
        cluster.assert_clean()


def forged_loads(store: Store) -> list[int]:
    """Return the reserved prefill tokens of every slot."""
    with closing(store.admin()) as admin:
        rows = [row for row in admin.hvals(PREFIX + "q") if isinstance(row, bytes)]
        return [struct.unpack("<I", row[8:12])[0] for row in rows]


async def test_answers_say_that_the_store_had_no_part(tmp_path: Path) -> None:
    """The router alone decides while the store is away, and says so."""
    async with hurt_cluster(tmp_path, PATIENT) as (store, cluster):
        assert not (await cluster.ask(make_call())).end.timing.routed_locally
        store.kill()
        await eventually(lambda: cluster.router.is_degraded[0])
        assert (await cluster.ask(make_call())).end.timing.routed_locally


async def test_a_router_asks_the_store_from_its_first_request_on(tmp_path: Path) -> None:
    """G7: it serves when it is linked to the workers, so that a restart is no time of blindness."""
    async with hurt_cluster(tmp_path) as (store, _cluster):
        patient = LinkConfig(connect_timeout_s=30.0)
        config = RouterConfig(router_id="second", link=patient, policy=NO_BYPASS)
        second = Cluster(make_router(config, store.url, reader_config=PATIENT), {}, store.url)
        await second.router.start()
        try:
            assert {worker.state for worker in second.router.view().workers} == {"live"}
            call = make_call()
            answer = await second.ask(call)
            assert answer.tokens() == reference(call)
            assert not answer.end.timing.routed_locally
        finally:
            await second.router.stop()


async def test_a_router_that_stood_still_does_not_blame_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer had come while the process did not run; its deadline had passed meanwhile."""
    loop, stood_still_s = asyncio.get_running_loop(), 0.0
    real_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_time() + stood_still_s)
    store = Store(tmp_path)
    reader = RedisRegistryReader(
        StoreAddress(store.url), NS, SystemClock(), ReaderConfig(snapshot_timeout_s=60.0)
    )
    run = reader._store.run

    async def stand_still(call: Invocation) -> object:
        nonlocal stood_still_s
        stood_still_s += 60.0
        return await run(call)

    monkeypatch.setattr(reader._store, "run", stand_still)
    try:
        assert await reader.snapshot() == ()
        store.freeze()
        reader._config = ReaderConfig(snapshot_timeout_s=0.5)
        with pytest.raises(StoreUnavailable):
            await reader.snapshot()
    finally:
        store.thaw()
        await reader.close()
        store.stop()


async def test_without_the_store_a_prefix_goes_where_it_went(tmp_path: Path) -> None:
    """Own routes are remembered: local mode has prefix hits too."""
    async with hurt_cluster(tmp_path) as (store, cluster):
        fresh = list(range(500, 1200))
        first = (await cluster.ask(make_call(fresh))).end.timing.prefill_worker
        store.kill()
        await eventually(lambda: cluster.router.is_degraded[0])
        for tail in range(6):
            call = make_call([*fresh, tail])
            assert (await cluster.ask(call)).end.timing.prefill_worker == first
