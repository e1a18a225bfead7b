"""Handoffs between processes, one of which is killed or frozen."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.transfer.api import Offer
from services.transfer.ticket import TicketSigner, read_unverified
from tests.support.transfer_ends import (
    BRISK,
    CALM,
    PAUSE_S,
    DecodeEnd,
    PrefillEnd,
    hashes,
    make_decode,
    make_prefill,
    outcome,
    wait_until,
    with_planes,
)
from tests.support.transfer_process import EndProcess, content_hashes

pytestmark = pytest.mark.integration

Spawn = Callable[[str, str], EndProcess]  # role, times


@pytest.fixture(params=["memfd", "nccl", "zmq"])
def plane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def spawn(plane: str, tmp_path: Path) -> Iterator[Spawn]:
    processes: list[EndProcess] = []

    def start(role: str, times: str) -> EndProcess:
        processes.append(EndProcess(role, times, plane, tmp_path))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
def decode(plane: str) -> Iterator[DecodeEnd]:
    end = make_decode(with_planes(CALM, plane))
    yield end
    end.stop()


@pytest.fixture
def prefill(plane: str, tmp_path: Path) -> Iterator[PrefillEnd]:
    end = make_prefill(tmp_path, with_planes(CALM, plane))
    yield end
    end.stop()


def _offer(num_tokens: int) -> Offer:
    return Offer("k", "", num_tokens, hashes(num_tokens // 16), "")


@pytest.fixture
def brisk_decode(plane: str) -> Iterator[DecodeEnd]:
    end = make_decode(with_planes(BRISK, plane))
    yield end
    end.stop()


@pytest.fixture
def brisk_prefill(plane: str, tmp_path: Path) -> Iterator[PrefillEnd]:
    end = make_prefill(tmp_path, with_planes(BRISK, plane))
    yield end
    end.stop()


def test_content_crosses_processes(spawn: Spawn, decode: DecodeEnd, plane: str) -> None:
    prefill = spawn("prefill", "calm")
    ticket = bytes.fromhex(prefill.ask("offer", key="k", num_tokens=160)["ticket"])
    blocks = decode.receive("k", ticket, _offer(160))
    sent = prefill.ask("seal", key="k", lo=0, count=4)["hashes"]
    sent += prefill.ask("seal", key="k", lo=4, count=6)["hashes"]
    prefill.ask("finish", key="k", num_tokens=160)
    ready = decode.events.wait("k")
    assert outcome(ready) == "ready"
    assert content_hashes(decode, blocks) == sent
    assert ready.stats.plane == plane
    assert prefill.ask("wait", key="k")["outcome"] == "done"


def test_killed_prefill_fails_the_receive_at_once(spawn: Spawn, decode: DecodeEnd) -> None:
    """The worker recomputes; nothing hangs and nothing is delivered."""
    prefill = spawn("prefill", "calm")
    ticket = bytes.fromhex(prefill.ask("offer", key="k", num_tokens=160)["ticket"])
    decode.receive("k", ticket, _offer(160))
    prefill.ask("seal", key="k", lo=0, count=4)
    wait_until(lambda: decode.sink.counters.blocks >= 4)
    prefill.kill()
    failed = decode.events.wait("k", CALM.lease_s / 2)  # it does not take a lease to notice
    assert (failed.code, failed.can_recompute) == ("handoff_failed", True)
    assert decode.sink.num_open() == 0


def test_killed_decode_frees_prefill_within_a_lease(
    spawn: Spawn, brisk_prefill: PrefillEnd
) -> None:
    prefill = brisk_prefill
    decode = spawn("decode", "brisk")
    ticket, _ = prefill.offer("k", 160)
    decode.ask("open", key="k", ticket=ticket.hex(), num_tokens=160)
    decode.ask("reserve", key="k", num_tokens=160)
    prefill.seal("k", 0, 6)
    decode.wait_for("blocks", 6)
    decode.kill()
    released = prefill.events.wait("k", BRISK.lease_s + PAUSE_S)
    assert released.outcome == "peer_lost"
    prefill.memory.blocks[:] = 0  # nothing reads them any more
    assert prefill.source.num_open() == 0


def test_frozen_decode_frees_prefill_without_traffic(
    spawn: Spawn, brisk_prefill: PrefillEnd
) -> None:
    prefill = brisk_prefill
    decode = spawn("decode", "brisk")
    ticket, _ = prefill.offer_all("k", 160)
    decode.ask("open", key="k", ticket=ticket.hex(), num_tokens=160)
    decode.wait_for("opened", 1)
    decode.signal(signal.SIGSTOP)
    released = prefill.events.wait("k", BRISK.lease_s + PAUSE_S)
    assert released.outcome == "peer_lost"
    for block in prefill.lent["k"]:
        prefill.write_block(block)  # another request has them now
    decode.signal(signal.SIGCONT)
    decode.ask("reserve", key="k", num_tokens=160)
    assert decode.ask("wait", key="k", blocks=[])["outcome"] == "handoff_failed"


def test_frozen_prefill_is_given_up_by_ping(spawn: Spawn, brisk_decode: DecodeEnd) -> None:
    prefill, decode = spawn("prefill", "calm"), brisk_decode
    ticket = bytes.fromhex(prefill.ask("offer", key="k", num_tokens=160)["ticket"])
    decode.receive("k", ticket, _offer(160))
    prefill.ask("seal", key="k", lo=0, count=4)
    wait_until(lambda: decode.sink.counters.blocks >= 4)
    prefill.signal(signal.SIGSTOP)
    silence_s = BRISK.peer_timeout_s + BRISK.ping_interval_s
    failed = decode.events.wait("k", silence_s + BRISK.connect_timeout_s + PAUSE_S)
    assert failed.code == "handoff_failed"
    prefill.signal(signal.SIGCONT)


def test_restarted_prefill_refuses_the_old_ticket(
    plane: str, tmp_path: Path, decode: DecodeEnd, prefill: PrefillEnd
) -> None:
    """RB-099, fencing: a new life at the same address is another worker."""
    first = make_prefill(tmp_path, with_planes(CALM, plane))
    ticket, offer = first.offer_all("k", 40)
    first.stop()
    # The new life has the address the ticket names.
    moved = replace(read_unverified(ticket), zmq_endpoint=prefill.source.endpoint)
    decode.receive("k", TicketSigner().issue(moved), offer)
    failed = decode.events.wait("k")
    assert failed.code == "handoff_failed"
    assert "restarted" in failed.message


def test_restarted_decode_gets_through_and_its_old_life_does_not(
    prefill: PrefillEnd, plane: str
) -> None:
    """RB-099: same name, new incarnation; the router has raised the attempt."""
    ticket, offer = prefill.offer_all("k", 40)
    old = make_decode(with_planes(CALM, plane), worker_id="decode-0")
    old.open("k", ticket, offer, attempt=1)
    wait_until(lambda: prefill.source.counters.opened == 1)
    new = make_decode(with_planes(CALM, plane), worker_id="decode-0")
    try:
        new.receive("k1", ticket, offer, attempt=1)
        assert "BUSY" in new.events.wait("k1").message
        new.receive("k2", ticket, offer, attempt=2)
        assert outcome(new.events.wait("k2")) == "ready"
        assert "fenced" in old.events.wait("k").message
    finally:
        old.stop()
        new.stop()
