"""Configuration, timers, inbox and the seqlock read."""

from __future__ import annotations

import ctypes
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from kernels.cpu import kv_blocks
from services.common.errors import ConfigError
from services.kv.block_copy import pull_blocks, pull_with_digests, write_block
from services.kv.digest import block_digests
from services.kv.layout import BLOCK_MAJOR, LAYER_MAJOR, KvLayout
from services.kv.memory import KvPoolMemory
from services.transfer.config import TransferConfig, ordered_planes
from services.transfer.loop import Inbox, Timers
from services.transfer.wire import WireError
from services.transfer.zmq_plane import (
    DataSent,
    check_host,
    parse_route,
    peer_base,
    split_endpoint,
)
from tests.support.transfer_ends import LAYOUT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"planes": ("rdma",)}, "planes"),
        ({"planes": ()}, "planes"),
        ({"verify_digest": "never"}, "verify_digest"),
        ({"verify_digest": "sampled:0"}, "verify_digest"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"data_message_bytes": 8 << 20}, "data_message_bytes"),
        ({"copy_threads": -1}, "copy_threads"),
        ({"copy_threads": 17}, "copy_threads"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransferConfig(**change)  # type: ignore[arg-type]  # wrong on purpose


def test_planes_are_ordered_best_first_and_sampling_is_read() -> None:
    config = TransferConfig(planes=("zmq", "memfd"), verify_digest="sampled:8")
    assert ordered_planes(config) == ("memfd", "zmq")
    assert config.digest_sampling == 8
    assert TransferConfig().digest_sampling == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "not-an-address", "192.168.1.1"])
def test_plaintext_beyond_loopback_is_refused(host: str) -> None:
    with pytest.raises(ConfigError):
        check_host(host, TransferConfig())


def test_allowed_hosts() -> None:
    check_host("127.0.0.1", TransferConfig())
    check_host("[::1]", TransferConfig())
    check_host("10.0.0.1", TransferConfig(allow_plaintext_kv=True))
    check_host("10.0.0.1", TransferConfig(curve_key_file="key"))


@pytest.mark.parametrize("endpoint", ["ipc:///x", "tcp://host", "tcp://h:x", "inproc://a:1", ""])
def test_only_tcp_endpoints(endpoint: str) -> None:
    with pytest.raises(ValueError, match="tcp"):
        split_endpoint(endpoint)


def test_routes_name_one_life_of_a_worker() -> None:
    base = peer_base("decode-0", 5)
    assert parse_route(base + b"m1234").base == base
    assert parse_route(base + b"r9876").base == base
    assert peer_base("decode-0", 6) != base
    for wrong in (b"", b"short", b"x" * 40):
        with pytest.raises(WireError):
            parse_route(wrong)


def test_timers_pop_in_order_and_an_earlier_time_wins() -> None:
    timers = Timers()
    timers.at_latest("a", 5.0)
    timers.at_latest("b", 3.0)
    timers.at_latest("a", 9.0)  # later: the entry stays, and is popped early
    timers.at_latest("b", 2.0)
    assert timers.next_due() == 2.0
    assert timers.pop_due(2.5) == ["b"]
    assert timers.pop_due(5.0) == ["a"]
    assert timers.next_due() is None


def test_timers_do_not_grow_with_updates() -> None:
    timers = Timers()
    for i in range(10_000):
        timers.at_latest("a", 1e6 - i)
    timers.discard("a")
    assert timers.next_due() is None
    assert len(timers) == 0
    assert len(timers._heap) < 200


