"""Pools of other dtypes, block sizes and shards: bytes arrive as the pure conversion says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.ids import BlockHash, BlockId
from services.kv.block_copy import write_block
from services.kv.convert import (
    convert_part,
    round_trip,
    to_float32,
    values_of,
    whole,
)
from services.kv.digest import block_digests
from services.kv.layout import LAYER_MAJOR, KvLayout
from services.transfer.api import FinalInfo, FirstTokenInfo, Offer, SinkReady, SinkReleased
from services.transfer.config import TransferConfig
from services.transfer.pairing import mismatch
from services.transfer.zmq_plane import DealerLink
from tests.support.transfer_ends import (
    CALM,
    LAYOUT,
    DecodeEnd,
    PrefillEnd,
    hashes,
    make_decode,
    make_prefill,
    outcome,
    with_planes,
)

pytestmark = pytest.mark.integration

MODEL = replace(LAYOUT, num_layers=6, num_kv_heads=4, head_dim=8)
PLANES = ("memfd", "nccl", "zmq")


def numbers(num_tokens: int, seed: int = 3) -> np.ndarray:
    """Make the KV of a prompt, `[L, 2, H, tokens, D]`, on the grid of bfloat16."""
    shape = (MODEL.num_layers, 2, MODEL.num_kv_heads, num_tokens, MODEL.head_dim)
    values = np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)
    values.view(np.uint32)[...] &= 0xFFFF0000
    return values


def put(layout: KvLayout, block: np.ndarray, kv: np.ndarray, start: int) -> None:
    """Write rows from `start` on into a block, as an engine with this layout has them."""
    plain = replace(layout, kv_dtype="float32")
    content = np.full(plain.block_bytes, 0xA5, np.uint8)  # what is behind a tail
    rows = kv[slice(*layout.layers), :, slice(*layout.heads), start : start + layout.block_size]
    values_of(plain, content).data[:, :, :, : rows.shape[3]] = rows
    convert_part(plain, content, whole(plain), layout, block, whole(layout))


def offer_prompt(end: PrefillEnd, key: str, kv: np.ndarray) -> tuple[bytes, Offer]:
    """Offer a prompt with this KV, all at once."""
    memory, layout, num_tokens = end.memory, end.memory.layout, kv.shape[3]
    offer = Offer(key, f"req-{key}", num_tokens, hashes(num_tokens // 16), "tenant")
    ticket = end.source.offer(offer)
    blocks = []
    for start in range(0, num_tokens, layout.block_size):
        block = end.free.pop()
        memory.gens[block] += 1
        content = np.empty(layout.block_bytes, np.uint8)
        put(layout, content, kv, start)
        write_block(memory, block, content)
        memory.digests[block] = block_digests(layout, content)
        memory.gens[block] += 1
        blocks.append(block)
    full = num_tokens // layout.block_size
    if full:
        end.source.blocks_sealed(key, 0, blocks[:full])
    valid = num_tokens % layout.block_size
    tail = blocks[-1] if valid else None
    first = (FirstTokenInfo(0, 42),)
    end.source.prefill_finished(key, FinalInfo(first, num_tokens, tail, valid, 1))
    return ticket, offer


def open_and_reserve(
    end: DecodeEnd, key: str, ticket: bytes, offer: Offer, blocks: Sequence[BlockId | None]
) -> None:
    """Open a ticket into blocks, tail last if there is one; None = had."""
    full = offer.num_tokens // end.memory.layout.block_size
    have = tuple(block is None for block in blocks[:full])
    form = end.sink.form_of(ticket)
    end.sink.open(key, ticket, 1, have, offer.block_hashes, "", form)
    tail = blocks[full] if len(blocks) > full else None
    end.sink.reserve(key, blocks[:full], tail)


def read(end: DecodeEnd, blocks: Sequence[int], num_tokens: int) -> np.ndarray:
    """Return what a pool holds of a prompt, in float32."""
    layout, pool = end.memory.layout, end.memory.blocks
    parts = [to_float32(layout.kv_dtype, values_of(layout, pool[block])) for block in blocks]
    return np.concatenate(parts, axis=3)[:, :, :, :num_tokens]


def rounded(layout: KvLayout, kv: np.ndarray, dtypes: tuple[str, ...]) -> np.ndarray:
    """Return the KV of a single worker that rounds its own this way."""
    plain = replace(MODEL, kv_dtype="float32", block_size=layout.block_size)
    out = np.empty_like(kv)
    for start in range(0, kv.shape[3], plain.block_size):
        block = np.zeros(plain.block_bytes, np.uint8)
        rows = kv[:, :, :, start : start + plain.block_size]
        values_of(plain, block).data[:, :, :, : rows.shape[3]] = rows
        content = values_of(plain, round_trip(plain, block, dtypes)).data
        out[:, :, :, start : start + plain.block_size] = content[:, :, :, : rows.shape[3]]
    return out[slice(*layout.layers), :, slice(*layout.heads)]


def check(end: DecodeEnd, blocks: Sequence[int], kv: np.ndarray, dtypes: tuple[str, ...]) -> None:
    layout, num_tokens = end.memory.layout, kv.shape[3]
    found = read(end, blocks, num_tokens)
    expected = rounded(layout, kv, dtypes)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    for block in blocks[: num_tokens // layout.block_size]:
        own = block_digests(layout, end.memory.blocks[block])
        assert np.array_equal(end.memory.digests[block], own)


@pytest.fixture(params=PLANES)
def config(request: pytest.FixtureRequest) -> TransferConfig:
    return with_planes(CALM, request.param)


def run_pair(
    tmp_path: Path,
    config: TransferConfig,
    layouts: tuple[KvLayout, KvLayout],
    kv: np.ndarray,
    dtypes: tuple[str, ...],
) -> None:
    prefill = make_prefill(tmp_path, config, 64, layouts[0])
    decode = make_decode(config, 64, layouts[1])
    try:
        ticket, offer = offer_prompt(prefill, "p", kv)
        blocks = [decode.free.pop() for _ in range(layouts[1].blocks_for(kv.shape[3]))]
        open_and_reserve(decode, "d", ticket, offer, blocks)
        ready = decode.events.wait("d")
        assert isinstance(ready, SinkReady), ready
        assert ready.final.tail_valid_tokens == kv.shape[3] % layouts[1].block_size
        assert (ready.stats.plane, ready.stats.nacks) == (config.planes[0], 0)
        assert outcome(prefill.events.wait("p")) == "done"
        check(decode, blocks, kv, dtypes)
    finally:
        decode.stop()
        prefill.stop()


@pytest.mark.parametrize(
    ("prefill", "decode", "dtypes"),
    [
        ("bfloat16", "float32", ()),  # lossless: the numbers are on bfloat16's grid
        ("float32", "bfloat16", ("bfloat16",)),
        ("float32", "int8", ("int8",)),
        ("int8", "float32", ("int8",)),
        ("int8", "bfloat16", ("int8", "bfloat16")),
        ("bfloat16", "int8", ("int8",)),
        ("int8", "int8", ("int8",)),
    ],
)
def test_dtypes_convert_on_the_receiver(
    config: TransferConfig, tmp_path: Path, prefill: str, decode: str, dtypes: tuple[str, ...]
) -> None:
    """RB-027: item sizes differ, and every number is still the one that was meant."""
    layouts = (replace(MODEL, kv_dtype=prefill), replace(MODEL, kv_dtype=decode))
    run_pair(tmp_path, config, layouts, numbers(100), dtypes)


@pytest.mark.parametrize("num_tokens", [16, 40, 48, 64, 100, 131])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (48, 32), (16, 128)])
def test_block_sizes_convert(
    config: TransferConfig, tmp_path: Path, sizes: tuple[int, int], num_tokens: int
) -> None:
    """RB-028: a prompt that is no multiple of either size among them; no partial blocks."""
    layouts = (
        replace(MODEL, block_size=sizes[0]),
        replace(MODEL, block_size=sizes[1], kv_dtype="bfloat16"),
    )
    run_pair(tmp_path, config, layouts, numbers(num_tokens), ())


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("wire", ["int8", "bfloat16"])
def test_the_wire_can_have_a_dtype_of_its_own(tmp_path: Path, stored: str, wire: str) -> None:
    config = replace(with_planes(CALM, "zmq"), wire_dtype=wire)
    layout = replace(MODEL, kv_dtype=stored)
    kv = numbers(100)
    dtypes = (wire, stored)
    run_pair(tmp_path, config, (layout, layout), kv, dtypes)


@pytest.mark.parametrize(
    "change", [{}, {"kv_dtype": "bfloat16"}, {"kv_dtype": "int8"}, {"block_size": 32}]
)
def test_a_layer_major_pool_is_read_by_any_other(
    config: TransferConfig, tmp_path: Path, change: dict[str, Any]
) -> None:
    layouts = (replace(MODEL, tag=LAYER_MAJOR), replace(MODEL, **change))
    dtypes = ("int8",) if "int8" in change.values() else ()
    run_pair(tmp_path, config, layouts, numbers(100), dtypes)


def test_a_layer_major_pool_can_be_rounded_for_the_wire(tmp_path: Path) -> None:
    config = replace(with_planes(CALM, "zmq"), wire_dtype="int8")
    layouts = (replace(MODEL, tag=LAYER_MAJOR), MODEL)
    run_pair(tmp_path, config, layouts, numbers(50), ("int8", "float32"))


def test_a_mapped_pool_is_never_rounded_for_the_wire(tmp_path: Path) -> None:
    config = replace(with_planes(CALM, "memfd"), wire_dtype="int8")
    run_pair(tmp_path, config, (MODEL, MODEL), numbers(50), ())


# ---- shards -------------------------------------------------------------------------------------


def grid(layer_cuts: Sequence[int], head_cuts: Sequence[int]) -> list[KvLayout]:
    """Cut the model into pools."""
    layers = list(zip([0, *layer_cuts], [*layer_cuts, MODEL.num_layers], strict=True))
    heads = list(zip([0, *head_cuts], [*head_cuts, MODEL.num_kv_heads], strict=True))
    return [MODEL.part(layer, head) for layer in layers for head in heads]


def layer_major(pools: Sequence[KvLayout]) -> list[KvLayout]:
    """Lay pools out by layers."""
    return [replace(pool, tag=LAYER_MAJOR) for pool in pools]


@pytest.mark.parametrize(
    ("prefills", "decodes"),
    [
        (grid((), ()), grid((), (1, 2, 3))),  # TP 1 -> 4
        (grid((), (1, 2, 3)), grid((), ())),  # TP 4 -> 1
        (grid((), (2,)), grid((), (1, 2, 3))),  # TP 2 -> 4
        (grid((), (1, 3)), grid((), (2,))),  # TP 3 -> 2, uneven
        (grid((2, 4), ()), grid((3,), ())),  # PP 3 -> 2, off the digest lines
        (grid((3,), ()), grid((2, 4), ())),  # PP 2 -> 3
        (grid((3,), (2,)), grid((2,), (1,))),  # both at once
        (layer_major(grid((3,), (2,))), grid((2,), (1,))),
    ],
)
def test_shards_n_to_m(
    config: TransferConfig, tmp_path: Path, prefills: list[KvLayout], decodes: list[KvLayout]
) -> None:
    """Every decode shard opens the ticket of every prefill shard it shares something with."""
    kv = numbers(40)
    decodes = [replace(layout, kv_dtype="bfloat16", block_size=32) for layout in decodes]
    sources = [
        make_prefill(tmp_path, config, 16, layout, worker_id=f"prefill-{i}")
        for i, layout in enumerate(prefills)
    ]
    sinks = [
        make_decode(config, 8, layout, worker_id=f"decode-{i}") for i, layout in enumerate(decodes)
    ]
    try:
        for sink in sinks:
            _receive_shards(sources, sink, kv)
    finally:
        for sink in sinks:
            sink.stop()
        for source in sources:
            source.stop()


def tickets_for(
    sources: list[PrefillEnd], sink: DecodeEnd, key: str, kv: np.ndarray
) -> tuple[list[bytes], Offer, list[PrefillEnd]]:
    """Offer a prompt wherever something of the sink's part lies."""
    own = sink.memory.layout
    tickets, offers, sharing = [], [], []
    for source in sources:
        if mismatch(source.memory.layout, own) is None:
            ticket, offer = offer_prompt(source, key, kv)
            tickets.append(ticket)
            offers.append(offer)
            sharing.append(source)
    return tickets, offers[0], sharing


