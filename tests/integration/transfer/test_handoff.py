"""Whole handoffs between real threads over both planes, in one process."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from services.common.errors import RequestError
from services.common.ids import BlockHash, BlockId
from services.kv.layout import KvLayout
from services.transfer.api import SinkReady
from services.transfer.config import KIB, TransferConfig
from services.transfer.intake import Intake
from services.transfer.offered import Offered
from services.transfer.peer_link import PeerLink
from services.transfer.ticket import TicketSigner, read_unverified
from tests.support.transfer_ends import (
    BRISK,
    CALM,
    IDENTITY,
    LAYOUT,
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


@pytest.fixture(params=["memfd", "nccl", "zmq"])
def config(request: pytest.FixtureRequest) -> TransferConfig:
    return with_planes(CALM, request.param)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 160, 400])
def test_delivers_exactly_the_prefills_blocks_and_first_tokens(
    prefill: PrefillEnd, decode: DecodeEnd, config: TransferConfig, num_tokens: int
) -> None:
    ticket, offer = prefill.offer_all("p", num_tokens)
    blocks = decode.receive("d", ticket, offer)
    ready = decode.events.wait("d")
    released = prefill.events.wait("p")

    assert isinstance(ready, SinkReady), ready
    assert released.outcome == "done"
    assert same_content(prefill, "p", decode, blocks, num_tokens % 16)
    first = ready.final.first
    assert [(f.choice, f.token_id, f.logprob) for f in first] == [(0, 42, -0.5), (1, 43, None)]
    assert first[0].top == ((42, -0.5), (7, -1.5))
    assert (ready.final.num_tokens, ready.final.tail_block) == (num_tokens, None)
    assert ready.final.prefill_us == 1234
    assert ready.stats.plane == released.stats.plane == config.planes[0]
    assert ready.stats.peer == "prefill-0"
    assert released.stats.peer == "decode-0"
    assert ready.stats.blocks_moved == released.stats.blocks_moved == len(blocks)
    assert ready.stats.size_bytes == len(blocks) * LAYOUT.block_bytes
    assert ready.stats.open_us > 0
    assert decode.sink.planes() == {"prefill-0": config.planes[0]}
    assert prefill.source.num_open() == decode.sink.num_open() == 0
    full = num_tokens // 16
    for sent, got in zip(prefill.lent["p"][:full], blocks[:full], strict=True):
        assert got is not None
        assert np.array_equal(prefill.memory.digests[sent], decode.memory.digests[got])


def test_credit_goes_back_after_every_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that has used its credit does not wait until all it has sent is written."""
    done: list[str] = []
    for name in ("on_data", "grant_credit"):
        monkeypatch.setattr(Intake, name, _noting(done, name, getattr(Intake, name)))
    small = replace(CALM, data_message_bytes=64 * KIB, window_bytes=256 * KIB)
    config = with_planes(small, "zmq")
    prefill, decode = make_prefill(tmp_path, config), make_decode(config)
    try:
        ticket, offer = prefill.offer_all("p", 16 * 24)
        decode.receive("d", ticket, offer)
        assert isinstance(decode.events.wait("d"), SinkReady)
    finally:
        decode.stop()
        prefill.stop()
    assert done.count("on_data") >= 12  # of two blocks at most
    assert ("on_data", "on_data") not in pairwise(done)


def _noting(done: list[str], name: str, method: Callable[..., None]) -> Callable[..., None]:
    def noted(*args: object) -> None:
        done.append(name)
        method(*args)

    return noted


def test_decode_pulls_while_prefill_computes(prefill: PrefillEnd, decode: DecodeEnd) -> None:
    ticket, offer = prefill.offer("p", 100)
    blocks = decode.receive("d", ticket, offer)
    for lo, count in ((0, 2), (2, 1), (3, 3)):
        prefill.seal("p", lo, count)
        last = blocks[lo + count - 1]
        assert last is not None
        announced = prefill.memory.digests[prefill.lent["p"][lo + count - 1]]
        wait_until(partial(_has_digests, decode, last, announced))
        assert decode.events.of("d") == []  # not before FINAL
    prefill.finish("p", 100)
    assert outcome(decode.events.wait("d")) == "ready"
    assert same_content(prefill, "p", decode, blocks, 100 % 16)


def _has_digests(decode: DecodeEnd, block: BlockId, digests: np.ndarray) -> bool:
    return bool((decode.memory.digests[block] == digests).all())


