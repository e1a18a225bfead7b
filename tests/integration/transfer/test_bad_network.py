"""The zmq plane over a network that is slow, flips bits, cuts, goes silent or talks nonsense."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import zmq
import zmq.auth

from services.chaos.tcp_proxy import Faults, TcpProxy
from services.pb import transfer_pb2 as pb
from services.pb.common_pb2 import PLANE_ZMQ
from services.transfer.config import KIB, MIB, TransferConfig
from services.transfer.wire import Header, MessageType, encode
from services.transfer.zmq_plane import MAIN, DealerLink, new_context, peer_base
from tests.support.transfer_ends import (
    BRISK,
    CALM,
    PAUSE_S,
    DecodeEnd,
    PrefillEnd,
    make_decode,
    make_prefill,
    outcome,
    same_content,
    wait_until,
    with_planes,
)
from tests.support.transfer_fixtures import decode, prefill

__all__ = ["decode", "prefill"]  # fixtures
pytestmark = pytest.mark.integration

ZMQ = with_planes(CALM, "zmq")
BRISK_ZMQ = with_planes(BRISK, "zmq")


class Bad:
    """A prefill and a decode end with a proxy in between."""

    def __init__(
        self,
        tmp_path: Path,
        config: TransferConfig,
        num_blocks: int = 64,
        *,
        splits_messages: bool = False,
    ) -> None:
        self.faults = Faults()
        # The proxy's port must be in the tickets before the source has one of its own.
        self.proxy = TcpProxy(("127.0.0.1", 0), self.faults, splits_messages=splits_messages)
        self.prefill = make_prefill(
            tmp_path, config, num_blocks, advertise=f"127.0.0.1:{self.proxy.port}"
        )
        assert self.prefill.source.port is not None
        self.proxy.target = ("127.0.0.1", self.prefill.source.port)
        self.decode = make_decode(config, num_blocks)

    def stop(self) -> None:
        """Stop all three."""
        self.faults.is_silent = False
        self.decode.stop()
        self.prefill.stop()
        self.proxy.stop()


@pytest.fixture
def bad(tmp_path: Path) -> Iterator[Bad]:
    ends = Bad(tmp_path, ZMQ)
    yield ends
    ends.stop()


def test_a_slow_link_is_slow_but_right(tmp_path: Path) -> None:
    """Leases hold while there is progress, however little."""
    bad = Bad(tmp_path, replace(ZMQ, lease_s=1.5))
    try:
        _cross_slowly(bad, 2 * 1.5)
    finally:
        bad.stop()


def _cross_slowly(bad: Bad, at_least_s: float) -> None:
    bad.faults.rate_bytes_s = 500 * 1000.0
    ticket, offer = bad.prefill.offer_all("k", 16 * 60)
    blocks = bad.decode.receive("k", ticket, offer)
    ready = bad.decode.events.wait("k", 20)
    assert outcome(ready) == "ready"
    assert ready.stats.nacks == 0
    assert ready.stats.pull_us > at_least_s * 1e6
    assert same_content(bad.prefill, "k", bad.decode, blocks, 0)


def test_cancel_of_many_on_a_slow_link_ends_all_soon(tmp_path: Path) -> None:
    """RB-009: one terminal state each, within 1 s after the chunk in flight; then a probe works."""
    bad = Bad(tmp_path, ZMQ, num_blocks=512)
    try:
        for round_ in range(2):
            bad.faults.rate_bytes_s = 1_000_000.0
            num_before = bad.decode.sink.counters.blocks
            keys = [f"{round_}-{i}" for i in range(40)]
            for key in keys:
                ticket, offer = bad.prefill.offer_all(key, 16 * 5)
                bad.decode.receive(key, ticket, offer)
            wait_until(partial(_has_blocks, bad.decode, num_before + 8))
            started = time.monotonic()
            for key in keys:
                bad.decode.sink.cancel(key, "client left")
            for key in keys:
                assert outcome(bad.decode.events.wait(key)) in ("cancelled", "ready")
                assert outcome(bad.prefill.events.wait(key)) in ("aborted", "done")
            # ZMQ's and the kernel's buffers
            in_flight = ZMQ.max_data_in_flight * ZMQ.data_message_bytes + MIB
            assert time.monotonic() - started < 1 + in_flight / 1_000_000 + PAUSE_S
            for key in keys:
                bad.prefill.free += bad.prefill.lent.pop(key)
            bad.decode.free = list(range(512))  # type: ignore[arg-type]  # nothing is lent
        bad.faults.rate_bytes_s = 0
        ticket, offer = bad.prefill.offer_all("probe", 40)
        bad.decode.receive("probe", ticket, offer)
        assert outcome(bad.decode.events.wait("probe")) == "ready"
    finally:
        bad.stop()


def _has_blocks(decode: DecodeEnd, count: int) -> bool:
    return decode.sink.counters.blocks >= count


def test_flipped_bits_never_reach_a_request(tmp_path: Path) -> None:
    """RB-025: every delivered block is right; flips are counted or break the connection."""
    bad = Bad(tmp_path, BRISK_ZMQ, num_blocks=256)
    outcomes: list[str] = []
    try:
        bad.faults.flip_every_bytes = 400 * KIB
        for i in range(20):
            key = f"k{i}"
            ticket, offer = bad.prefill.offer_all(key, 16 * 10 + i % 16)
            blocks = bad.decode.receive(key, ticket, offer)
            outcomes.append(outcome(bad.decode.events.wait(key)))
            if outcomes[-1] == "ready":
                assert same_content(bad.prefill, key, bad.decode, blocks, i % 16)
            bad.prefill.events.wait(key)
            bad.prefill.free += bad.prefill.lent[key]
            bad.decode.free += [b for b in blocks if b is not None]
        assert bad.faults.num_flips > 5
        assert bad.decode.sink.counters.integrity_errors > 0
        assert outcomes.count("ready") >= 5
    finally:
        bad.stop()


def test_repeated_messages_change_nothing(tmp_path: Path) -> None:
    """Every second message comes twice, both ways: each answer and block counts once."""
    bad = Bad(tmp_path, BRISK_ZMQ, num_blocks=256, splits_messages=True)
    try:
        bad.faults.duplicate_share = 0.5
        for i in range(8):
            key = f"k{i}"
            ticket, offer = bad.prefill.offer_all(key, 16 * 10 + i)
            blocks = bad.decode.receive(key, ticket, offer)
            assert outcome(bad.decode.events.wait(key)) == "ready"
            assert same_content(bad.prefill, key, bad.decode, blocks, i)
            assert bad.prefill.events.wait(key).outcome == "done"
        assert bad.faults.num_duplicates > 20
    finally:
        bad.stop()


@pytest.mark.parametrize("cut_kib", [1, 10, 100, 300, 500])
def test_a_cut_connection_is_resumed(bad: Bad, cut_kib: int) -> None:
    """What was verified is kept; the rest comes over a new connection."""
    bad.faults.cut_after_bytes = cut_kib * KIB
    ticket, offer = bad.prefill.offer_all("k", 16 * 20 + 3)
    blocks = bad.decode.receive("k", ticket, offer)
    event = bad.decode.events.wait("k")
    if cut_kib == 1:  # before the connection was up: that is a failure to connect
        assert outcome(event) in ("ready", "handoff_failed")
        return
    assert outcome(event) == "ready"
    assert bad.faults.num_cuts == 1
    assert same_content(bad.prefill, "k", bad.decode, blocks, 3)
    assert bad.prefill.events.wait("k").outcome == "done"


def test_partition_ends_on_both_sides(tmp_path: Path) -> None:
    bad = Bad(tmp_path, BRISK_ZMQ)
    try:
        ticket, offer = bad.prefill.offer("k", 100)
        bad.decode.receive("k", ticket, offer)
        bad.prefill.seal("k", 0, 3)
        wait_until(lambda: bad.decode.sink.counters.blocks == 3)
        bad.faults.is_silent = True
        assert bad.prefill.events.wait("k", BRISK.lease_s + PAUSE_S).outcome == "peer_lost"
        silence_s = BRISK.peer_timeout_s + BRISK.ping_interval_s
        failed = bad.decode.events.wait("k", silence_s + BRISK.connect_timeout_s + PAUSE_S)
        assert failed.code == "handoff_failed"
    finally:
        bad.stop()


# ---- nonsense ---------------------------------------------------------------------------------


@pytest.fixture
def config() -> TransferConfig:
    return ZMQ


def test_garbage_frames_harm_nobody_else(prefill: PrefillEnd, decode: DecodeEnd) -> None:
    """RB-121: thousands of malformed messages, random and nearly right; a good peer is served."""
    rng = random.Random(3)
    context = zmq.Context()
    try:
        for i in range(60):
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 0
            base = peer_base(f"evil-{i}", 7) if i % 2 else rng.randbytes(20)
            dealer.setsockopt(zmq.IDENTITY, b"e" + base[1:] + MAIN + rng.randbytes(4))
            dealer.connect(prefill.source.endpoint)
            for _ in range(50):
                dealer.send_multipart(_garbage(rng))
            dealer.close(linger=200)
        raw = socket.create_connection(("127.0.0.1", prefill.source.port))
        raw.sendall(rng.randbytes(4096))
        ticket, offer = prefill.offer_all("k", 100)
        blocks = decode.receive("k", ticket, offer)
        assert outcome(decode.events.wait("k")) == "ready"
        assert same_content(prefill, "k", decode, blocks, 4)
        raw.close()
        wait_until(lambda: prefill.source.counters.bad_frames > 300)
        assert prefill.source.is_alive()
    finally:
        context.destroy(linger=0)


def _garbage(rng: random.Random) -> list[bytes]:
    kind = rng.choice([*MessageType])
    head, body = encode(Header(kind, 7, rng.randrange(9), rng.randrange(3)), rng.randbytes(40))
    choices = [
        [rng.randbytes(rng.randrange(100)) for _ in range(rng.randrange(1, 6))],
        [head, body],  # well framed, senseless body
        [head, body, b"surplus"],
        [head[:-1], body],
        [head, body[:-1]],
        [head],
        [b"\x80\x04\x95pickle", body],
    ]
    return rng.choice(choices)


def test_a_peer_that_talks_nonsense_is_muted(prefill: PrefillEnd) -> None:
    """RB-121: cut off after N bad frames."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.IDENTITY, peer_base("evil", 7) + MAIN + b"1234")
        dealer.connect(prefill.source.endpoint)
        for _ in range(200):
            dealer.send_multipart([b"x", b"y"])
        head, body = encode(Header(MessageType.PING, 7))
        dealer.send_multipart([head, body])
        counters = prefill.source.counters
        num_muted = 201 - CALM.max_bad_frames
        wait_until(lambda: counters.muted_frames == num_muted)  # the right frame among them
        assert counters.bad_frames == CALM.max_bad_frames
        assert not dealer.poll(0)
    finally:
        context.destroy(linger=0)


