"""Digests notice every changed byte, in the range it is in and in no other."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu import build, kv_blocks
from services.kv.digest import block_digests, digest_columns, tail_digest
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


@given(
    layers=st.integers(1, 9),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([4, 8, 16, 64]),
    kv_dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    block_size=st.sampled_from([16, 32]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_library_finds_the_digests_of_the_xxhash_package(
    layers: int, heads: int, head_dim: int, kv_dtype: str, block_size: int, seed: int
) -> None:
    layout = KvLayout(layers, heads, head_dim, kv_dtype, block_size)
    block = np.random.default_rng(seed).integers(0, 256, layout.block_bytes).astype(np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_blocks, "available", lambda: (None, "switched off"))
        expected = block_digests(layout, block)
    assert block_digests(layout, block).tolist() == expected.tolist()


def test_shards_of_a_block_have_the_digests_of_the_whole() -> None:
    """Groups of layers that do not begin at the model's first one."""
    whole = KvLayout(12, 4, 32, "float32")
    part = KvLayout(
        6, 2, 32, "float32", first_layer=3, first_head=2, model_layers=12, model_heads=4
    )
    block = np.random.default_rng(2).integers(0, 256, whole.block_bytes).astype(np.uint8)
    rows = block.reshape(12, 2, 4, -1)[3:9, :, 2:4]
    columns = digest_columns(whole, part)
    assert columns is not None
    found = block_digests(part, np.ascontiguousarray(rows).reshape(-1))
    assert found.tolist() == block_digests(whole, block)[columns].tolist()


@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx2 -mno-avx512f", "-march=x86-64"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 instruction sets")
def test_narrower_vectors_find_the_same(flags: str, tmp_path: Path) -> None:
    try:
        compiler = build.find_compiler(os.environ)
    except build.BuildFailed as error:
        pytest.skip(str(error))
    environ = {**os.environ, "CC": f"{compiler[0]} {flags}", "XDG_CACHE_HOME": str(tmp_path)}
    if "x86-64" in flags:  # the build adds -march=native; behind it ours would not count
        script = tmp_path / "old-cc"
        script.write_text(
            f'#!/bin/sh\nfor a in "$@"; do shift; [ "$a" = -march=native ] || set -- "$@" "$a"; '
            f'done\nexec {compiler[0]} "$@"\n'
        )
        script.chmod(0o755)
        environ["CC"] = str(script)
    library = kv_blocks.KvBlocks(build.load(environ, build.KV_BLOCKS))
    layout = KvLayout(6, 3, 16, "float32")
    block = np.random.default_rng(3).integers(0, 256, layout.block_bytes).astype(np.uint8)
    bounds = [0, *(hi for _, hi in layout.layer_groups)]
    plan = kv_blocks.DigestPlan(3, 16 * 16 * 4, bounds)
    assert library.digests(plan, block).tolist() == block_digests(layout, block).tolist()
    dest = np.zeros((2, layout.block_bytes), np.uint8)
    pool, gens, rows = block[None, None], np.full(1, 4, np.uint64), np.zeros(1, np.int64)
    job = kv_blocks.PullJob(pool, gens, rows, gens, dest, rows + 1)
    good, digests = library.pull_with_digests(job, plan)
    assert good.all()
    assert digests[0].tolist() == block_digests(layout, block).tolist()
    assert (dest[1] == block).all()