def test_blocks_decode_has_do_not_move(prefill: PrefillEnd, decode: DecodeEnd) -> None:
    ticket, offer = prefill.offer_all("p", 100)
    have = (True, True, True, False, True, False)
    decode.open("d", ticket, offer, have=have)
    blocks = decode.reserve("d", offer, have)
    ready = decode.events.wait("d")
    assert (ready.stats.blocks_moved, ready.stats.blocks_deduped) == (3, 4)
    released = prefill.events.wait("p")
    assert (released.stats.blocks_moved, released.stats.blocks_deduped) == (3, 4)
    wanted = [i for i, had in enumerate(have) if not had]
    for i in wanted:
        sent, got = prefill.lent["p"][i], blocks[i]
        assert np.array_equal(prefill.memory.blocks[sent], decode.memory.blocks[got])


def test_a_fully_cached_prompt_moves_nothing(prefill: PrefillEnd, decode: DecodeEnd) -> None:
    ticket, offer = prefill.offer_all("p", 64)
    decode.open("d", ticket, offer, have=(True,) * 4)
    decode.reserve("d", offer, (True,) * 4)
    assert decode.events.wait("d").stats.size_bytes == 0
    assert outcome(prefill.events.wait("p")) == "done"


def test_blocks_of_a_tiny_model_cross_too(config: TransferConfig, tmp_path: Path) -> None:
    """A DATA message is bounded in frames as well as in bytes."""
    tiny = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2)
    prefill = make_prefill(tmp_path, config, 700, tiny)
    decode = make_decode(config, 700, tiny)
    try:
        ticket, offer = prefill.offer_all("p", 16 * 600 + 1)
        blocks = decode.receive("d", ticket, offer)
        assert isinstance(decode.events.wait("d"), SinkReady), decode.events.of("d")
        assert same_content(prefill, "p", decode, blocks, 1)
    finally:
        decode.stop()
        prefill.stop()


def test_nothing_is_left_after_many_starts_and_stops(
    config: TransferConfig, tmp_path: Path
) -> None:
    def run() -> None:
        prefill, decode = make_prefill(tmp_path, config), make_decode(config)
        ticket, offer = prefill.offer_all("p", 40)
        decode.receive("d", ticket, offer)
        assert outcome(decode.events.wait("d")) == "ready"
        decode.stop()
        prefill.stop()
        prefill.memory.close()
        decode.memory.close()

    run()  # what the first run makes once (a collector thread of the ZMQ binding) is no leak
    num_fds, num_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        run()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_fds
    assert threading.active_count() <= num_threads


def test_open_without_memory_keeps_its_lease(config: TransferConfig, tmp_path: Path) -> None:
    config = replace(config, lease_s=BRISK.lease_s)
    prefill, decode = make_prefill(tmp_path, config), make_decode(config)
    try:
        _wait_for_memory(prefill, decode)
    finally:
        decode.stop()
        prefill.stop()


def _wait_for_memory(prefill: PrefillEnd, decode: DecodeEnd) -> None:
    ticket, offer = prefill.offer_all("p", 40)
    decode.open("d", ticket, offer)
    wait_until(lambda: prefill.source.counters.renewals >= 5)  # more than a lease and a half
    assert prefill.events.of("p") == decode.events.of("d") == []
    blocks = decode.reserve("d", offer)
    assert outcome(decode.events.wait("d")) == "ready"
    assert same_content(prefill, "p", decode, blocks, 8)


def test_leases_hold_while_many_wait_for_memory(config: TransferConfig, tmp_path: Path) -> None:
    """RB-005: forty wait for twice a lease, a few at a time get room, and none is lost."""
    config = replace(config, lease_s=BRISK.lease_s, max_wait_s=60.0)
    prefill, decode = make_prefill(tmp_path, config, 512), make_decode(config, 16)
    try:
        offers = {f"k{i}": prefill.offer_all(f"k{i}", 16 * 4 + i % 16, salt=i) for i in range(40)}
        for key, (ticket, offer) in offers.items():
            decode.open(key, ticket, offer)
        started = time.monotonic()
        wait_until(lambda: prefill.source.counters.renewals >= 40 * 5)
        assert time.monotonic() - started > config.lease_s
        assert prefill.events.all == decode.events.all == []
        for key, (_, offer) in offers.items():
            blocks = decode.reserve(key, offer)
            assert outcome(decode.events.wait(key)) == "ready"
            assert same_content(prefill, key, decode, blocks, offer.num_tokens % 16)
            decode.free += [block for block in blocks if block is not None]
        for key in offers:
            assert outcome(prefill.events.wait(key)) == "done"
    finally:
        decode.stop()
        prefill.stop()


