"""Plane attach between two real ends: what is read in place, for how long, and who is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.kv.attached import AttachedKv, PoolBases
from services.kv.layout import KvLayout
from services.transfer.api import SinkMoveWanted, SinkReady
from services.transfer.config import TransferConfig
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
from tests.support.transfer_fixtures import prefill

__all__ = ["prefill"]  # fixture
pytestmark = pytest.mark.integration

ATTACH = with_planes(CALM, "attach", "memfd")
BRISK_ATTACH = with_planes(BRISK, "attach", "memfd")


@pytest.fixture
def config() -> TransferConfig:
    return ATTACH


@pytest.fixture
def decode(config: TransferConfig) -> Iterator[DecodeEnd]:
    end = make_decode(config, bases=PoolBases())
    yield end
    end.stop()
    assert not end.sink.is_alive()


def receive(prefill: PrefillEnd, decode: DecodeEnd, key: str, num_tokens: int) -> SinkReady:
    """Hand off a whole prompt; the decode's key is `key`, the prefill's `P` and `key`."""
    ticket, offer = prefill.offer_all(f"P{key}", num_tokens)
    decode.receive(key, ticket, offer)
    ready = decode.events.wait(key)
    assert isinstance(ready, SinkReady), ready
    return ready


def attached_of(ready: SinkReady) -> AttachedKv:
    assert ready.attached is not None
    return ready.attached


@pytest.mark.parametrize("num_tokens", [16, 17, 160])
def test_full_blocks_are_read_where_they_are(
    prefill: PrefillEnd, decode: DecodeEnd, num_tokens: int
) -> None:
    ticket, offer = prefill.offer_all("p", num_tokens)
    blocks = decode.receive("d", ticket, offer)
    ready = decode.events.wait("d")
    kv = attached_of(ready)
    num_full = num_tokens // 16

    assert kv.indexes == tuple(range(num_full))
    assert kv.is_current()
    sent = prefill.content("p")
    assert [kv.pool.blocks[row].tobytes() for row in kv.blocks] == sent[:num_full]
    for block in blocks[:num_full]:
        assert block is not None
        assert not decode.memory.blocks[block].any(), "a block was copied"
    assert (ready.stats.plane, ready.stats.blocks_attached) == ("attach", num_full)
    assert ready.stats.blocks_moved == len(blocks) - num_full
    assert decode.sink.planes() == {"prefill-0": "attach"}

    assert prefill.events.of("p") == []
    assert prefill.source.num_open() == 1
    decode.sink.detach("d", is_intact=True)
    assert prefill.events.wait("p").outcome == "done"


def test_a_wish_to_move_does_not_end_another_receive_of_the_key(
    prefill: PrefillEnd, decode: DecodeEnd
) -> None:
    """A key may come again, as a retry, while blocks of its first receive are still attached."""
    attached_of(receive(prefill, decode, "d", 64))
    ticket, offer = prefill.offer_all("again", 64)
    decode.open("d", ticket, offer)
    wait_until(lambda: decode.sink.counters.opened == 2)
    prefill.source.ask_back()
    wait_until(lambda: any(isinstance(e, SinkMoveWanted) for e in decode.events.of("d")))
    assert decode.sink.num_open() == 1
    with pytest.raises(ValueError, match="already receiving"):
        decode.open("d", ticket, offer)
    decode.sink.detach("d", is_intact=True)


def test_an_attached_block_cannot_be_written(prefill: PrefillEnd, decode: DecodeEnd) -> None:
    kv = attached_of(receive(prefill, decode, "d", 64))
    with pytest.raises(ValueError, match="read-only"):
        kv.pool.blocks[0, 0] = 1
    decode.sink.detach("d", is_intact=True)


def test_moving_home_copies_and_verifies(prefill: PrefillEnd, decode: DecodeEnd) -> None:
    kv = attached_of(receive(prefill, decode, "d", 64))
    dest = decode.free.pop()
    assert kv.copy_home(1, decode.memory, dest, verify=True)
    assert decode.memory.blocks[dest].tobytes() == prefill.content("Pd")[1]
    assert (decode.memory.digests[dest] == kv.digests[1]).all()

    prefill.memory.blocks[kv.blocks[2], 5] ^= 1
    assert not kv.copy_home(2, decode.memory, dest, verify=True), "a flipped bit"
    prefill.memory.gens[kv.blocks[3]] += 1
    assert not kv.copy_home(3, decode.memory, dest, verify=False), "another generation"
    assert not kv.is_current()
    decode.sink.detach("d", is_intact=False)
    assert prefill.events.wait("Pd").outcome == "aborted"
    assert decode.sink.counters.integrity_errors == 1


@pytest.mark.parametrize("config", [BRISK_ATTACH])
def test_the_lease_is_renewed_while_anything_is_attached(
    prefill: PrefillEnd, decode: DecodeEnd, config: TransferConfig
) -> None:
    receive(prefill, decode, "d", 64)
    renewals = prefill.source.counters.renewals
    wait_until(lambda: prefill.source.counters.renewals >= renewals + 4, 4 * config.lease_s)
    assert prefill.events.of("Pd") == []
    decode.sink.detach("d", is_intact=True)
    assert prefill.events.wait("Pd").outcome == "done"


def test_an_aborting_owner_waits_until_we_have_let_go(
    prefill: PrefillEnd, decode: DecodeEnd
) -> None:
    """RB-011: blocks come back after the reader has left them, not when it was asked to."""
    receive(prefill, decode, "d", 64)
    prefill.source.cancel("Pd", "client left")
    wait_until(lambda: len(decode.events.of("d")) > 1)
    assert isinstance(decode.events.of("d")[1], SinkMoveWanted)
    assert prefill.events.of("Pd") == []
    decode.sink.detach("d", is_intact=True)
    released = prefill.events.wait("Pd")
    assert (released.outcome, released.reason) == ("aborted", "client left")


@pytest.mark.parametrize("config", [BRISK_ATTACH])
def test_a_reader_that_never_lets_go_loses_its_lease(
    prefill: PrefillEnd, decode: DecodeEnd, config: TransferConfig
) -> None:
    receive(prefill, decode, "d", 64)
    prefill.source.cancel("Pd", "client left")
    released = prefill.events.wait("Pd", config.lease_s + PAUSE_S)
    assert released.outcome == "aborted"
    decode.sink.detach("d", is_intact=True)


@pytest.mark.parametrize("how", ["ask_back", "unpin"])
def test_an_owner_that_wants_its_blocks_says_so(
    prefill: PrefillEnd, decode: DecodeEnd, how: str
) -> None:
    receive(prefill, decode, "d", 64)
    if how == "ask_back":
        prefill.source.ask_back()
    else:
        prefill.source.unpin("Pd")
    wait_until(lambda: len(decode.events.of("d")) > 1)
    assert outcome(decode.events.of("d")[1]) == "move_wanted"
    decode.sink.detach("d", is_intact=True)
    assert prefill.events.wait("Pd").outcome == "done"
    if how == "ask_back":
        later = receive(prefill, decode, "e", 64)
        wait_until(lambda: prefill.source.counters.asked_back >= 2)
        if later.attached is not None:  # it was faster than the message
            decode.sink.detach("e", is_intact=True)
        assert prefill.events.wait("Pe").outcome == "done"


@pytest.mark.parametrize("config", [replace(ATTACH, attach_pin_share=0.15)])
def test_readers_in_place_hold_a_bounded_share(prefill: PrefillEnd, decode: DecodeEnd) -> None:
    """64 blocks: the ninth block of readers in place makes their owner ask for it back."""
    receive(prefill, decode, "a", 64)
    assert prefill.source.counters.asked_back == 0
    receive(prefill, decode, "b", 160)
    wait_until(lambda: prefill.source.counters.asked_back == 1)
    for key in ("a", "b"):
        decode.sink.detach(key, is_intact=True)
    for key in ("Pa", "Pb"):
        assert prefill.events.wait(key).outcome == "done"


def test_an_eighth_pool_is_copied_from(tmp_path: Path) -> None:
    bases = PoolBases(max_pools=3)
    decode = make_decode(ATTACH, bases=bases)
    prefills = [make_prefill(tmp_path, ATTACH, worker_id=f"prefill-{i}") for i in range(3)]
    try:
        ready = []
        for i, prefill in enumerate(prefills):
            ticket, offer = prefill.offer_all("p", 64)
            blocks = decode.receive(f"d{i}", ticket, offer)
            ready.append(decode.events.wait(f"d{i}"))
        assert [r.stats.plane for r in ready] == ["attach", "attach", "memfd"]
        assert [r.attached.pool_id if r.attached else 0 for r in ready] == [1, 2, 0]
        assert same_content(prefills[2], "p", decode, blocks, 0)
        assert decode.sink.counters.attach_refused == 1
        for i in range(2):
            decode.sink.detach(f"d{i}", is_intact=True)
            assert prefills[i].events.wait("p").outcome == "done"
        wait_until(lambda: bases.num_held() == 0)
    finally:
        decode.stop()
        for prefill in prefills:
            prefill.stop()


def test_an_end_that_cannot_read_in_place_does_not_offer_to(
    prefill: PrefillEnd, tmp_path: Path
) -> None:
    decode = make_decode(ATTACH)
    try:
        ready = receive(prefill, decode, "d", 64)
        assert (ready.stats.plane, ready.attached) == ("memfd", None)
    finally:
        decode.stop()


def test_unequal_pools_are_converted_and_so_copied(prefill: PrefillEnd, tmp_path: Path) -> None:
    layout = KvLayout(num_layers=4, num_kv_heads=2, head_dim=32, kv_dtype="bfloat16")
    decode = make_decode(ATTACH, layout=layout, bases=PoolBases())
    try:
        ready = receive(prefill, decode, "d", 64)
        assert (ready.stats.plane, ready.attached) == ("memfd", None)
    finally:
        decode.stop()


def test_a_dead_owner_is_moved_from(tmp_path: Path) -> None:
    """RB-032: its memory stays mapped, so what was attached is whole."""
    decode = make_decode(ATTACH, bases=PoolBases())
    prefill = make_prefill(tmp_path, ATTACH)
    try:
        kv = attached_of(receive(prefill, decode, "d", 64))
        sent = prefill.content("Pd")
        prefill.stop()
        prefill.memory.close()
        wait_until(lambda: len(decode.events.of("d")) > 1)
        dest = decode.free.pop()
        for at in range(4):
            assert kv.copy_home(at, decode.memory, dest, verify=True)
            assert decode.memory.blocks[dest].tobytes() == sent[at]
        decode.sink.detach("d", is_intact=True)
    finally:
        decode.stop()


def test_a_block_that_is_reused_before_it_is_verified_is_refused(
    prefill: PrefillEnd, decode: DecodeEnd
) -> None:
    ticket, offer = prefill.offer("p", 64)
    decode.open("d", ticket, offer)
    prefill.seal("p", 0, 4)
    prefill.finish("p", 64)
    wait_until(lambda: decode.sink.counters.opened == 1)
    prefill.memory.gens[prefill.lent["p"][2]] += 2
    decode.reserve("d", offer)
    assert outcome(decode.events.wait("d")) == "handoff_failed"
    assert decode.sink.counters.integrity_errors > 0
