"""Groups without a backend: names, bounds, entries, and the life of one between two threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from services.common.clock import SystemClock
from services.transfer.device import DECODE_RANK, GroupError, GroupSpec, HostBytes, PeerBlocks
from services.transfer.group_runner import Batch, GroupRunner, RunnerParts
from services.transfer.group_table import GroupTable, group_name
from services.transfer.pair_store import MAX_ENTRIES, MAX_VALUE_BYTES, PairStore, StoreClosed

SPEC = GroupSpec("kv/a/b/1", DECODE_RANK, "127.0.0.1", 64, 2, 1.0)


# ---- table, names, entries ----------------------------------------------------------------------


def test_every_life_and_every_try_has_a_name_of_its_own() -> None:
    names = {group_name(p, d, n) for p in (1, 2) for d in (1, 2) for n in (1, 2)}
    assert len(names) == 8


def test_room_is_made_by_the_idle_group_used_longest_ago() -> None:
    table: GroupTable[str, str] = GroupTable(2)
    table.add("a", "group a")
    table.add("b", "group b")
    assert not table.has_room()
    table.use("a")
    assert table.evictable(lambda _: True) == ("b", "group b")
    assert table.evictable(lambda group: group != "group b") == ("a", "group a")
    assert table.evictable(lambda _: False) is None
    assert table.bury("b") == "group b"
    assert table.has_room()
    assert (table.num_live, table.num_dying, table.is_choked) == (1, 1, False)
    table.bury("a")
    assert table.is_choked  # two aborts that do not return: no third group gets memory
    table.forget("group b")
    assert not table.is_choked


def test_what_one_end_sets_both_can_get() -> None:
    told: list[tuple[bytes, bytes]] = []
    left = PairStore(lambda key, value: told.append((key, value)))
    right = PairStore(lambda _key, _value: None)
    left.set("0/address", b"here")
    assert told == [(b"0/address", b"here")]
    threading.Timer(0.05, lambda: right.on_entry(*told[0])).start()
    assert right.get("0/address", 5.0) == left.get("0/address", 0.0) == b"here"
    with pytest.raises(TimeoutError):
        right.wait(["1/address"], 0.01)


def test_entries_of_a_peer_are_bounded() -> None:
    store = PairStore(lambda _key, _value: None)
    for i in range(MAX_ENTRIES):
        store.on_entry(b"%d" % i, b"")
    with pytest.raises(ValueError, match="too many"):
        store.on_entry(b"more", b"")
    store.on_entry(b"0", b"again")
    with pytest.raises(ValueError, match="too long"):
        store.on_entry(b"0", bytes(MAX_VALUE_BYTES + 1))


def test_nobody_waits_for_entries_of_a_group_that_was_given_up() -> None:
    store = PairStore(lambda _key, _value: None)
    threading.Timer(0.05, store.close).start()
    with pytest.raises(StoreClosed):
        store.get("0", 10.0)


# ---- a group's life ------------------------------------------------------------------------------


@dataclass
class FakeGroup:
    """A group whose batches end when the test says so, and whose abort it may hold up."""

    entered: queue.Queue[tuple[int, int]] = field(default_factory=queue.Queue)
    may_end: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    abort_returns: threading.Event = field(default_factory=threading.Event)
    is_aborted: bool = False
    slots: HostBytes = field(default_factory=lambda: np.zeros((2, 64), np.uint8))

    def host(self, slot: int) -> HostBytes:
        view: HostBytes = self.slots[slot]
        return view

    def send(self, slot: int, size_bytes: int) -> FakeGroup:
        raise AssertionError("this end receives")

    def recv(self, slot: int, size_bytes: int) -> FakeGroup:
        self.entered.put((slot, size_bytes))
        return self

    def wait(self) -> None:
        self.may_end.acquire()
        if self.is_aborted:
            raise GroupError("aborted")

    def abort(self) -> None:
        self.abort_returns.wait(10)
        self.is_aborted = True
        self.may_end.release()


class FakeDevice:
    """Builds one given group, or waits for entries that do not come."""

    kind, group_backend = "cpu", "fake"

    def __init__(self, group: FakeGroup | None) -> None:
        self._group = group

    def export_pool(self) -> bytes:
        raise AssertionError("not asked for")

    def open_pool(self, handle: bytes, num_blocks: int, block_bytes: int) -> PeerBlocks:
        raise AssertionError("not asked for")

    def make_group(self, spec: GroupSpec, store: PairStore) -> FakeGroup:
        if self._group is None:
            try:
                store.get("peer", spec.build_timeout_s)
            except (StoreClosed, TimeoutError) as error:
                raise GroupError(type(error).__name__) from error
        assert self._group is not None
        return self._group


class Heard:
    """A RunnerOwner, on a thread of the runner: what was said, in order."""

    def __init__(self) -> None:
        self.said: queue.Queue[str] = queue.Queue()

    def on_ready(self, runner: GroupRunner) -> None:
        self.said.put("ready")

    def on_left(self, runner: GroupRunner, batch: Batch) -> None:
        self.said.put(f"left {batch.about}")

    def on_dead(self, runner: GroupRunner, why: str) -> None:
        self.said.put(f"dead: {why}")

    def on_gone(self, runner: GroupRunner) -> None:
        self.said.put("gone")

    def next(self) -> str:
        return self.said.get(timeout=10)


def run(group: FakeGroup | None, timeout_s: float = 30.0) -> tuple[GroupRunner, Heard]:
    heard = Heard()
    post: Callable[[Callable[[], None]], None] = lambda command: command()  # noqa: E731
    parts = RunnerParts(FakeDevice(group), SystemClock(), post, heard, timeout_s)
    runner = GroupRunner(SPEC, PairStore(lambda _key, _value: None), parts)
    runner.start()
    return runner, heard


def test_batches_enter_and_leave_in_order_and_two_at_most() -> None:
    group = FakeGroup()
    group.abort_returns.set()
    runner, heard = run(group)
    for i in range(4):
        runner.submit(Batch(i % 2, 10 + i, False, i))
    assert heard.next() == "ready"
    assert [group.entered.get(timeout=10) for _ in range(2)] == [(0, 10), (1, 11)]
    assert group.entered.empty()
    for i in range(4):
        group.may_end.release()
        assert heard.next() == f"left {i}"
    runner.abort("enough")
    assert [heard.next(), heard.next()] == ["dead: enough", "gone"]


def test_death_is_told_at_once_and_slots_are_held_until_the_abort_has_returned() -> None:
    group = FakeGroup()
    runner, heard = run(group, timeout_s=0.1)
    runner.submit(Batch(0, 10, False, "late"))
    assert heard.next() == "ready"
    assert heard.next() == "dead: a batch was inside for 0.1 s"
    assert not runner.join(0.05)
    assert runner.host(0) is not None  # still the group's: its memory is not given to anybody
    group.abort_returns.set()
    assert heard.next() == "gone"
    assert runner.join(5.0)
    assert heard.said.empty()  # what left the group after its death was told to nobody
    with pytest.raises(GroupError):
        runner.host(0)


def test_a_group_that_is_given_up_while_it_is_built() -> None:
    runner, heard = run(None)
    runner.abort("the connection broke")
    assert [heard.next(), heard.next()] == ["dead: the connection broke", "gone"]


def test_a_group_that_cannot_be_built_says_why() -> None:
    _, heard = run(None)
    assert heard.next() == "dead: cannot be built: TimeoutError"
    assert heard.next() == "gone"