def _receive_shards(sources: list[PrefillEnd], sink: DecodeEnd, kv: np.ndarray) -> None:
    own = sink.memory.layout
    key = f"to-{id(sink)}"
    tickets, offer, sharing = tickets_for(sources, sink, key, kv)
    blocks = [sink.free.pop() for _ in range(own.blocks_for(kv.shape[3]))]
    full = kv.shape[3] // own.block_size
    sink.shards.open(key, tickets, 1, (False,) * full, offer.block_hashes)
    tail = blocks[full] if len(blocks) > full else None
    sink.shards.reserve(key, blocks[:full], tail)
    ready = sink.events.wait(key)
    assert isinstance(ready, SinkReady), ready
    assert [outcome(source.events.wait(key)) for source in sharing] == ["done"] * len(sharing)
    check(sink, blocks, kv, ())
    # Only what is needed crosses, but for layers widened to the lines of the digests.
    expected_bytes = own.num_layers * own.num_kv_heads * 2 * 3 * 16 * own.head_dim * 4
    assert expected_bytes <= ready.stats.size_bytes <= 3 * expected_bytes
    assert sink.shards.num_open() == sink.sink.num_open() == 0


@pytest.mark.parametrize(
    ("prefills", "left_out", "fault"),
    [
        (grid((), (1, 2, 3)), 2, "layers 0-6 of heads 2-3 come from no transfer"),
        (grid((2, 4), ()), 0, "layers 0-2 of heads 0-4 come from no transfer"),
        (grid((3,), (2,)), 3, "layers 3-6 of heads 2-4 come from no transfer"),
    ],
)
def test_a_receive_with_a_gap_is_not_opened(
    config: TransferConfig, tmp_path: Path, prefills: list[KvLayout], left_out: int, fault: str
) -> None:
    """Before: it was ready with rows nobody had written."""
    sources = [
        make_prefill(tmp_path, config, 16, layout, worker_id=f"prefill-{i}")
        for i, layout in enumerate(prefills)
        if i != left_out
    ]
    sink = make_decode(config, 8, MODEL)
    try:
        tickets, offer, _ = tickets_for(sources, sink, "d", numbers(40))
        have = (False,) * len(offer.block_hashes)
        for key, some in (("gap", tickets), ("twice", [*tickets, tickets[0]]), ("none", [])):
            sink.shards.open(key, some, 1, have, offer.block_hashes)
            refused = sink.events.wait(key)
            assert isinstance(refused, SinkReleased)
            assert (refused.code, refused.can_recompute) == ("incompatible", True)
            if key == "gap":
                assert fault in refused.message
        # One ticket alone is no cover either.
        sink.sink.open("alone", tickets[0], 1, have, offer.block_hashes)
        assert outcome(sink.events.wait("alone")) == "incompatible"
        assert sink.shards.num_open() == sink.sink.num_open() == 0
        assert [source.source.counters.opened for source in sources] == [0] * len(sources)
    finally:
        sink.stop()
        for source in sources:
            source.stop()


