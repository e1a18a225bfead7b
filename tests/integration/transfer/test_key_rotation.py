"""CURVE keys are rotated under load: no handoff fails, and a retired key opens nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import zmq

from services.kv.attached import PoolBases
from services.pb import transfer_pb2 as pb
from services.transfer.api import SinkMoveWanted
from services.transfer.config import TransferConfig
from services.transfer.key_ring import (
    CHECK_S,
    CurveKeys,
    KeyRing,
    make_keys,
    read_ring,
    write_ring,
)
from services.transfer.wire import Header, MessageType, encode
from services.transfer.zmq_plane import MAIN, peer_base
from tests.support.transfer_ends import (
    BRISK,
    CALM,
    DecodeEnd,
    PrefillEnd,
    make_decode,
    make_prefill,
    outcome,
    same_content,
    wait_until,
    with_planes,
)
from tests.support.transfer_process import EndProcess

pytestmark = pytest.mark.integration

REREAD_S = 2 * CHECK_S + 1.0  # by then every end has looked at its file


@dataclass
class Cluster:
    """Two prefill and two decode workers, each with a key file of its own."""

    files: list[Path]
    prefills: list[PrefillEnd]
    decodes: list[DecodeEnd]
    num_moved: int = 0
    late: list[tuple[PrefillEnd, str]] = field(default_factory=list)  # delivered, DONE on its way

    def write(self, ring: KeyRing, wait: Callable[[], None]) -> None:
        """Let the files change one after the other, with load in between."""
        for file in self.files:
            write_ring(file, ring)
            wait()
        end = time.monotonic() + REREAD_S
        while time.monotonic() < end:
            wait()

    def move_some(self) -> None:
        """Hand prompts over between every pair, and check that each came right."""
        runs = []
        for i, prefill in enumerate(self.prefills):
            for j, decode in enumerate(self.decodes):
                key = f"k{self.num_moved}"
                self.num_moved += 1
                ticket, offer = prefill.offer_all(key, 16 * 4 + i + j)
                runs.append((prefill, decode, key, decode.receive(key, ticket, offer), i + j))
        for prefill, decode, key, blocks, valid in runs:
            assert outcome(decode.events.wait(key)) == "ready", decode.events.of(key)
            assert same_content(prefill, key, decode, blocks, valid)
            self.late.append((prefill, key))
            decode.free += [block for block in blocks if block is not None]
        wait_until(self._has_room)

    def _has_room(self) -> bool:
        """Take back what was released; a DONE that a cut has lost costs a lease, no more."""
        for prefill, key in list(self.late):
            if prefill.events.of(key):
                self.late.remove((prefill, key))
                prefill.free += prefill.lent.pop(key)
        return all(len(prefill.free) > 32 for prefill in self.prefills)


@pytest.fixture(params=["zmq", "memfd"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    old = KeyRing((make_keys(),))
    files = [tmp_path / f"worker-{i}.keys" for i in range(4)]
    for file in files:
        write_ring(file, old)

    def config(i: int) -> TransferConfig:
        planes = with_planes(CALM, request.param)
        # Longer than a busy machine stops a thread for, and what a lost DONE costs the test.
        return replace(planes, curve_key_file=str(files[i]), lease_s=10.0)

    prefills = [make_prefill(tmp_path, config(i), 128, worker_id=f"prefill-{i}") for i in range(2)]
    decodes = [make_decode(config(2 + i), worker_id=f"decode-{i}") for i in range(2)]
    yield Cluster(files, prefills, decodes)
    for decode in decodes:
        decode.stop()
    for prefill in prefills:
        prefill.stop()


def test_no_handoff_fails_while_keys_are_rotated(cluster: Cluster) -> None:
    """Every file changes at another moment; the answers are right all the way."""
    ring = read_ring(cluster.files[0])
    cluster.move_some()
    for step in (lambda r: r.added(make_keys()), KeyRing.promoted, KeyRing.retired):
        ring = step(ring)
        cluster.write(ring, cluster.move_some)
    assert cluster.num_moved > 100
    wait_until(lambda: not any(prefill.source.num_open() for prefill in cluster.prefills))
    for prefill in cluster.prefills:
        released = prefill.source.counters.released
        assert set(released) <= {"done", "peer_lost"}
        assert released.get("peer_lost", 0) < 10  # their DONE met a cut; decode had all of it
        assert prefill.source.counters.key_file_errors == 0
        assert "retired" not in prefill.source.counters.key_refusals
    assert [decode.sink.counters.key_refused for decode in cluster.decodes] == [0, 0]


def test_a_transfer_that_runs_when_its_key_is_retired_goes_on(cluster: Cluster) -> None:
    """What was verified stays, the rest comes over a connection made with the new key."""
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    ring = read_ring(cluster.files[0])
    ticket, offer = prefill.offer("long", 16 * 8)
    blocks = decode.receive("long", ticket, offer)
    prefill.seal("long", 0, 3)
    wait_until(lambda: decode.sink.counters.blocks == 3)
    for step in (lambda r: r.added(make_keys()), KeyRing.promoted, KeyRing.retired):
        ring = step(ring)
        cluster.write(ring, lambda: time.sleep(0.05))
        assert decode.events.of("long") == prefill.events.of("long") == []
    prefill.seal("long", 3, 5)
    prefill.finish("long", 16 * 8)
    ready = decode.events.wait("long")
    assert outcome(ready) == "ready"
    assert same_content(prefill, "long", decode, blocks, 0)
    assert decode.sink.counters.blocks == 8  # none came twice
    assert outcome(prefill.events.wait("long")) == "done"


def test_what_is_read_in_place_is_asked_home_and_stays_readable(tmp_path: Path) -> None:
    """Plane attach: the mapping outlives the connection, so the answer goes on while it moves."""
    old, new = make_keys(), make_keys()
    write_ring(tmp_path / "keys", KeyRing((new, old)))
    config = replace(
        with_planes(CALM, "attach", "memfd"), curve_key_file=str(tmp_path / "keys"), lease_s=6.0
    )
    prefill, decode = make_prefill(tmp_path, config), make_decode(config, bases=PoolBases())
    try:
        ticket, offer = prefill.offer_all("p", 160)
        decode.receive("d", ticket, offer)
        kv = decode.events.wait("d").attached
        assert kv is not None
        write_ring(tmp_path / "keys", KeyRing((new,)))
        wait_until(lambda: any(isinstance(e, SinkMoveWanted) for e in decode.events.all))
        for index in range(10):
            dest = decode.free.pop()
            assert kv.copy_home(index, decode.memory, dest, verify=True)
            assert decode.memory.blocks[dest].tobytes() == prefill.content("p")[index]
        assert kv.is_current()
        decode.sink.detach("d", is_intact=True)
        assert outcome(prefill.events.wait("p")) in ("done", "peer_lost")
        assert prefill.source.num_open() == 0
    finally:
        decode.stop()
        prefill.stop()


# ---- who is turned away -----------------------------------------------------------------------


@pytest.fixture
def prefill(tmp_path: Path) -> Iterator[PrefillEnd]:
    write_ring(tmp_path / "p.keys", KeyRing((make_keys(), make_keys())))
    config = replace(with_planes(BRISK, "zmq"), curve_key_file=str(tmp_path / "p.keys"))
    end = make_prefill(tmp_path, config)
    yield end
    end.stop()


def greets(prefill: PrefillEnd, own: CurveKeys, server: bytes) -> bool:
    """Say HELLO with these keys; tell whether anything is answered."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, 0)  # before it connects: a refused one would hold the context
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.IDENTITY, peer_base("d", 7) + MAIN + own.public[:4])
        dealer.curve_publickey, dealer.curve_secretkey = own
        dealer.curve_serverkey = server
        dealer.connect(prefill.source.endpoint)
        ping = encode(Header(MessageType.PING, 7), pb.Ping().SerializeToString())
        dealer.send_multipart(list(ping))
        return bool(dealer.poll(1_000))
    finally:
        context.destroy(linger=0)


