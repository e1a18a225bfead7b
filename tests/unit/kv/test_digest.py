"""Digests notice every changed byte, in the range it is in and in no other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.digest import block_digests, tail_digest
from services.kv.layout import KvLayout

LAYOUT = KvLayout(num_layers=6, num_kv_heads=3, head_dim=4)
BLOCK = np.random.default_rng(1).integers(0, 256, LAYOUT.block_bytes).astype(np.uint8)


@given(st.integers(0, LAYOUT.block_bytes - 1), st.integers(1, 255))
def test_a_changed_byte_changes_exactly_its_own_digest(at: int, change: int) -> None:
    block = BLOCK.copy()
    block[at] ^= change
    differs = np.flatnonzero(block_digests(LAYOUT, block) != block_digests(LAYOUT, BLOCK))
    row = LAYOUT.head_dim * LAYOUT.itemsize * LAYOUT.block_size
    layer, head = at // (row * 6), at // row % 3
    bounds = LAYOUT.layer_groups
    (group,) = [g for g, (lo, hi) in enumerate(bounds) if lo <= layer < hi]
    assert differs.tolist() == [head * len(bounds) + group]


def test_layer_bounds_cover_all_layers_once() -> None:
    for num_layers in (1, 2, 3, 4, 5, 30, 31):
        bounds = KvLayout(num_layers, 1, 1).layer_groups
        assert [layer for lo, hi in bounds for layer in range(lo, hi)] == list(range(num_layers))
        assert len(bounds) == min(4, num_layers)


def test_there_are_as_many_digests_as_the_layout_says() -> None:
    for num_layers in (1, 3, 30):
        layout = KvLayout(num_layers=num_layers, num_kv_heads=2, head_dim=2)
        digests = block_digests(layout, np.zeros(layout.block_bytes, dtype=np.uint8))
        assert digests.shape == (layout.digests_per_block,)


@given(st.integers(1, 16), st.integers(0, LAYOUT.block_bytes - 1))
def test_tail_digest_covers_valid_rows_and_ignores_the_rest(valid: int, at: int) -> None:
    block = BLOCK.copy()
    block[at] ^= 1
    token = at // (LAYOUT.head_dim * LAYOUT.itemsize) % LAYOUT.block_size
    is_equal = tail_digest(LAYOUT, block, valid) == tail_digest(LAYOUT, BLOCK, valid)
    assert is_equal == (token >= valid)


def test_tail_digest_depends_on_the_number_of_rows() -> None:
    zeros = np.zeros(LAYOUT.block_bytes, dtype=np.uint8)
    assert len({tail_digest(LAYOUT, zeros, valid) for valid in range(1, 17)}) == 16


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        block_digests(LAYOUT, BLOCK[:-1])
    for valid in (0, 17):
        with pytest.raises(ValueError, match="valid tokens"):
            tail_digest(LAYOUT, BLOCK, valid)
