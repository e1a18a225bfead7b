"""Conversion rounds as its rules say, copies what is equal, and touches only the named part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.kv.convert import (
    Part,
    convert_part,
    dequantise,
    is_lossless,
    quantise,
    round_bfloat16,
    round_trip,
    to_float32,
    values_of,
    whole,
    widen_bfloat16,
)
from services.kv.digest import block_digests, digest_columns
from services.kv.layout import KV_DTYPES, KvLayout

LAYOUT = KvLayout(num_layers=5, num_kv_heads=3, head_dim=8)


def random_block(layout: KvLayout, seed: int = 1) -> np.ndarray:
    """Make a block of ordinary numbers."""
    source = replace(layout, kv_dtype="float32")
    numbers = np.random.default_rng(seed).normal(0, 3, source.data_bytes // 4).astype(np.float32)
    return convert(source, numbers.view(np.uint8), layout)


def convert(src: KvLayout, block: np.ndarray, dst: KvLayout) -> np.ndarray:
    out = np.zeros(dst.block_bytes, np.uint8)
    convert_part(src, block, whole(src), dst, out, whole(dst))
    return out


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_bfloat16_rounds_like_torch(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    found = widen_bfloat16(round_bfloat16(values))
    # Equal in every bit but those of a NaN's payload.
    assert np.array_equal(np.isnan(found), np.isnan(values))
    numbers = ~np.isnan(values)
    assert np.array_equal(found.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])


def test_bfloat16_ties_go_to_even_and_the_largest_to_infinity() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x80000000], np.uint32)
    rounded = round_bfloat16(bits.view(np.float32)).tolist()
    assert rounded == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x8000]


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=8, max_size=8))
def test_int8_is_off_by_at_most_half_a_step(row: list[float]) -> None:
    values = np.array([row], np.float32)
    data, scales = np.empty((1, 8), np.int8), np.empty(1, np.float16)
    quantise(values, data, scales)
    # Half a step, and what float16 rounded off the scale of the largest value.
    scale = float(scales[0])
    slack = 127 * max(scale * 2.0**-11, 2.0**-25)
    assert np.abs(dequantise(data, scales) - values).max() <= scale / 2 + slack + 1e-6


def test_int8_follows_its_formula() -> None:
    values = np.array([[127.0, -127.0, 0.5, 1.5, -0.5, 0.0, 63.4, 1.0]], np.float32)
    data, scales = np.empty((1, 8), np.int8), np.empty(1, np.float16)
    quantise(values, data, scales)
    assert scales[0] == 1
    assert data[0].tolist() == [127, -127, 0, 2, 0, 0, 63, 1]  # ties to even


def test_int8_of_zeros_of_huge_and_of_broken_rows() -> None:
    values = np.zeros((5, 4), np.float32)
    values[1] = 1e-30
    values[2] = 1e30
    values[3, 2] = np.inf
    values.view(np.uint32)[4, 1] = 0x7FA00001  # a NaN that signals
    data, scales = np.empty((5, 4), np.int8), np.empty(5, np.float16)
    quantise(values, data, scales)
    back = dequantise(data, scales)
    assert not back[:2].any()
    assert (back[2] == 127 * 65504.0).all()
    assert np.isnan(back[3:]).all()


@pytest.mark.parametrize("src", KV_DTYPES)
def test_lossless_pairs_come_back_bit_for_bit(src: str) -> None:
    layout = replace(LAYOUT, kv_dtype=src)
    block = random_block(layout)
    for dst in (name for name in KV_DTYPES if is_lossless(src, name) and src != "int8"):
        assert np.array_equal(round_trip(layout, block, (dst,)), block), dst
    if src == "float32":
        for dst in ("bfloat16", "float16", "int8"):
            assert not is_lossless(src, dst)
            assert not np.array_equal(round_trip(layout, block, (dst,)), block), dst


@pytest.mark.parametrize("src", KV_DTYPES)
@pytest.mark.parametrize("dst", KV_DTYPES)
def test_values_are_those_of_the_formula(src: str, dst: str) -> None:
    left, right = replace(LAYOUT, kv_dtype=src), replace(LAYOUT, kv_dtype=dst)
    block = random_block(left)
    numbers = to_float32(src, values_of(left, block))
    found = to_float32(dst, values_of(right, convert(left, block, right)))
    if src == dst or dst == "float32":
        expected = numbers
    elif dst == "bfloat16":
        expected = widen_bfloat16(round_bfloat16(numbers))
    elif dst == "float16":
        expected = numbers.astype(np.float16).astype(np.float32)
    else:
        data = np.empty(numbers.shape, np.int8)
        scales = np.empty(numbers.shape[:-1], np.float16)
        quantise(numbers, data, scales)
        expected = dequantise(data, scales)
    assert np.array_equal(found, expected)


@given(st.data())
def test_a_part_goes_where_it_belongs_and_nothing_else_changes(data: st.DataObject) -> None:
    """From a shard with blocks of 32 tokens into one of 16 tokens and other ranges."""
    model = KvLayout(num_layers=6, num_kv_heads=4, head_dim=2)
    src = replace(model.part((1, 6), (0, 3)), block_size=32, kv_dtype="int8")
    dst = replace(model.part((0, 4), (1, 4)), kv_dtype=data.draw(st.sampled_from(KV_DTYPES)))
    lo, hi = sorted(data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2, unique=True)))
    start, count = data.draw(st.integers(0, 16)), data.draw(st.integers(1, 16))
    to = data.draw(st.integers(0, 16 - count))
    block = random_block(src)
    before = random_block(dst, seed=2)
    after = before.copy()
    src_part = Part((lo, hi), (1, 3), (start, start + count))
    dst_part = Part((lo, hi), (1, 3), (to, to + count))
    convert_part(src, block, src_part, dst, after, dst_part)
    # The same through the whole model in float32, which is slow and plain.
    expected, touched = to_float32(dst.kv_dtype, values_of(dst, before)), values_of(dst, after)
    moved = convert(src, block, replace(src, kv_dtype=dst.kv_dtype))
    numbers = to_float32(dst.kv_dtype, values_of(replace(src, kv_dtype=dst.kv_dtype), moved))
    expected = expected.copy()
    expected[lo:hi, :, 0:2, to : to + count] = numbers[
        lo - 1 : hi - 1, :, 1:3, start : start + count
    ]
    assert np.array_equal(to_float32(dst.kv_dtype, touched), expected)


def test_parts_of_other_shapes_are_refused() -> None:
    block = random_block(LAYOUT)
    part = Part((0, 2), (0, 1), (0, 4))
    with pytest.raises(ValueError, match="parts"):
        convert_part(LAYOUT, block, part, LAYOUT, block, part._replace(tokens=(0, 5)))


@given(st.data())
def test_digests_of_a_part_are_those_of_the_whole(data: st.DataObject) -> None:
    """Any legal range is verified alone: its digests are some of the block's."""
    total = data.draw(st.integers(1, 9))
    layout = KvLayout(num_layers=total, num_kv_heads=3, head_dim=2)
    layout = replace(layout, kv_dtype=data.draw(st.sampled_from(KV_DTYPES)))
    lines = sorted({line for group in layout.layer_groups for line in group})
    lo = data.draw(st.sampled_from(lines[:-1]))
    hi = data.draw(st.sampled_from([line for line in lines if line > lo]))
    first = data.draw(st.integers(0, 2))
    part = layout.part((lo, hi), (first, data.draw(st.integers(first + 1, 3))))
    columns = digest_columns(layout, part)
    assert columns is not None
    block = random_block(layout)
    cut = np.zeros(part.block_bytes, np.uint8)
    region = Part(part.layers, part.heads, (0, 16))
    convert_part(layout, block, region, part, cut, region)
    assert np.array_equal(block_digests(part, cut), block_digests(layout, block)[columns])