def test_one_shard_that_fails_ends_the_receive_of_all(
    config: TransferConfig, tmp_path: Path
) -> None:
    """One of several ranks failed: the others stop too, then the blocks come back, once."""
    prefills = grid((), (2,))
    sources = [
        make_prefill(tmp_path, config, 16, layout, worker_id=f"prefill-{i}")
        for i, layout in enumerate(prefills)
    ]
    sink = make_decode(config, 8, MODEL)
    try:
        whole_ticket, offer = offer_prompt(sources[0], "d", numbers(40))
        part = Offer("d", "req-d", 40, offer.block_hashes, "tenant")
        stuck_ticket = sources[1].source.offer(part)  # its prefill never ends
        sink.shards.open("d", [whole_ticket, stuck_ticket], 1, (False,) * 2, offer.block_hashes)
        sink.shards.reserve("d", [BlockId(0), BlockId(1)], BlockId(2))
        assert outcome(sources[0].events.wait("d")) == "done"
        assert not sink.events.of("d"), "half of it is here"
        sources[1].source.cancel("d", "a rank has failed")
        released = sink.events.wait("d")
        assert isinstance(released, SinkReleased)
        assert released.code == "handoff_failed"
        assert "a rank has failed" in released.message
        assert sink.shards.num_open() == sink.sink.num_open() == 0
        assert len(sink.events.of("d")) == 1
    finally:
        sink.stop()
        for source in sources:
            source.stop()