def test_many_transfers_at_once_between_several_peers(
    config: TransferConfig, tmp_path: Path
) -> None:
    """RB-030: two prefill workers on one address, interleaved, and two decode workers."""
    prefills = [make_prefill(tmp_path, config, 256, worker_id=f"prefill-{i}") for i in range(2)]
    prefills[1].rng = np.random.default_rng(2)
    decodes = [make_decode(config, 256, worker_id=f"decode-{i}") for i in range(2)]
    try:
        runs = []
        for i in range(24):
            prefill, decode, key = prefills[i % 2], decodes[i // 2 % 2], f"k{i}"
            ticket, offer = prefill.offer(key, 16 * 8 + i)
            runs.append((prefill, decode, key, offer, decode.receive(key, ticket, offer)))
        for lo in range(0, 8, 4):
            for prefill, _, key, _, _ in runs:
                prefill.seal(key, lo, 4)
        for prefill, _, key, offer, _ in runs:
            extra = offer.num_tokens // 16 - 8
            if extra:
                prefill.seal(key, 8, extra)
            prefill.finish(key, offer.num_tokens)
        for prefill, decode, key, offer, blocks in runs:
            assert isinstance(decode.events.wait(key), SinkReady), decode.events.of(key)
            assert outcome(prefill.events.wait(key)) == "done"
            assert same_content(prefill, key, decode, blocks, offer.num_tokens % 16)
        for decode in decodes:
            assert decode.sink.planes() == dict.fromkeys(
                ("prefill-0", "prefill-1"), config.planes[0]
            )
    finally:
        for prefill in prefills:
            prefill.stop()
        for decode in decodes:
            decode.stop()


# ---- cancel -----------------------------------------------------------------------------------

STAGES = ("offered", "opened", "reserved", "streaming", "racing")


def _reach(stage: str, prefill: PrefillEnd, decode: DecodeEnd) -> None:
    reached = STAGES.index(stage)
    ticket, offer = prefill.offer("p", 200)
    if reached >= 1:
        decode.open("d", ticket, offer)
        wait_until(lambda: decode.sink.counters.opened == 1)
    if reached >= 2:
        decode.reserve("d", offer)
    if reached >= 3:
        prefill.seal("p", 0, 6)
        wait_until(lambda: decode.sink.counters.blocks == 6)
    if reached >= 4:
        prefill.seal("p", 6, 6)  # and no wait: the cancel meets the blocks on their way


@pytest.mark.parametrize("stage", STAGES)
def test_cancel_of_prefill_frees_both_sides_at_once(
    prefill: PrefillEnd, decode: DecodeEnd, stage: str
) -> None:
    """RB-009, RB-011: one terminal event each, long before any lease is over."""
    _reach(stage, prefill, decode)
    prefill.source.cancel("p", "client left")
    released = prefill.events.wait("p", CALM.lease_s * 0.6)
    assert (released.outcome, released.reason) == ("aborted", "client left")
    if stage != "offered":
        failed = decode.events.wait("d", CALM.lease_s * 0.6)
        assert (failed.code, failed.can_recompute) == ("handoff_failed", True)
    _assert_quiet(prefill, decode)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_cancel_of_decode_frees_both_sides_at_once(
    prefill: PrefillEnd, decode: DecodeEnd, stage: str
) -> None:
    """RB-009, RB-011."""
    _reach(stage, prefill, decode)
    decode.sink.cancel("d", "client left")
    failed = decode.events.wait("d", CALM.lease_s * 0.6)
    assert (failed.code, failed.message, failed.can_recompute) == (
        "cancelled",
        "client left",
        False,
    )
    assert outcome(prefill.events.wait("p", CALM.lease_s * 0.6)) == "aborted"
    _assert_quiet(prefill, decode)


def _assert_quiet(prefill: PrefillEnd, decode: DecodeEnd) -> None:
    """Nothing is open, one event a key, and the freed blocks are neither read nor written."""
    assert prefill.source.num_open() == decode.sink.num_open() == 0
    decode.memory.blocks[:] = 0xA5
    prefill.memory.blocks[:] = 0x5A
    # A later handoff takes the same way: when it has ended, nothing is left of the one before.
    ticket, offer = prefill.offer_all("later-p", 40)
    used = decode.receive("later-d", ticket, offer)
    assert outcome(decode.events.wait("later-d")) == "ready"
    assert outcome(prefill.events.wait("later-p")) == "done"
    untouched = [i for i in range(decode.memory.num_blocks) if i not in used]
    assert (decode.memory.blocks[untouched] == 0xA5).all()
    assert len(prefill.events.of("p")) == 1
    assert len(decode.events.of("d")) <= 1


@pytest.mark.parametrize("plane", ["nccl", "zmq"])
def test_a_message_that_could_not_be_made_holds_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plane: str
) -> None:
    """Before: it counted as one that is read, and an ended transfer waited for it for ever."""
    num_failed = 0

    def no_memory(offered: Offered, out: object) -> None:
        nonlocal num_failed
        num_failed += 1
        raise MemoryError

    monkeypatch.setattr(Offered, "frames", no_memory)
    config = with_planes(CALM, plane)
    prefill, decode = make_prefill(tmp_path, config), make_decode(config)
    try:
        ticket, offer = prefill.offer_all("p", 40)
        decode.receive("d", ticket, offer)
        wait_until(lambda: num_failed)
        prefill.source.cancel("p", "client left")
        assert outcome(prefill.events.wait("p", CALM.lease_s * 0.6)) == "aborted"
        assert prefill.source.num_open() == 0
    finally:
        decode.stop()
        prefill.stop()