def assert_refused(prefill: PrefillEnd, own: CurveKeys, server: bytes, reason: str) -> None:
    """Be turned away until it is counted: while the source binds again nobody even knocks."""
    refusals = prefill.source.counters.key_refusals
    for _ in range(8):
        assert not greets(prefill, own, server)
        if refusals.get(reason):
            return
    raise AssertionError(f"nobody was refused as {reason}: {refusals}")


def test_a_retired_an_unknown_and_no_key_are_refused_counted_and_logged(
    prefill: PrefillEnd, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RB-122: whoever has no key of the ring gets nothing, and the reason is told apart."""
    ring = read_ring(tmp_path / "p.keys")
    current, other = ring.keys
    assert greets(prefill, current, current.public)
    assert greets(prefill, other, current.public)
    write_ring(tmp_path / "p.keys", ring.retired())
    wait_until(lambda: prefill.source._keys is not None and len(prefill.source._keys.ring.keys) < 2)
    assert_refused(prefill, other, current.public, "retired")
    assert_refused(prefill, make_keys(), current.public, "unknown")
    # It expects us to prove the retired key.
    assert_refused(prefill, current, other.public, "handshake")
    assert greets(prefill, current, current.public)
    assert "transfer.key_refused" in [record.message for record in caplog.records]
    assert all(k.secret.decode() not in caplog.text for k in (current, other))


def test_a_connection_of_a_retired_key_ends_although_it_is_idle(
    prefill: PrefillEnd, tmp_path: Path
) -> None:
    ring = read_ring(tmp_path / "p.keys")
    own = ring.keys[1]
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, 0)  # before it connects: a refused one would hold the context
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.IDENTITY, peer_base("d", 7) + MAIN + b"1234")
        dealer.curve_publickey, dealer.curve_secretkey = own
        dealer.curve_serverkey = ring.current.public
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(prefill.source.endpoint)
        dealer.send_multipart(list(encode(Header(MessageType.PING, 7), b"")))
        assert dealer.poll(5_000)
        assert not monitor.poll(0)
        write_ring(tmp_path / "p.keys", ring.retired())
        assert monitor.poll(round(1_000 * REREAD_S))
        dealer.disable_monitor()
        monitor.close(linger=0)
    finally:
        context.destroy(linger=0)


def test_a_worker_with_a_retired_key_gets_a_typed_answer(
    prefill: PrefillEnd, tmp_path: Path
) -> None:
    ring = read_ring(tmp_path / "p.keys")
    write_ring(tmp_path / "d.keys", KeyRing(ring.keys[1:]))
    config = replace(with_planes(BRISK, "zmq"), curve_key_file=str(tmp_path / "d.keys"))
    decode = make_decode(config)
    try:
        ticket, offer = prefill.offer_all("k", 100)
        decode.receive("k", ticket, offer)
        failed = decode.events.wait("k")
        assert (failed.code, failed.can_recompute) == ("handoff_failed", True)
        assert failed.message == "the prefill worker admits no key of ours"
        assert decode.sink.counters.key_refused == 1
    finally:
        decode.stop()


@pytest.mark.parametrize("is_promoted", [False, True])
def test_a_worker_that_starts_amid_a_rotation_finds_what_its_peer_proves(
    prefill: PrefillEnd, tmp_path: Path, is_promoted: bool
) -> None:
    """The source listens with the key it started with until that one is retired."""
    ring = read_ring(tmp_path / "p.keys")
    write_ring(tmp_path / "d.keys", ring.promoted() if is_promoted else ring)
    config = replace(with_planes(BRISK, "zmq"), curve_key_file=str(tmp_path / "d.keys"))
    decode = make_decode(config)
    try:
        ticket, offer = prefill.offer_all("k", 100)
        blocks = decode.receive("k", ticket, offer)
        assert outcome(decode.events.wait("k")) == "ready"
        assert same_content(prefill, "k", decode, blocks, 4)
        assert prefill.source.counters.key_refusals.get("retired", 0) == 0
    finally:
        decode.stop()


def test_a_file_that_turns_bad_is_counted_and_the_worker_serves_on(
    prefill: PrefillEnd, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    current = read_ring(tmp_path / "p.keys").current
    (tmp_path / "p.keys").write_text("{")
    wait_until(lambda: prefill.source.counters.key_file_errors == 1)
    assert greets(prefill, current, current.public)
    assert "transfer.key_file_unusable" in [record.message for record in caplog.records]


def test_processes_rotate_their_keys_by_the_file_alone(tmp_path: Path) -> None:
    """Real processes: a prefill worker started with the old key serves with the new one."""
    old, new = make_keys(), make_keys()
    files = [tmp_path / "p.keys", tmp_path / "d.keys"]
    for file in files:
        write_ring(file, KeyRing((old,)))
    prefill = EndProcess("prefill", "calm", "zmq", tmp_path, curve_key_file=files[0])
    decode = EndProcess("decode", "calm", "zmq", tmp_path, curve_key_file=files[1])
    try:
        _move(prefill, decode, "old")
        for ring in (KeyRing((old, new)), KeyRing((new, old)), KeyRing((new,))):
            for file in files:
                write_ring(file, ring)
            end = time.monotonic() + REREAD_S
            while time.monotonic() < end:
                _move(prefill, decode, f"{time.monotonic()}")
        late = EndProcess("decode", "calm", "zmq", tmp_path, curve_key_file=files[1])
        try:
            _move(prefill, late, "late")
        finally:
            late.kill()
    finally:
        prefill.kill()
        decode.kill()


def _move(prefill: EndProcess, decode: EndProcess, key: str) -> None:
    ticket = prefill.ask("offer", key=key, num_tokens=32)["ticket"]
    sent = prefill.ask("seal", key=key, lo=0, count=2)["hashes"]
    prefill.ask("finish", key=key, num_tokens=32)
    decode.ask("open", key=key, ticket=ticket, num_tokens=32)
    blocks = decode.ask("reserve", key=key, num_tokens=32)["blocks"]
    got = decode.ask("wait", key=key, blocks=blocks)
    assert (got["outcome"], got["hashes"]) == ("ready", sent)
    assert prefill.ask("wait", key=key)["outcome"] == "done"
    prefill.ask("free", key=key)
    decode.ask("free", key=key, blocks=blocks)
