"""WorkerLease and RedisRegistryReader on a real store that is stopped, frozen and emptied."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import redis

from services.common.clock import SystemClock
from services.common.errors import StoreUnavailable
from services.common.ids import BlockHash
from services.registry.base import LoadReport, WorkerInfo
from services.registry.cost import Ask, Candidate, Weights
from services.registry.embedded import EmbeddedStore
from services.registry.lease import LeaseConfig, WorkerLease
from services.registry.reader import LatencyDeadline, RedisRegistryReader
from services.registry.schema import Keys, pack_fields, stride_hashes
from services.registry.scripts import RouteAsk, ScriptCalls
from services.registry.store_client import StoreAddress
from tests.support.cluster import eventually
from tests.support.registry import make_chain, make_worker_info
from tests.support.store import running_store, store, store_url

__all__ = ["store", "store_url"]  # fixtures
pytestmark = pytest.mark.integration

NS = "test"


@contextmanager
def leased(
    url: str,
    info: WorkerInfo | None = None,
    cached: Callable[[], Sequence[BlockHash]] = tuple,
    config: LeaseConfig | None = None,
) -> Iterator[WorkerLease]:
    """Run a lease."""
    lease = WorkerLease(
        StoreAddress(url), NS, info or make_worker_info(), LoadReport, cached, SystemClock(), config
    )
    lease.start()
    try:
        yield lease
    finally:
        lease.stop()


@asynccontextmanager
async def reading(url: str) -> AsyncIterator[RedisRegistryReader]:
    """Open a reader."""
    reader = RedisRegistryReader(StoreAddress(url), NS, SystemClock())
    try:
        yield reader
    finally:
        await reader.close()


async def depths(reader: RedisRegistryReader, chain: Sequence[BlockHash]) -> list[int]:
    """Return how many strides of a chain each worker holds."""
    workers = [Candidate(r.slot, r.slot_gen, False, 1) for r in await reader.snapshot()]
    ask = RouteAsk(Ask(len(chain) * 16 + 1, 0, 0), pack_fields(stride_hashes(chain)))
    (verdict,) = await reader.route(Weights(), workers, {}, (ask,))
    return [int(o.hint_tokens) // 64 for o in verdict.options] if verdict is not None else []


async def depth_becomes(
    reader: RedisRegistryReader, chain: Sequence[BlockHash], strides: int, timeout_s: float = 5.0
) -> None:
    """Wait until some worker holds exactly that many strides of a chain."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            depth = await depths(reader, chain)
            if max(depth, default=0) == strides:
                return
        except StoreUnavailable:
            pass
        assert time.monotonic() < end, f"never held {strides} strides"
        await asyncio.sleep(0.01)


async def test_registers_publishes_drains_and_leaves(store_url: str) -> None:
    """The life of a lease."""
    chain = make_chain(1, 40)
    async with reading(store_url) as reader:
        with leased(store_url) as lease:
            await eventually(lambda: lease.is_registered)
            lease.publish(chain, ())
            await depth_becomes(reader, chain, 10)
            lease.publish((), chain[20:])
            await depth_becomes(reader, chain, 5)
            lease.set_state("draining")
            await asyncio.sleep(0.1)
            (record,) = await reader.snapshot()
            assert record.state == "draining"
            assert record.slot_gen == lease.slot_gen
            assert record.lease_left_ms > 1000
        assert await reader.snapshot() == ()


async def test_renewals_are_counted_by_outcome(store_url: str) -> None:
    with leased(store_url, config=LeaseConfig(heartbeat_s=0.02)) as lease:
        await eventually(lambda: lease.renewals["ok"] >= 2)
        assert lease.renewals["gone"] == 0
        with redis.Redis.from_url(store_url) as admin:
            admin.flushall()
        await eventually(lambda: lease.renewals["gone"] == 1)
        assert lease.renewals["failed"] == 0