def test_cancel_unknown_keys_is_harmless(prefill: PrefillEnd, decode: DecodeEnd) -> None:
    prefill.source.cancel("nobody", "x")
    decode.sink.cancel("nobody", "x")
    decode.sink.reserve("nobody", [], None)
    prefill.source.blocks_sealed("nobody", 0, [BlockId(1)])
    ticket, offer = prefill.offer_all("p", 20)
    decode.receive("d", ticket, offer)
    assert outcome(decode.events.wait("d")) == "ready"


# ---- refusals ---------------------------------------------------------------------------------


def test_ticket_nobody_opens_expires(
    decode: DecodeEnd, config: TransferConfig, tmp_path: Path
) -> None:
    ttl_s = 0.5
    prefill = make_prefill(tmp_path, replace(config, ticket_ttl_s=ttl_s))
    try:
        _expire(prefill, decode, ttl_s)
    finally:
        prefill.stop()


def _expire(prefill: PrefillEnd, decode: DecodeEnd, ttl_s: float) -> None:
    ticket, offer = prefill.offer_all("p", 40)
    released = prefill.events.wait("p", ttl_s + PAUSE_S)
    assert released.outcome == "expired"
    decode.receive("d", ticket, offer)
    failed = decode.events.wait("d")
    assert failed.code == "handoff_failed"
    assert "EXPIRED" in failed.message


def test_forged_ticket_is_refused(prefill: PrefillEnd, decode: DecodeEnd) -> None:
    ticket, offer = prefill.offer_all("p", 40)
    forged = TicketSigner().issue(read_unverified(ticket))
    decode.receive("d", forged, offer)
    failed = decode.events.wait("d")
    assert (failed.code, failed.can_recompute) == ("handoff_failed", True)
    assert "AUTH" in failed.message
    decode.receive("d2", ticket, offer)  # the honest one still works
    assert outcome(decode.events.wait("d2")) == "ready"


def test_ticket_for_other_blocks_is_a_hash_mismatch(prefill: PrefillEnd, decode: DecodeEnd) -> None:
    ticket, offer = prefill.offer_all("p", 40)
    decode.sink.open("d", ticket, 1, (False, False), [BlockHash(bytes(16))] * 2)
    assert outcome(decode.events.wait("d")) == "hash_mismatch"
    assert offer.block_hashes


def test_damaged_ticket_fails_and_nothing_else_does(decode: DecodeEnd) -> None:
    decode.sink.open("d", b"\xff\xfe", 1, (), [])
    assert outcome(decode.events.wait("d")) == "handoff_failed"


def test_second_decode_is_busy_and_a_higher_attempt_fences(
    prefill: PrefillEnd, decode: DecodeEnd, config: TransferConfig
) -> None:
    other = make_decode(config, worker_id="decode-1")
    try:
        ticket, offer = prefill.offer_all("p", 40)
        decode.open("d", ticket, offer, attempt=1)
        wait_until(lambda: prefill.source.counters.opened == 1)
        other.receive("busy", ticket, offer, attempt=1)
        assert "BUSY" in other.events.wait("busy").message
        blocks = other.receive("fence", ticket, offer, attempt=2)
        assert outcome(other.events.wait("fence")) == "ready"
        assert same_content(prefill, "p", other, blocks, 8)
        assert "fenced" in decode.events.wait("d").message
        assert outcome(prefill.events.wait("p")) == "done"
        assert len(prefill.events.all) == 1
    finally:
        other.stop()