def test_open_before_hello_is_refused(prefill: PrefillEnd) -> None:
    ticket, _ = prefill.offer_all("k", 40)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.IDENTITY, peer_base("evil", 7) + MAIN + b"1234")
        dealer.connect(prefill.source.endpoint)
        body = pb.Open(
            signed_ticket=ticket, attempt=1, have=b"\0", plane=PLANE_ZMQ
        ).SerializeToString()
        dealer.send_multipart(list(encode(Header(MessageType.OPEN, 7, 1, 1), body)))
        assert dealer.poll(10_000)
        reply = pb.Reject.FromString(dealer.recv_multipart()[1])
        assert pb.Reject.Code.Name(reply.code) == "AUTH"
    finally:
        context.destroy(linger=0)


def test_a_peer_that_does_not_read_costs_nobody_else(
    prefill: PrefillEnd, decode: DecodeEnd
) -> None:
    """RB-098: its queue is bounded, and a good peer is served meanwhile."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.RCVBUF, 4096)
        dealer.setsockopt(zmq.IDENTITY, peer_base("lazy", 7) + MAIN + b"1234")
        dealer.connect(prefill.source.endpoint)
        for seq in range(4_000):
            dealer.send_multipart(list(encode(Header(MessageType.PING, 7, seq=seq), b"")))
        ticket, offer = prefill.offer_all("k", 100)
        blocks = decode.receive("k", ticket, offer)
        assert outcome(decode.events.wait("k")) == "ready"
        assert same_content(prefill, "k", decode, blocks, 4)
    finally:
        context.destroy(linger=0)


def test_a_connection_that_ends_between_two_frames_is_a_message_not_sent(
    prefill: PrefillEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RB-098: ZMQ refuses the second frame then; what wanted to send must not fail by it."""
    context = new_context(CALM)
    base = peer_base("decode-9", 9)
    dealer = DealerLink(context, prefill.source.endpoint, base, MAIN, ZMQ, None)
    try:
        send, parts = dealer._socket.send, iter([True, False])

        def ends_in_between(data: bytes, flags: int) -> None:
            if not next(parts):
                raise zmq.Again
            send(data, flags)

        monkeypatch.setattr(dealer._socket, "send", ends_in_between)
        assert dealer.send(MessageType.PING) is False
    finally:
        monkeypatch.undo()
        dealer.close()
        context.destroy(linger=0)


