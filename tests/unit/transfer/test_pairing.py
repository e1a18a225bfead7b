"""Which part of a block crosses between unequal pools, and which rows of ours it fills."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.ids import BlockId
from services.kv.digest import digest_columns
from services.kv.layout import LAYER_MAJOR, KvLayout
from services.transfer.pairing import (
    Unservable,
    in_wire_dtype,
    max_frame_bytes,
    mismatch,
    needed,
    requested,
    wire_layout,
)
from services.transfer.placement import Placement

MODEL = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64)
RANGES = st.tuples(st.integers(0, 29), st.integers(1, 30)).filter(lambda r: r[0] < r[1])
HEADS = st.sampled_from([(0, 1), (1, 2), (0, 3), (1, 3)])


@given(RANGES, HEADS, RANGES, HEADS)
def test_what_is_asked_for_is_served_and_covers_what_is_needed(
    layers: tuple[int, int],
    heads: tuple[int, int],
    own_layers: tuple[int, int],
    own_heads: tuple[int, int],
) -> None:
    prefill, decode = MODEL.part(layers, heads), MODEL.part(own_layers, own_heads)
    if mismatch(prefill, decode) is not None:
        assert max(layers[0], own_layers[0]) >= min(layers[1], own_layers[1]) or max(
            heads[0], own_heads[0]
        ) >= min(heads[1], own_heads[1])
        return
    (lo, hi), wanted = needed(prefill, decode)
    wire = wire_layout(prefill, decode, "")
    assert wire.layers[0] <= lo < hi <= wire.layers[1]
    assert wire.heads == wanted
    assert digest_columns(prefill, wire) is not None
    # No group of layers comes along of which nothing is needed.
    assert all(group[0] < hi and group[1] > lo for group in wire.layer_groups)
    asked = requested(prefill, wire.layers, wire.heads, wire.kv_dtype, "")
    assert (asked or prefill).is_same(wire)


def test_refusals_name_both_layouts() -> None:
    upper, lower = MODEL.part((0, 15), (0, 3)), MODEL.part((15, 30), (0, 3))
    why = mismatch(upper, lower)
    assert why is not None
    assert "no layer in common" in why
    assert "layers 0-15 of 30" in why
    assert "layers 15-30 of 30" in why
    assert "tag 'other' is not known" in (mismatch(MODEL, replace(MODEL, tag="other")) or "")
    layer_major = replace(MODEL, tag=LAYER_MAJOR)
    assert mismatch(layer_major, MODEL) is None
    assert "cannot write" in (mismatch(MODEL, layer_major) or "")
    assert "head in common" in (mismatch(MODEL.part((0, 30), (0, 1)), _head(2)) or "")


def _head(head: int) -> KvLayout:
    return MODEL.part((0, 30), (head, head + 1))


def test_an_open_off_the_pool_the_lines_or_the_agreement_is_refused() -> None:
    pool = MODEL.part((0, 15), (0, 2))
    for layers, heads, dtype, why in (
        ((0, 16), (0, 0), "", "not in"),
        ((7, 7), (0, 0), "", "not in"),
        ((0, 0), (1, 3), "", "not in"),
        ((0, 10), (0, 0), "", "digests"),
        ((0, 0), (0, 0), "int8", "agreed"),
        ((0, 0), (0, 0), "float99", "agreed"),
    ):
        with pytest.raises(Unservable, match=why):
            requested(pool, layers, heads, dtype, "bfloat16")
    assert requested(pool, (0, 0), (0, 0), "", "bfloat16") is None
    assert requested(pool, (0, 15), (0, 2), "float32", "") is None
    converted = requested(pool, (0, 7), (0, 1), "bfloat16", "bfloat16")
    assert converted == replace(pool.part((0, 7), (0, 1)), kv_dtype="bfloat16")


def test_a_wire_dtype_is_used_only_where_it_saves_bytes() -> None:
    assert in_wire_dtype(MODEL, "int8").kv_dtype == "int8"
    half = replace(MODEL, kv_dtype="bfloat16")
    assert in_wire_dtype(half, "bfloat16") is half
    small = replace(MODEL, kv_dtype="int8")
    assert in_wire_dtype(small, "bfloat16") is small
    assert in_wire_dtype(MODEL, "int8").block_bytes / half.block_bytes == pytest.approx(66 / 128)


@given(RANGES, HEADS, st.sampled_from([16, 32, 128]), st.sampled_from(["float32", "int8"]))
def test_frames_are_bounded(
    layers: tuple[int, int], heads: tuple[int, int], block_size: int, dtype: str
) -> None:
    decode = replace(MODEL.part(layers, heads), kv_dtype="bfloat16")
    prefill = replace(MODEL, block_size=block_size, kv_dtype=dtype)
    assert wire_layout(prefill, decode, "").block_bytes <= max_frame_bytes(decode)


SIZES = st.sampled_from([16, 32, 48, 64, 128])


@given(st.integers(1, 700), SIZES, SIZES, st.data())
def test_every_row_that_is_not_had_is_written_once(
    num_tokens: int, slot_size: int, block_size: int, data: st.DataObject
) -> None:
    num_blocks = num_tokens // block_size
    have = data.draw(st.lists(st.booleans(), min_size=num_blocks, max_size=num_blocks))
    placement = Placement(num_tokens, slot_size, block_size, have)
    blocks = [None if had else BlockId(100 + i) for i, had in enumerate(have)]
    tail = BlockId(999) if num_tokens % block_size else None
    slots, tail_slot = placement.bind(blocks, tail)
    had = placement.slots_had()
    assert len(slots) == len(had) == num_tokens // slot_size
    written: dict[tuple[BlockId, int], int] = {}
    completed: list[int] = []
    coming = [slot for slot in range(len(slots)) if not had[slot]]
    if tail_slot is not None:
        coming.append(len(slots))
    for slot in data.draw(st.permutations(coming)):
        for piece in placement.pieces(slot):
            dest = placement.dest_of(piece.block)
            if dest is None:
                continue
            for row, source in zip(range(*piece.block_rows), range(*piece.slot_rows), strict=True):
                assert (dest, row) not in written
                written[dest, row] = slot * slot_size + source
            if placement.note_written(piece):
                completed.append(piece.block)
    owners = [*blocks, tail]
    expected = {
        (owners[token // block_size], token % block_size): token
        for token in range(num_tokens)
        if owners[token // block_size] is not None
    }
    assert written == expected
    assert sorted(completed) == [i for i, is_had in enumerate(have) if not is_had]


def test_blocks_that_do_not_fit_bind_nothing_and_only_the_first_time_counts() -> None:
    def fresh() -> Placement:
        return Placement(40, 32, 16, (False, True))

    assert fresh().bind([BlockId(1)], BlockId(2)) == ([], None)
    assert fresh().bind([None, None], BlockId(2)) == ([], None)
    assert fresh().bind([BlockId(1), None], None) == ([], None)
    placement = fresh()
    assert placement.bind([BlockId(1), None], BlockId(2)) == ([0], 1)
    assert placement.bind([BlockId(5), None], BlockId(6)) == ([], None)
    assert [placement.dest_of(i) for i in range(3)] == [1, None, 2]