def test_a_shard_without_anything_in_common_is_refused(tmp_path: Path) -> None:
    """RB-022: refused at once, to the request that waits, with both ranges."""
    upper, lower = grid((3,), ())
    prefill, decode = make_prefill(tmp_path, CALM, 8, upper), make_decode(CALM, 8, lower)
    try:
        ticket, offer = offer_prompt(prefill, "p", numbers(40))
        open_and_reserve(decode, "d", ticket, offer, [BlockId(0), BlockId(1), BlockId(2)])
        refused = decode.events.wait("d")
        assert isinstance(refused, SinkReleased)
        assert refused.code == "incompatible"
        assert "no layer in common" in refused.message
        assert "layers 0-3" in refused.message
        assert "layers 3-6 of 6" in refused.message
        assert prefill.source.counters.opened == 0
    finally:
        decode.stop()
        prefill.stop()


# ---- prefix hits, corruption --------------------------------------------------------------------


def test_blocks_decode_has_are_not_written_again(config: TransferConfig, tmp_path: Path) -> None:
    """A slot of 32 tokens half of which is had still comes, but only the other half is written."""
    prefill = make_prefill(tmp_path, config, 16, replace(MODEL, block_size=32))
    decode = make_decode(config, 16, replace(MODEL, kv_dtype="bfloat16"))
    kv = numbers(100)
    try:
        ticket, offer = offer_prompt(prefill, "p", kv)
        blocks: list[BlockId | None] = [None, None, None, *(BlockId(i) for i in range(4))]
        open_and_reserve(decode, "d", ticket, offer, blocks)
        ready = decode.events.wait("d")
        assert isinstance(ready, SinkReady)
        assert (ready.stats.blocks_moved, ready.stats.blocks_deduped) == (3, 1)
        check(decode, [0, 1, 2, 3], kv[:, :, :, 48:], ())
        assert not decode.memory.blocks[4:].any()
    finally:
        decode.stop()
        prefill.stop()


