"""Messages over the socket that handed the pool over: order, bounds, nonsense, and hanging up."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.chaos.tcp_proxy import Faults, TcpProxy
from services.transfer.doorbell import MAX_PACKET_BYTES, Doorbell, HungUp, bell_peer, fits
from services.transfer.memfd_plane import PoolClient
from services.transfer.wire import HEADER_BYTES, Header, MessageType, WireError, encode
from services.transfer.zmq_plane import RouterPort, parse_route, peer_base
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

Pair = tuple[Doorbell, Doorbell, socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield Doorbell(ours, 7), Doorbell(theirs, 8), ours, theirs


def _bodies(bell: Doorbell) -> list[bytes]:
    bodies: list[bytes] = []
    while (message := bell.recv()) is not None:
        bodies.append(message.body)
    return bodies


def test_messages_come_whole_and_in_order(pair: Pair) -> None:
    ours, theirs, *_ = pair
    ours.send(MessageType.READY, b"one", xfer_id=5, attempt=2)
    ours.send(MessageType.FINAL, b"")
    assert theirs.recv() is None
    ours.flush()
    message = theirs.recv()
    assert message is not None
    header = message.header
    assert (header.type, header.incarnation, header.xfer_id) == (MessageType.READY, 7, 5)
    assert (header.attempt, header.seq, message.body) == (2, 1, b"one")
    assert theirs.has_unread  # both came in one packet
    final = theirs.recv()
    assert final is not None
    assert (final.header.type, final.header.seq, final.body) == (MessageType.FINAL, 2, b"")
    assert theirs.recv() is None
    assert ours.recv() is None


def test_what_a_slow_peer_does_not_read_waits_and_keeps_its_order(pair: Pair) -> None:
    ours, theirs, *_ = pair
    sent = [bytes([i % 256]) * 60_000 for i in range(40)]
    for body in sent:
        ours.send(MessageType.READY, body)
    ours.flush()
    assert ours.has_backlog
    got = _bodies(theirs)
    while ours.has_backlog:
        ours.flush()
        got += _bodies(theirs)
    assert got == sent


def test_a_peer_that_never_reads_is_given_up(pair: Pair) -> None:
    ours, *_ = pair

    def send_all() -> None:
        for _ in range(20_000):
            ours.send(MessageType.PULLED, b"x" * 100)
            ours.flush()

    with pytest.raises(HungUp, match="slowly"):
        send_all()


def test_long_messages_do_not_fit_and_are_not_sent(pair: Pair) -> None:
    ours, theirs, *_ = pair
    longest = b"x" * (MAX_PACKET_BYTES - HEADER_BYTES)
    assert fits(longest)
    ours.send(MessageType.READY, longest)
    ours.flush()
    assert not fits(longest + b"x")
    with pytest.raises(WireError) as raised:
        ours.send(MessageType.READY, longest + b"x")
    assert raised.value.reason == "packet_length"
    assert _bodies(theirs) == [longest]


@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        (b"x", "header_length"),
        (b"x" * HEADER_BYTES, "magic"),
        (b"x" * (MAX_PACKET_BYTES + 1), "packet_length"),
        (b"".join(encode(Header(MessageType.READY, 7), b"body"))[:-1], "body_length"),
        (b"".join(encode(Header(MessageType.DATA, 7, n_payload=1), b"")), "payload_count"),
    ],
)
def test_nonsense_is_refused_and_what_follows_is_read(
    pair: Pair, packet: bytes, reason: str
) -> None:
    ours, theirs, raw, _ = pair
    raw.send(packet)
    ours.send(MessageType.FINAL, b"fine")
    ours.flush()
    with pytest.raises(WireError) as raised:
        theirs.recv()
    assert raised.value.reason == reason
    assert _bodies(theirs) == [b"fine"]


def test_a_closed_end_is_told_to_reader_and_writer(pair: Pair) -> None:
    ours, theirs, raw, _ = pair
    ours.send(MessageType.FINAL, b"last")
    ours.flush()
    raw.close()
    assert theirs.recv() is not None
    with pytest.raises(HungUp):
        theirs.recv()
    theirs.send(MessageType.DONE)
    with pytest.raises(HungUp):
        theirs.flush()


def test_nonsense_behind_a_message_loses_only_itself(pair: Pair) -> None:
    ours, theirs, raw, _ = pair
    good = b"".join(encode(Header(MessageType.READY, 7), b"good"))
    raw.send(good + b"!" * HEADER_BYTES + good)
    ours.send(MessageType.FINAL, b"fine")
    ours.flush()
    message = theirs.recv()
    assert message is not None
    assert message.body == b"good"
    with pytest.raises(WireError):
        theirs.recv()
    assert _bodies(theirs) == [b"fine"]


def test_routes_of_connections_name_their_peer() -> None:
    base = peer_base("decode-0", 5)
    first, second = bell_peer(base, 1), bell_peer(base, 2)
    assert first != second
    assert parse_route(first.route) == first
    assert parse_route(second.route) == second


def test_a_handoff_on_one_host_needs_no_network_once_it_is_agreed(tmp_path: Path) -> None:
    """With memfd nothing of a transfer waits for ZMQ, whose link stands still here."""
    faults = Faults()
    proxy = TcpProxy(("127.0.0.1", 0), faults)
    memfd = with_planes(CALM, "memfd")
    prefill = make_prefill(tmp_path, memfd, advertise=f"127.0.0.1:{proxy.port}")
    assert prefill.source.port is not None
    proxy.target = ("127.0.0.1", prefill.source.port)
    decode = make_decode(memfd)
    try:
        ticket, offer = prefill.offer_all("first", 50)
        decode.receive("first", ticket, offer)
        assert outcome(decode.events.wait("first")) == "ready"
        faults.is_silent = True
        ticket, offer = prefill.offer_all("second", 50)
        blocks = decode.receive("second", ticket, offer)
        assert outcome(decode.events.wait("second")) == "ready"
        assert prefill.events.wait("second").outcome == "done"
        assert same_content(prefill, "second", decode, blocks, 2)
    finally:
        faults.is_silent = False
        decode.stop()
        prefill.stop()
        proxy.stop()


def test_a_peer_that_talks_nonsense_to_the_pool_is_muted_and_others_are_served(
    tmp_path: Path,
) -> None:
    """Bad packets are counted, then not even parsed; a hang-up at any point hurts nobody."""
    memfd = with_planes(CALM, "memfd")
    prefill = make_prefill(tmp_path, memfd)
    decode = make_decode(memfd)
    try:
        ticket, offer = prefill.offer("k", 50)
        blocks = decode.receive("k", ticket, offer)
        wait_until(lambda: prefill.source.counters.opened == 1)
        (path,) = tmp_path.rglob("*.sock")
        vandal = PoolClient(str(path), peer_base("vandal", 3))
        counters = prefill.source.counters
        with socket.socket(fileno=os.dup(vandal.fileno())) as raw:
            wait_until(lambda: _sends(raw) and counters.muted_frames > 3)
        vandal.close()
        assert counters.bad_frames == memfd.max_bad_frames
        prefill.seal("k", 0, 3)
        prefill.finish("k", 50)
        assert outcome(decode.events.wait("k")) == "ready"
        assert same_content(prefill, "k", decode, blocks, 2)
    finally:
        decode.stop()
        prefill.stop()


@pytest.mark.parametrize("plane", ["memfd", "zmq"])
def test_what_is_announced_together_is_sent_by_the_caller_but_never_over_zmq(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plane: str
) -> None:
    """The engine's thread writes packets while the transfer thread sleeps; ZMQ could block it."""
    callers: dict[str, set[int]] = {"doorbell": set(), "zmq": set()}
    ring, send = Doorbell.send, RouterPort.send

    def ring_noted(bell: Doorbell, *args: Any) -> None:
        callers["doorbell"].add(threading.get_ident())
        ring(bell, *args)

    def send_noted(port: RouterPort, *args: Any) -> None:
        callers["zmq"].add(threading.get_ident())
        send(port, *args)

    monkeypatch.setattr(Doorbell, "send", ring_noted)
    monkeypatch.setattr(RouterPort, "send", send_noted)
    config = with_planes(CALM, plane)
    prefill, decode = make_prefill(tmp_path, config), make_decode(config)
    own, num_handoffs = threading.get_ident(), 12
    try:
        for i in range(num_handoffs):
            key = f"k{i}"
            ticket, offer = prefill.offer(key, 50)
            blocks = decode.receive(key, ticket, offer)
            wait_until(partial(_has_opened, prefill, i + 1))
            time.sleep(0.02)  # the thread goes back to sleep
            with prefill.source.batch():
                prefill.seal(key, 0, 3)
                prefill.finish(key, 50)
            assert outcome(decode.events.wait(key)) == "ready"
            assert prefill.events.wait(key).outcome == "done"
            assert same_content(prefill, key, decode, blocks, 2)
    finally:
        decode.stop()
        prefill.stop()
    assert own not in callers["zmq"]
    assert (own in callers["doorbell"]) == (plane == "memfd")


def _has_opened(prefill: PrefillEnd, count: int) -> bool:
    return prefill.source.counters.opened >= count


def _sends(raw: socket.socket) -> bool:
    try:
        raw.send(b"nonsense")
    except BlockingIOError:
        return False
    return True