# ---- CURVE ------------------------------------------------------------------------------------


def test_curve_admits_the_clusters_key_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    zmq.auth.create_certificates(tmp_path / "keys", "cluster")
    zmq.auth.create_certificates(tmp_path / "keys", "other")
    ours = replace(ZMQ, curve_key_file=str(tmp_path / "keys/cluster.key_secret"))
    theirs = replace(ZMQ, curve_key_file=str(tmp_path / "keys/other.key_secret"))
    prefill = make_prefill(tmp_path, ours)
    ends = {"good": make_decode(ours), "other": make_decode(theirs), "plain": make_decode(ZMQ)}
    try:
        ticket, offer = prefill.offer_all("k", 100)
        for name in ("other", "plain"):
            ends[name].receive(name, ticket, offer)
            assert outcome(ends[name].events.wait(name)) == "handoff_failed"
        ticket, offer = prefill.offer_all("k2", 100)
        blocks = ends["good"].receive("good", ticket, offer)
        assert outcome(ends["good"].events.wait("good")) == "ready"
        assert same_content(prefill, "k2", ends["good"], blocks, 4)
    finally:
        for end in ends.values():
            end.stop()
        prefill.stop()


# ---- planes -----------------------------------------------------------------------------------


def test_a_pool_that_is_not_the_peers_falls_back_to_zmq_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RB-030: a right path and user are not enough, the nonce must be there."""
    prefill, decode = make_prefill(tmp_path), make_decode()
    try:
        prefill.memory.nonce[:] = 0
        ticket, offer = prefill.offer_all("k", 100)
        blocks = decode.receive("k", ticket, offer)
        ready = decode.events.wait("k")
        assert (outcome(ready), ready.stats.plane) == ("ready", "zmq")
        assert decode.sink.planes() == {"prefill-0": "zmq"}
        assert same_content(prefill, "k", decode, blocks, 4)
        assert "transfer.plane_fallback" in [r.message for r in caplog.records]
    finally:
        decode.stop()
        prefill.stop()


def test_reused_block_is_never_delivered_over_memfd(tmp_path: Path) -> None:
    """The generation moved after the announcement: refused, asked again, then given up."""
    config = with_planes(CALM, "memfd")
    prefill, decode = make_prefill(tmp_path, config), make_decode(config)
    try:
        ticket, offer = prefill.offer("k", 64)
        prefill.seal("k", 0, 4)
        prefill.finish("k", 64)
        decode.open("k", ticket, offer)
        wait_until(lambda: decode.sink.planes())  # HELLO is answered after the announcements
        prefill.memory.gens[prefill.lent["k"][1]] += 2
        decode.reserve("k", offer)
        failed = decode.events.wait("k")
        assert (failed.code, failed.can_recompute) == ("handoff_failed", True)
        assert decode.sink.counters.integrity_errors == CALM.max_nacks + 1
        assert decode.sink.counters.ready == 0
    finally:
        decode.stop()
        prefill.stop()