def test_ranges_off_the_digest_lines_have_no_digests() -> None:
    layout = KvLayout(num_layers=30, num_kv_heads=3, head_dim=2)
    assert layout.layer_groups == ((0, 7), (7, 15), (15, 22), (22, 30))
    assert digest_columns(layout, layout.part((0, 10), (0, 3))) is None
    # A pool that is cut there has digests of its own edges, on the model's lines elsewhere.
    assert layout.part((10, 20), (0, 3)).layer_groups == ((10, 15), (15, 20))


def test_numbers_from_elsewhere_are_checked() -> None:
    assert LAYOUT.problem() is None
    for wrong, what in (
        (replace(LAYOUT, kv_dtype="float8"), "kv_dtype"),
        (replace(LAYOUT, block_size=24), "block_size"),
        (replace(LAYOUT, block_size=256), "block_size"),
        (replace(LAYOUT, first_layer=1, model_layers=5), "layers"),
        (replace(LAYOUT, num_kv_heads=0), "heads"),
        (replace(LAYOUT, head_dim=1 << 20), "head_dim"),
    ):
        assert what in (wrong.problem() or "")


def test_a_shard_that_is_the_whole_is_the_whole() -> None:
    assert LAYOUT.is_same(replace(LAYOUT, model_layers=5, model_heads=3))
    assert not LAYOUT.is_same(replace(LAYOUT, model_layers=6))