async def test_comes_back_after_the_store_was_flushed(store_url: str) -> None:
    """RB-033: the worker re-registers and re-publishes within two seconds."""
    chain = make_chain(1, 40)
    async with reading(store_url) as reader:
        with leased(store_url, cached=lambda: chain) as lease:
            await depth_becomes(reader, chain, 10)
            before = lease.slot_gen
            with redis.Redis.from_url(store_url) as admin:
                admin.flushall()
                admin.script_flush()
            await depth_becomes(reader, chain, 10, timeout_s=2.0)
            assert lease.slot_gen != before
            assert before in lease.slot_gens


async def test_reader_never_pairs_old_names_with_the_slots_of_an_emptied_store(
    store_url: str,
) -> None:
    """RB-033, RB-046: as many workers join again, in another order, before the reader looks."""
    infos = {name: make_worker_info(name) for name in ("w-a", "w-b")}
    client = redis.Redis.from_url(store_url)

    async def join(order: Sequence[str], reader: RedisRegistryReader) -> dict[str, int]:
        with leased(store_url, infos[order[0]]) as first:
            await eventually(lambda: first.is_registered)
            with leased(store_url, infos[order[1]]) as second:
                await eventually(lambda: second.is_registered)
                records = await reader.snapshot()
                assert {r.slot for r in records} == {first.slot, second.slot}
                client.flushall()
                return {r.info.worker_id: r.slot for r in records}

    async with reading(store_url) as reader:
        assert await join(("w-a", "w-b"), reader) == {"w-a": 0, "w-b": 1}
        assert await join(("w-b", "w-a"), reader) == {"w-b": 0, "w-a": 1}
    client.close()


async def test_comes_back_after_the_store_was_killed_and_restarted_empty(tmp_path: Path) -> None:
    """RB-097, RB-116: also when the store was not there at the start."""
    chain = make_chain(1, 8)
    with running_store(use_tcp=True) as first:
        port = int(first.url.rsplit(":", 1)[1])
        async with reading(first.url) as reader:
            with leased(first.url, cached=lambda: chain) as lease:
                await depth_becomes(reader, chain, 2)
                os.kill(first.pid, signal.SIGKILL)
                await eventually(lambda: not lease.is_registered)
                with pytest.raises(StoreUnavailable):
                    await reader.snapshot()
                second = EmbeddedStore.start(tmp_path, use_tcp=True, port=port)
                try:
                    await depth_becomes(reader, chain, 2)
                finally:
                    second.stop()