def test_inbox_refuses_after_close_and_returns_what_came_late() -> None:
    inbox = Inbox()
    seen: list[int] = []
    assert inbox.put(lambda: seen.append(1))
    threads = [threading.Thread(target=lambda: inbox.put(lambda: seen.append(2))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for command in inbox.take():
        command()
    assert seen == [1, 2, 2, 2, 2]
    inbox.put(lambda: seen.append(3))
    assert len(inbox.close()) == 1
    assert not inbox.put(lambda: None)
    assert inbox.take() == []


def test_a_taken_inbox_is_silent_until_the_next_wake_or_command() -> None:
    inbox = Inbox()
    for _ in range(3):
        inbox.wake()
        inbox.put(lambda: None)
        assert is_readable(inbox)
        assert len(inbox.take()) == 1
        assert not is_readable(inbox)
        assert inbox.take() == []
    with inbox.hold(lambda: True):
        inbox.put(lambda: None)
    assert not is_readable(inbox)  # whoever held it has run the commands
    inbox.wake()
    assert is_readable(inbox)
    inbox.close()


def is_readable(inbox: Inbox) -> bool:
    return bool(select.select([inbox.fileno()], [], [], 0)[0])


def test_a_message_is_sent_when_zmq_holds_none_of_its_frames() -> None:
    frames = [np.zeros(8, np.uint8) for _ in range(3)]
    sent = DataSent(frames)
    while frames:
        assert not sent.is_done()
        frames.pop()
    assert sent.is_done()


_FAULTS = """
import ctypes, resource, threading
from services.transfer.heap import keep_freed

assert keep_freed(64 << 20)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)

def receive():
    frames = [libc.malloc(360 << 10) for _ in range(20)]
    for frame in frames:
        ctypes.memset(frame, 1, 360 << 10)
    for frame in frames:
        libc.free(frame)

def rounds():
    receive()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    receive()
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

thread = threading.Thread(target=rounds)  # not the main arena, as in ZMQ's own thread
thread.start()
thread.join()
"""


def test_memory_of_messages_is_faulted_in_once() -> None:
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        pytest.skip("another C library")
    command = [sys.executable, "-c", _FAULTS]
    told = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert int(told.stdout) < 20  # of 1,800 pages


@pytest.fixture(params=["library", "numpy"])
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the C library, and as where there is no compiler."""
    if request.param == "numpy":
        monkeypatch.setattr(kv_blocks, "available", lambda: (None, "switched off"))
    elif kv_blocks.available()[0] is None:
        pytest.skip(kv_blocks.available()[1])
    return str(request.param)


def _pull(pool: KvPoolMemory, gen: int, dest: np.ndarray) -> bool:
    (good,) = pull_blocks(pool, [0], [gen], dest, [0])
    return good


@pytest.mark.usefixtures("copier")
def test_blocks_in_any_order_and_in_runs_come_where_they_belong() -> None:
    with KvPoolMemory.create(LAYOUT, 8, kind="anonymous") as pool:
        pool.blocks[:] = np.arange(8, dtype=np.uint8)[:, None] + 1
        pool.gens[:] = 2
        pool.gens[3] = 4  # reused since it was announced
        dest = np.zeros((8, LAYOUT.block_bytes), np.uint8)
        sources, dests = [1, 2, 3, 4, 5, 0, 7], [4, 5, 6, 7, 0, 1, 3]
        good = pull_blocks(pool, sources, [2] * 7, dest, dests)
        assert good == [True, True, False, True, True, True, True]
        assert dest[:, 0].tolist() == [6, 1, 0, 8, 2, 3, 0, 5]
        assert (dest == dest[:, :1]).all()


@pytest.mark.usefixtures("copier")
def test_seqlock_refuses_a_block_that_is_or_gets_written() -> None:
    with KvPoolMemory.create(LAYOUT, 2, kind="anonymous") as pool:
        pool.blocks[0] = 7
        dest = np.zeros((1, LAYOUT.block_bytes), np.uint8)
        pool.gens[0] = 4
        assert _pull(pool, 4, dest)
        assert (dest == 7).all()
        assert not _pull(pool, 2, dest)  # reused since it was announced
        pool.gens[0] = 5
        assert not _pull(pool, 5, dest)  # being written
        pool.gens[0] = 4

        class Racing:
            """A pool whose owner takes the block back while it is copied."""

            gens = pool.gens

            def pieces(self, part: KvLayout | None) -> np.ndarray:
                pool.gens[0] += 1
                return pool.pieces(part)

        assert not _pull(Racing(), 4, dest)  # type: ignore[arg-type]  # same two views


@pytest.mark.usefixtures("copier")
@pytest.mark.parametrize("tag", [BLOCK_MAJOR, LAYER_MAJOR])
def test_a_generation_that_changes_during_the_copy_is_noticed(tag: str) -> None:
    with KvPoolMemory.create(replace(LAYOUT, tag=tag), 2, kind="anonymous") as pool:
        pool.pieces()[:] = 7
        dest = np.zeros((2, LAYOUT.block_bytes), np.uint8)
        pool.gens = dest[0, :16].view(np.uint64)  # what the copy writes there is the owner's work
        pool.gens[:] = 4
        assert pull_blocks(pool, [0], [4], dest, [1]) == [True]
        assert pull_blocks(pool, [0], [4], dest, [0]) == [False]
        assert (dest == 7).all()


@pytest.mark.usefixtures("copier")
@pytest.mark.parametrize("tag", [BLOCK_MAJOR, LAYER_MAJOR])
def test_no_torn_block_is_accepted_while_a_writer_reuses_them(tag: str) -> None:
    """The pull of a pool in use: what is accepted is of one generation, whatever else goes on."""
    num_blocks, stop = 4, threading.Event()
    with KvPoolMemory.create(replace(LAYOUT, tag=tag), num_blocks) as pool:
        pieces = pool.pieces()
        dest = np.zeros((num_blocks, LAYOUT.block_bytes), np.uint8)

        def write() -> None:
            while not stop.is_set():
                for row in range(num_blocks):
                    pool.gens[row] += 1
                    pieces[row] = int(pool.gens[row]) // 2 % 251
                    pool.gens[row] += 1

        writer = threading.Thread(target=write)
        writer.start()
        try:
            num_accepted = num_refused = 0
            deadline = time.monotonic() + 20
            while (num_accepted < 200 or num_refused < 20) and time.monotonic() < deadline:
                gens = [int(gen) for gen in pool.gens]
                good = pull_blocks(pool, range(num_blocks), gens, dest, range(num_blocks))
                for row, gen in enumerate(gens):
                    if good[row]:
                        assert gen % 2 == 0
                        # The writer's value for the generation it ends with.
                        assert (dest[row] == (gen - 1) // 2 % 251).all() or gen == 0
                num_accepted += sum(good)
                num_refused += num_blocks - sum(good)
        finally:
            stop.set()
            writer.join()
        assert num_accepted >= 200
        assert num_refused >= 20


def test_the_library_refuses_rows_and_pools_that_do_not_fit() -> None:
    library, why = kv_blocks.available()
    if library is None:
        pytest.skip(why)
    with KvPoolMemory.create(LAYOUT, 2, kind="anonymous") as pool:
        dest, pieces = np.zeros((2, LAYOUT.block_bytes), np.uint8), pool.pieces()
        one, wanted = np.array([0]), np.zeros(1, np.uint64)
        job = kv_blocks.PullJob(pieces, pool.gens, one, wanted, dest, one)
        for at, to in ((2, 0), (-1, 0), (0, 2), (0, -1)):
            with pytest.raises(ValueError, match="outside its pool"):
                replace(job, source_rows=np.array([at]), dest_rows=np.array([to]))
        with pytest.raises(ValueError, match="as many"):
            replace(job, wanted_gens=np.zeros(2, np.uint64))
        strided, both = np.zeros(4, np.int64)[::2], np.zeros(2, np.int64)
        with pytest.raises(ValueError, match="in a row"):
            replace(job, source_rows=strided, wanted_gens=pool.gens, dest_rows=both)
        with pytest.raises(ValueError, match="do not fit"):
            replace(job, dest=dest[:, 1:])
        with pytest.raises(ValueError, match="do not fit"):
            replace(job, pieces=pieces[..., ::2], dest=dest[:, ::2].copy())
        with pytest.raises(ValueError, match="as many"):
            replace(job, gens=pool.gens[:1])
        with pytest.raises(ValueError, match="digests"):
            library.pull_with_digests(job, kv_blocks.DigestPlan(1, 64, [0, 8]))
        with pytest.raises(ValueError, match="outside its pool"):
            library.gather(pieces, np.array([0, 2]), dest)
        with pytest.raises(ValueError, match="as many"):
            library.gather(pieces, one, dest)
        none, no_gens = np.empty(0, np.int64), np.empty(0, np.uint64)
        empty = replace(job, source_rows=none, wanted_gens=no_gens, dest_rows=none)
        assert library.pull(empty).tolist() == []


@pytest.mark.parametrize("tag", [BLOCK_MAJOR, LAYER_MAJOR])
@pytest.mark.parametrize("num_threads", [1, 2, 16, 100])
def test_threads_share_a_long_copy_and_its_digests(num_threads: int, tag: str) -> None:
    """As many blocks as go around the caches; one of them was reused since it was announced."""
    if kv_blocks.available()[0] is None:
        pytest.skip(kv_blocks.available()[1])
    layout = KvLayout(30, 3, 64, "float32", tag=tag)
    count, ours = 7, replace(layout, tag=BLOCK_MAJOR)
    assert count * layout.block_bytes > 4 << 20
    rng = np.random.default_rng(num_threads)
    content = rng.integers(0, 256, (count, layout.block_bytes), np.uint8)
    with (
        KvPoolMemory.create(layout, count, kind="anonymous") as pool,
        KvPoolMemory.create(ours, count, kind="anonymous") as memory,
    ):
        for block in range(count):
            write_block(pool, block, content[block])
        pool.gens[:] = 2
        pool.gens[5] = 4
        dests, expected = [3, 1, 0, 6, 5, 4, 2], [block != 5 for block in range(count)]
        plain = pull_blocks(
            pool, range(count), [2] * count, memory.blocks, dests, num_threads=num_threads
        )
        assert plain == expected
        written = [block for block in range(count) if block != 5]
        assert all((memory.blocks[dests[b]] == content[b]).all() for b in written)
        memory.blocks[:] = 0
        found = pull_with_digests(
            pool, range(count), [2] * count, memory, dests, num_threads=num_threads
        )
        assert found is not None
        assert found[0] == expected
        for block in written:
            assert (memory.blocks[dests[block]] == content[block]).all()
            assert found[1][block].tolist() == block_digests(ours, content[block]).tolist()
        assert not memory.blocks[dests[5]].any()


def test_copies_that_come_back_before_their_helpers_leave_them_nothing() -> None:
    """More threads than cores and than may help at once: each copy is whole when it returns.

    Its target is written over at once, and its generations and rows are freed: a helper that came
    too late and copied all the same would show in the next copy.
    """
    if kv_blocks.available()[0] is None:
        pytest.skip(kv_blocks.available()[1])
    layout = KvLayout(30, 3, 64, "float32")
    num_callers, num_rounds, count = 5, 8, 6
    content = np.random.default_rng(7).integers(0, 256, (count, layout.block_bytes), np.uint8)
    with (
        KvPoolMemory.create(layout, count, kind="anonymous") as pool,
        KvPoolMemory.create(layout, num_callers * count, kind="anonymous") as memory,
        ThreadPoolExecutor(num_callers) as callers,
    ):
        pool.blocks[:] = content
        pool.gens[:] = 2

        def rounds(caller: int) -> int:
            num_wrong, mine = 0, memory.blocks[caller * count : (caller + 1) * count]
            for turn in range(num_rounds):
                rows = [(block + turn) % count for block in range(count)]
                good = pull_blocks(pool, rows, [2] * count, mine, range(count), num_threads=16)
                num_wrong += count - sum(good) + int((mine != content[rows]).any())
                mine[:] = 0
                num_wrong += int(mine.any())
            return num_wrong

        assert list(callers.map(rounds, range(num_callers))) == [0] * num_callers


@pytest.mark.parametrize("count", [1, 3, 100])
def test_streamed_and_plain_copies_are_whole(count: int) -> None:
    """Lists long enough to go around the caches, and rows that are not whole cache lines."""
    library, why = kv_blocks.available()
    if library is None:
        pytest.skip(why)
    rng = np.random.default_rng(count)
    for block_bytes in (220 * 5 * 64, 220 * 299):
        blocks = rng.integers(0, 256, (count, block_bytes), np.uint8)
        raw = np.zeros(blocks.nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64  # as a pool's blocks: only then does it go around the caches
        dest = raw[start : start + blocks.nbytes].reshape(blocks.shape)
        rows, order = np.arange(count), rng.permutation(count)
        gens = np.zeros(count, np.uint64)
        job = kv_blocks.PullJob(blocks[:, None], gens, rows, gens, dest, order)
        assert library.pull(job).all()
        assert (dest[order] == blocks).all()
        for num_pieces in (4, 20, 22):  # up to as many as are read together, and some left over
            by_piece = blocks.reshape(count, num_pieces, -1).transpose(1, 0, 2).copy()
            dest[:] = 0
            pool = (by_piece.transpose(1, 0, 2), gens)
            assert library.pull(kv_blocks.PullJob(*pool, rows, gens, dest, order)).all()
            assert (dest[order] == blocks).all()