@pytest.mark.parametrize("wire", ["", "int8"])
def test_what_is_changed_on_its_way_is_not_converted(
    tmp_path: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame is verified as it came, before its conversion could hide what is wrong with it."""
    config = replace(with_planes(CALM, "zmq"), wire_dtype=wire)
    prefill = make_prefill(tmp_path, config, 16, MODEL)
    decode = make_decode(config, 16, replace(MODEL, kv_dtype="bfloat16"))
    kv = numbers(40)
    flips = iter([7, 11])

    def flip(link: DealerLink, block: np.ndarray) -> bool:
        is_good = plain(link, block)
        at = next(flips, None)
        if at is not None:
            block[at] ^= 1  # the lowest bit of a float32: rounding to bfloat16 would hide it
        return is_good

    plain = DealerLink.recv_block
    monkeypatch.setattr(DealerLink, "recv_block", flip)
    try:
        ticket, offer = offer_prompt(prefill, "p", kv)
        open_and_reserve(decode, "d", ticket, offer, [BlockId(i) for i in range(3)])
        ready = decode.events.wait("d")
        assert isinstance(ready, SinkReady), ready
        assert decode.sink.counters.integrity_errors == ready.stats.nacks == 2
        check(decode, [0, 1, 2], kv, (wire, "bfloat16") if wire else ())
    finally:
        decode.stop()
        prefill.stop()


def test_a_lie_about_hashes_or_a_pool_of_another_block_size_ends_it(tmp_path: Path) -> None:
    prefill = make_prefill(tmp_path, CALM, 16, replace(MODEL, block_size=32))
    decode = make_decode(CALM, 16, MODEL)
    try:
        ticket, offer = offer_prompt(prefill, "p", numbers(64))
        other = (BlockHash(b"x" * 16), *offer.block_hashes[1:])
        decode.sink.open("d", ticket, 1, (False,) * 4, other)
        assert outcome(decode.events.wait("d")) == "hash_mismatch"
        decode.sink.open("e", ticket, 1, (False,) * 2, offer.block_hashes)
        assert outcome(decode.events.wait("e")) == "hash_mismatch"
    finally:
        decode.stop()
        prefill.stop()
