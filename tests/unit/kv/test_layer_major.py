"""Layer-major pools: the same blocks as of any other, whichever part is read, and by what code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu import kv_blocks
from services.kv.block_copy import pull_blocks, read_blocks
from services.kv.convert import Part, convert_part
from services.kv.layout import BLOCK_MAJOR, LAYER_MAJOR, KvLayout
from services.kv.memory import KvPoolMemory

NUM_BLOCKS = 5
TAGS = (BLOCK_MAJOR, LAYER_MAJOR)


def written(layout: KvLayout, seed: int = 0) -> tuple[KvPoolMemory, np.ndarray]:
    """Return a pool of sealed blocks and what was written, `[num_blocks, block_bytes]`."""
    content = np.random.default_rng(seed).integers(
        0, 256, (NUM_BLOCKS, layout.block_bytes), np.uint8
    )
    memory = KvPoolMemory.create(layout, NUM_BLOCKS, kind="anonymous")
    pieces = memory.pieces()
    pieces[:] = content.reshape(pieces.shape)
    memory.gens[:] = 2
    return memory, content


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    """Draw a layout, maybe of a shard; its pieces are whole cache lines or not."""
    layers, heads = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    return KvLayout(
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=draw(st.sampled_from([1, 8, 32])),
        kv_dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        block_size=draw(st.sampled_from([16, 32])),
        tag=draw(st.sampled_from(TAGS)),
        first_layer=draw(st.integers(0, 2)),
        first_head=draw(st.integers(0, 2)),
        model_layers=8,
        model_heads=6,
    )


def ranges(lo: int, hi: int) -> st.SearchStrategy[tuple[int, int]]:
    """Draw a range within [lo, hi)."""
    bounds = st.lists(st.integers(lo, hi), min_size=2, max_size=2, unique=True)
    return bounds.map(lambda pair: (min(pair), max(pair)))


@pytest.mark.parametrize("copier", ["library", "numpy"])
@given(data=st.data(), layout=layouts())
def test_any_part_of_any_blocks_of_any_pool_is_what_was_written(
    copier: str, data: st.DataObject, layout: KvLayout
) -> None:
    layers, heads = data.draw(ranges(*layout.layers)), data.draw(ranges(*layout.heads))
    part = layout.part(layers, heads)
    blocks = data.draw(st.permutations(range(NUM_BLOCKS)))[: data.draw(st.integers(1, NUM_BLOCKS))]
    rows = data.draw(st.permutations(range(NUM_BLOCKS)))[: len(blocks)]
    memory, content = written(layout)
    stale = blocks[0]
    memory.gens[stale] = data.draw(st.sampled_from([2, 3, 4]))  # as announced, odd, used again
    dest = np.zeros((NUM_BLOCKS, part.block_bytes), np.uint8)
    with pytest.MonkeyPatch.context() as patch, memory:
        if copier == "numpy":
            patch.setattr(kv_blocks, "available", lambda: (None, "switched off"))
        good = pull_blocks(memory, blocks, [2] * len(blocks), dest, rows, part)
        whole = read_blocks(memory, blocks)
        assert good == [block != stale or memory.gens[stale] == 2 for block in blocks]
        cut = Part(layers, heads, (0, layout.block_size))
        for is_good, block, row, found in zip(good, blocks, rows, whole, strict=True):
            expected = np.zeros(part.block_bytes, np.uint8)
            if is_good:
                convert_part(layout, content[block], cut, part, expected, cut)
            assert np.array_equal(dest[row], expected)
            assert np.array_equal(found, content[block])


def test_pieces_of_a_layer_lie_in_a_row() -> None:
    """What a layer-major cache is: one array of blocks for K, and one for V, of each layer."""
    layout = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, tag=LAYER_MAJOR)
    memory, content = written(layout)
    with memory:
        pieces = memory.pieces()
        piece_bytes = layout.block_bytes // 4
        assert pieces.shape == (NUM_BLOCKS, 4, piece_bytes)
        assert pieces.strides == (piece_bytes, NUM_BLOCKS * piece_bytes, 1)
        with pytest.raises(ValueError, match="lie in pieces"):
            _ = memory.blocks
        assert np.array_equal(read_blocks(memory, [3])[0], content[3])


def test_a_pool_is_attached_only_as_what_it_is() -> None:
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8)
    for own, other in (TAGS, TAGS[::-1]):
        with KvPoolMemory.create(replace(layout, tag=own), NUM_BLOCKS) as owner:
            assert owner.fd is not None
            KvPoolMemory.attach(owner.fd, owner.layout, NUM_BLOCKS).close()
            with pytest.raises(ValueError, match="geometry"):
                KvPoolMemory.attach(owner.fd, replace(layout, tag=other), NUM_BLOCKS)


@pytest.mark.parametrize(
    ("change", "num_blocks", "why"),
    [
        ({"tag": "HLKTD"}, 5, "'HLKTD' is not known"),
        ({"kv_dtype": "int8"}, 5, "scales"),
        ({"head_dim": 1 << 40}, 5, "head_dim"),
        ({}, 1 << 40, "larger than"),
        ({}, (1 << 64) + 5, "larger than"),  # would be 5 if 64 bits wrapped
        ({}, 0, "at least one"),
    ],
)
def test_hostile_descriptors_are_refused(change: dict[str, Any], num_blocks: int, why: str) -> None:
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, tag=LAYER_MAJOR)
    with KvPoolMemory.create(layout, 5) as owner:
        assert owner.fd is not None
        hostile = replace(layout, **change)
        with pytest.raises(ValueError, match=why):
            KvPoolMemory.attach(owner.fd, hostile, num_blocks)


def test_a_part_that_is_not_inside_is_refused() -> None:
    layout = KvLayout(4, 2, 8, tag=LAYER_MAJOR, first_layer=2, model_layers=8)
    memory, _ = written(layout)
    with memory:
        for layers, heads in (((1, 4), (0, 2)), ((3, 7), (0, 2)), ((3, 4), (1, 3))):
            with pytest.raises(ValueError, match="not inside"):
                memory.pieces(layout.part(layers, heads))
        for other in ({"kv_dtype": "bfloat16"}, {"block_size": 32}):
            with pytest.raises(ValueError, match="no part"):
                memory.pieces(replace(layout, **other).part((3, 4), (0, 1)))
