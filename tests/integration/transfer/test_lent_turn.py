"""Turns of a source that run on the engine's thread: wake-ups, deadlines, stops, faults, races."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.transfer import source
from services.transfer.loop import Inbox
from services.transfer.memfd_plane import PoolServer
from tests.support.transfer_ends import (
    CALM,
    PrefillEnd,
    make_decode,
    make_prefill,
    outcome,
    same_content,
    wait_until,
    with_planes,
)

pytestmark = pytest.mark.integration

MEMFD = with_planes(CALM, "memfd")
SHORT_S, FAR_S = 0.1, 60.0
MAX_TRIES = 50  # the thread may be at work just then; mostly it sleeps


@pytest.fixture
def wakes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads that woke another one without a command of their own."""
    woken: list[int] = []
    wake = Inbox.wake

    def noted(inbox: Inbox) -> None:
        woken.append(threading.get_ident())
        wake(inbox)

    monkeypatch.setattr(Inbox, "wake", noted)
    return woken


@pytest.fixture
def flushers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads that ran a turn of the source: the last act of each is to flush the pool server."""
    seen: list[int] = []
    flush = PoolServer.flush

    def noted(server: PoolServer) -> list[bytes]:
        seen.append(threading.get_ident())
        return flush(server)

    monkeypatch.setattr(PoolServer, "flush", noted)
    return seen


@pytest.fixture
def fast_switches() -> Iterator[None]:
    """Let threads interrupt each other all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _offer_lent(prefill: PrefillEnd, wakes: list[int]) -> str:
    """Offer a prompt in a batch that our thread runs itself; return its key.

    A prompt offered and cancelled in the same batch tells by its event who ran it.
    """
    for number in range(MAX_TRIES):
        time.sleep(0.02)  # the thread goes back to sleep
        wakes.clear()
        key, witness = f"k{number}", f"witness{number}"
        with prefill.source.batch():
            prefill.offer(key, 16)
            prefill.offer(witness, 16)
            prefill.source.cancel(witness, "only to see who runs this")
        prefill.events.wait(witness)
        if prefill.events.deliverers[witness] == threading.get_ident():
            return key
        prefill.source.cancel(key, "next try")  # no deadline of it is to wake the thread
        prefill.events.wait(key)
    raise AssertionError("the transfer thread never slept")


def test_the_sleeping_thread_is_woken_for_a_deadline_that_has_come_nearer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wakes: list[int]
) -> None:
    """Our thread makes the offer, and only the sleeping one can notice that it has expired."""
    monkeypatch.setattr(source, "_IDLE_WAIT_S", FAR_S)
    config = replace(MEMFD, ticket_ttl_s=SHORT_S, tombstone_s=2 * FAR_S)
    prefill = make_prefill(tmp_path, config)
    try:
        key = _offer_lent(prefill, wakes)
        assert outcome(prefill.events.wait(key, timeout_s=FAR_S / 6)) == "expired"
        assert prefill.events.deliverers[key] != threading.get_ident()
    finally:
        prefill.stop()


def test_the_sleeping_thread_is_left_alone_when_it_looks_around_soon_enough(
    tmp_path: Path, wakes: list[int]
) -> None:
    """All there is to do is done, so a wake-up would only cost a change of threads."""
    prefill = make_prefill(tmp_path, replace(MEMFD, ticket_ttl_s=FAR_S))
    try:
        _offer_lent(prefill, wakes)
        assert threading.get_ident() not in wakes
    finally:
        prefill.stop()


def test_a_stop_that_our_thread_began_ends_the_sleeping_one_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wakes: list[int]
) -> None:
    """With nothing open there is nothing to wait for, and no deadline says so."""
    monkeypatch.setattr(source, "_IDLE_WAIT_S", 3.0)
    prefill = make_prefill(tmp_path, MEMFD)
    prefill.source.cancel(_offer_lent(prefill, wakes), "nothing is left open")
    wait_until(lambda: prefill.source.num_open() == 0)
    time.sleep(0.02)  # the thread goes back to sleep
    stopper = threading.Thread(target=prefill.source.stop, args=(20.0,))
    with prefill.source.batch():  # what comes meanwhile wakes nobody
        stopper.start()
        time.sleep(0.1)
        assert prefill.source.is_alive()
    stopper.join(2.0)
    assert not prefill.source.is_alive()


def test_a_fault_of_the_source_does_not_end_the_step_it_was_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wakes: list[int]
) -> None:
    flush = PoolServer.flush
    own, num_faults = threading.get_ident(), 0

    def broken(server: PoolServer) -> list[bytes]:
        nonlocal num_faults
        if threading.get_ident() == own:
            num_faults += 1
            raise RuntimeError("by the test")
        return flush(server)

    monkeypatch.setattr(PoolServer, "flush", broken)
    prefill, decode = make_prefill(tmp_path, MEMFD), make_decode(MEMFD)
    try:
        _offer_lent(prefill, wakes)
        assert num_faults > 0
        ticket, offer = prefill.offer_all("after", 50)
        decode.receive("after", ticket, offer)
        assert outcome(decode.events.wait("after")) == "ready"
    finally:
        decode.stop()
        prefill.stop()


@pytest.mark.usefixtures("fast_switches")
def test_many_threads_take_turns_with_the_transfer_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flushers: list[int]
) -> None:
    """Announcements and cancels of several threads lose, double or mix nothing."""
    prefill = make_prefill(tmp_path, MEMFD, num_blocks=1024)
    decode = make_decode(MEMFD, num_blocks=1024)
    num_threads, num_handoffs = 4, 25
    faults: list[BaseException] = []

    def hand_over(thread: int) -> None:
        try:
            for number in range(num_handoffs):
                key = f"{thread}-{number}"
                ticket, offer = prefill.offer(key, 50)
                blocks = decode.receive(key, ticket, offer)
                with prefill.source.batch():
                    prefill.seal(key, 0, 2)
                if number % 5 == 4:
                    prefill.source.cancel(key, "by the test")
                    assert prefill.events.wait(key).outcome == "aborted"
                    assert outcome(decode.events.wait(key)) == "handoff_failed"
                    continue
                with prefill.source.batch():
                    prefill.seal(key, 2, 1)
                    prefill.finish(key, 50)
                assert outcome(decode.events.wait(key)) == "ready"
                assert prefill.events.wait(key).outcome == "done"
                assert same_content(prefill, key, decode, blocks, 2)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=hand_over, args=(i,)) for i in range(num_threads)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert faults == []
        idents = {thread.ident for thread in threads}
        num_lent = sum(ident in idents for ident in flushers)
        assert 0 < num_lent < len(flushers), "the turns were all of one kind"
    finally:
        decode.stop()
        prefill.stop()
    assert len(prefill.events.all) == num_threads * num_handoffs
    counters = prefill.source.counters
    assert (counters.bad_frames, decode.sink.counters.gaps) == (0, 0)
    assert prefill.source.num_open() == decode.sink.num_open() == 0
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