def test_incompatible_worker_is_named(prefill: PrefillEnd, config: TransferConfig) -> None:
    other = replace(IDENTITY, weights_digest="other")
    decode = make_decode(config, identity=other)
    try:
        ticket, offer = prefill.offer_all("p", 40)
        decode.receive("d", ticket, offer)
        assert outcome(decode.events.wait("d")) == "incompatible"
        # A ticket that claims our identity leads to a worker that does not have it.
        lying = replace(read_unverified(ticket), kv_identity_fp=other.fingerprint)
        decode.receive("e", TicketSigner().issue(lying), offer)
        failed = decode.events.wait("e")
        assert failed.code == "incompatible"
        assert "weights_digest" in failed.message
    finally:
        decode.stop()


def test_other_layout_is_refused_naming_both(prefill: PrefillEnd, config: TransferConfig) -> None:
    """RB-022: refused in the handshake, not at transfer time."""
    decode = make_decode(config, layout=replace(LAYOUT, head_dim=16))
    try:
        ticket, offer = prefill.offer_all("p", 40)
        decode.receive("d", ticket, offer)
        failed = decode.events.wait("d")
        assert failed.code == "incompatible"
        assert "head_dim differs: prefill has float32/16" in failed.message
        assert "of 32, decode has float32/16" in failed.message
    finally:
        decode.stop()


def test_a_full_source_refuses_with_a_code(tmp_path: Path) -> None:
    end = make_prefill(tmp_path, replace(CALM, max_transfers=2))
    try:
        end.offer("a", 16)
        end.offer("b", 16)
        with pytest.raises(RequestError) as caught:
            end.offer("c", 16)
        assert caught.value.spec.code == "overloaded"
    finally:
        end.stop()
    assert sorted(e.outcome for e in end.events.all) == ["stopped", "stopped"]
    with pytest.raises(RequestError) as caught:
        end.offer("d", 16)
    assert caught.value.spec.code == "draining"


def test_unsealed_block_is_never_offered(prefill: PrefillEnd, decode: DecodeEnd) -> None:
    ticket, offer = prefill.offer("p", 16)
    decode.receive("d", ticket, offer)
    prefill.memory.gens[3] = 5  # being written
    prefill.source.blocks_sealed("p", 0, [BlockId(3)])
    assert outcome(prefill.events.wait("p")) == "aborted"
    assert outcome(decode.events.wait("d")) == "handoff_failed"


def test_stop_ends_everything_on_both_sides(config: TransferConfig, tmp_path: Path) -> None:
    prefill, decode = make_prefill(tmp_path, config), make_decode(config)
    ticket, offer = prefill.offer("p", 100)
    decode.receive("d", ticket, offer)
    prefill.offer("never-opened", 50)
    prefill.seal("p", 0, 3)
    wait_until(lambda: decode.sink.counters.blocks == 3)
    decode.stop()
    prefill.stop()
    assert [outcome(e) for e in decode.events.all] == ["cancelled"]
    assert sorted(e.key for e in prefill.events.all) == ["never-opened", "p"]
    assert list(tmp_path.iterdir()) == []  # no socket file left
    decode.open("late", ticket, offer)
    assert outcome(decode.events.wait("late")) == "draining"


def test_zmq_is_no_way_out_where_prefill_does_not_allow_it(tmp_path: Path) -> None:
    """A list of planes is kept by both ends, also when what they agreed on has failed."""
    prefill = make_prefill(tmp_path, with_planes(CALM, "memfd"))
    decode = make_decode(with_planes(CALM, "memfd", "zmq"))
    (path,) = tmp_path.rglob("*.sock")
    path.unlink()
    try:
        ticket, offer = prefill.offer_all("k", 50)
        decode.receive("k", ticket, offer)
        failed = decode.events.wait("k")
        assert outcome(failed) == "handoff_failed"
        assert "could not be mapped" in failed.message
    finally:
        decode.stop()
        prefill.stop()


def test_a_source_sends_nothing_over_a_plane_it_does_not_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end may be of another mind."""
    monkeypatch.setattr(PeerLink, "can_fall_back", True)
    prefill = make_prefill(tmp_path, with_planes(CALM, "memfd"))
    decode = make_decode(with_planes(CALM, "memfd", "zmq"))
    (path,) = tmp_path.rglob("*.sock")
    path.unlink()
    try:
        ticket, offer = prefill.offer_all("k", 50)
        decode.receive("k", ticket, offer)
        assert "plane was not agreed" in decode.events.wait("k").message
    finally:
        decode.stop()
        prefill.stop()