async def test_frozen_store_costs_one_deadline(store: EmbeddedStore) -> None:
    """RB-096: a lookup ends within its deadline, publish never blocks, and both heal."""
    chain = make_chain(1, 8)
    async with reading(store.url) as reader:
        with leased(store.url) as lease:
            await eventually(lambda: lease.is_registered)
            await depths(reader, chain)
            os.kill(store.pid, signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await depths(reader, chain)
            assert time.monotonic() - started < 0.3
            started = time.monotonic()
            lease.publish(chain, ())
            assert time.monotonic() - started < 0.05
            await eventually(lambda: not lease.is_registered)
            os.kill(store.pid, signal.SIGCONT)
            await depth_becomes(reader, chain, 2)


async def test_cancelled_lookup_never_gives_its_answer_to_another(store_url: str) -> None:
    """RB-094: cancelled calls at random moments leave no unread reply behind."""
    chains = [make_chain(i, 4 * i) for i in range(1, 6)]
    async with reading(store_url) as reader:
        with leased(store_url, cached=lambda: [h for c in chains for h in c]):
            await depth_becomes(reader, chains[4], 5)
            for i in range(100):
                task = asyncio.create_task(depths(reader, chains[i % 5]))
                for _ in range(i % 7):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                length = i % 4 + 1
                answer = await depths(reader, chains[length - 1])
                assert answer == [length]


async def test_overflow_sends_the_table_anew(store_url: str) -> None:
    """RB-100: changes that did not fit the queue are made good by a new generation."""
    chain = make_chain(1, 40)
    held: list[BlockHash] = []
    config = LeaseConfig(max_pending=8, batch_delay_s=0.05)
    async with reading(store_url) as reader:
        with leased(store_url, cached=lambda: tuple(held), config=config) as lease:
            await eventually(lambda: lease.is_registered)
            gen = lease.slot_gen
            held.extend(chain)
            lease.publish(chain, ())
            await depth_becomes(reader, chain, 10)
            assert lease.slot_gen != gen


async def test_a_later_life_takes_the_name_and_the_earlier_stands_back(store_url: str) -> None:
    """RB-044: a frozen process that wakes up after its replacement does not take the slot back."""
    async with reading(store_url) as reader:
        with leased(store_url, make_worker_info(incarnation=1)) as old:
            await eventually(lambda: old.is_registered)
            with leased(store_url, make_worker_info(incarnation=2)) as new:
                await eventually(lambda: new.is_registered and old.is_superseded)
                (record,) = await reader.snapshot()
                assert record.info.incarnation == 2
                assert record.slot_gen == new.slot_gen


async def test_hints_of_a_worker_that_left_are_swept_while_others_publish(store_url: str) -> None:
    """RB-046: its keys go although nobody touches its hashes, also under a stream of changes."""
    gone, kept = make_chain(1, 200), make_chain(2, 40)
    calls = ScriptCalls(Keys(NS))
    fast = LeaseConfig(heartbeat_s=0.05)
    with (
        redis.Redis.from_url(store_url) as admin,
        leased(store_url, make_worker_info("stays"), lambda: kept, fast) as stays,
    ):
        with leased(store_url, make_worker_info("leaves"), lambda: gone) as leaves:
            await eventually(lambda: stays.is_registered and leaves.is_registered)
            await eventually(lambda: _num_hints(admin, calls) == 240)
        end = time.monotonic() + 10
        while _num_hints(admin, calls) != 40:
            assert time.monotonic() < end, "hints of a worker that left are still there"
            stays.publish(kept[:1], ())
            await asyncio.sleep(0.01)


def _num_hints(admin: redis.Redis, calls: ScriptCalls) -> int:
    keys = admin.keys(f"{calls.keys.prefix}b:*")
    return sum(int(admin.hlen(key)) for key in keys)


async def test_hostile_store_contents_are_skipped(store_url: str) -> None:
    """I7: garbage under our keys hides a worker at worst; wrong types are a store failure."""
    async with reading(store_url) as reader:
        with leased(store_url) as lease, redis.Redis.from_url(store_url) as admin:
            await eventually(lambda: lease.is_registered)
            admin.hset(f"isthmus:{{{NS}}}:w", "77", b"short")
            admin.hset(f"isthmus:{{{NS}}}:w", "x", b"\xff" * 64)
            admin.hset(f"isthmus:{{{NS}}}:wi", "77", b'{"worker_id": 5}')
            admin.incr(f"isthmus:{{{NS}}}:wv")
            assert len(await reader.snapshot()) == 1
            admin.delete(f"isthmus:{{{NS}}}:wi")
            admin.set(f"isthmus:{{{NS}}}:wi", b"not a hash")
            admin.incr(f"isthmus:{{{NS}}}:wv")
            with pytest.raises(StoreUnavailable):
                await reader.snapshot()


async def test_embedded_store_dies_with_its_parent(tmp_path: Path) -> None:
    """No store is left behind by a parent that was killed."""
    import sys

    program = (
        "import sys, time; from pathlib import Path;"
        "from services.registry.embedded import EmbeddedStore;"
        "s = EmbeddedStore.start(Path(sys.argv[1])); print(s.pid, flush=True); time.sleep(60)"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 20))
    parent.kill()
    await parent.wait()
    await eventually(lambda: not _is_running(pid))


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_deadline_follows_the_median_between_its_bounds() -> None:
    """8 x the median, never under the floor nor over the cap."""
    deadline = LatencyDeadline(floor_s=0.005, cap_s=0.1)
    assert deadline.seconds == 0.005
    for _ in range(500):
        deadline.observe(0.002)
    assert 0.014 < deadline.seconds < 0.018
    for _ in range(500):
        deadline.observe(1.0)
    assert deadline.seconds == 0.1
