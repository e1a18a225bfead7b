"""Digests of block content: xxh3_64 per (block, KV head, layer quarter), and of a partial tail.

A digest finds races, reuse and corruption; that content belongs to tokens is what the block
hash says. Fine enough that any head or layer range that may legally move is verified alone.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import xxhash

from kernels.cpu import kv_blocks
from services.kv.layout import SCALE_BYTES, KvLayout


def block_digests(layout: KvLayout, block: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Digest one block.

    Args:
        block: `[block_bytes]`, one row of the pool.

    Returns:
        `[digests_per_block]`: for KV head h and layer group g at `h * num_groups + g`, so the
        digests of a head range are one slice. Scales of int8 values count with their values.
    """
    library, _ = kv_blocks.available()
    plan = digest_plan(layout) if library is not None else None
    if library is not None and plan is not None and block.flags.c_contiguous:
        return library.digests(plan, block)
    # One copy with the head outermost makes every (head, layer range) contiguous.
    heads = [np.ascontiguousarray(part.transpose(2, 0, 1, 3, 4)) for part in _parts(layout, block)]
    first = layout.first_layer
    groups = [slice(lo - first, hi - first) for lo, hi in layout.layer_groups]
    digests = [
        _digest([part[head, group] for part in heads])
        for head in range(layout.num_kv_heads)
        for group in groups
    ]
    return np.array(digests, dtype=np.uint64)


@functools.lru_cache(maxsize=64)
def digest_plan(layout: KvLayout) -> kv_blocks.DigestPlan | None:
    """Return how the library digests blocks of this layout, if it can."""
    if layout.has_scales:
        return None  # scales behind the values
    run_bytes = layout.block_size * layout.head_dim * layout.itemsize
    groups = layout.layer_groups
    bounds = [lo - layout.first_layer for lo, _ in groups]
    bounds.append(groups[-1][1] - layout.first_layer)
    plan = kv_blocks.DigestPlan(layout.num_kv_heads, run_bytes, bounds)
    return plan if plan.is_possible else None


def digest_columns(layout: KvLayout, part: KvLayout) -> npt.NDArray[np.int64] | None:
    """Return which digests of a block are those of a part of it; None where lines do not meet."""
    groups, wanted = layout.layer_groups, part.layer_groups
    if any(group not in groups for group in wanted):
        return None
    at = [groups.index(group) for group in wanted]
    heads = range(part.first_head - layout.first_head, part.heads[1] - layout.first_head)
    return np.array([head * len(groups) + group for head in heads for group in at], np.int64)


def tail_digest(layout: KvLayout, block: npt.NDArray[np.uint8], valid_tokens: int) -> int:
    """Digest the first `valid_tokens` rows of a partial block; what follows them is ignored."""
    if not 0 < valid_tokens <= layout.block_size:
        raise ValueError(f"{valid_tokens} valid tokens in a block of {layout.block_size}")
    parts = [part[:, :, :, :valid_tokens] for part in _parts(layout, block)]
    return _digest([np.ascontiguousarray(part) for part in parts], seed=valid_tokens)


def _digest(parts: list[npt.NDArray[np.uint8]], seed: int = 0) -> int:
    if len(parts) == 1:
        digest: int = xxhash.xxh3_64_intdigest(parts[0].data, seed=seed)
        return digest
    state = xxhash.xxh3_64(seed=seed)
    for part in parts:
        state.update(part.data)
    return int(state.intdigest())


def _parts(layout: KvLayout, block: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
    """Return the values, and the scales if there are some, as rows of bytes of each token."""
    if block.nbytes != layout.block_bytes:
        raise ValueError(f"a block has {layout.block_bytes} bytes, not {block.nbytes}")
    shape = layout.block_shape[:4]
    values = block[: layout.data_bytes].reshape(*shape, layout.head_dim * layout.itemsize)
    if not layout.has_scales:
        return [values]
    return [values, block[layout.data_bytes :].reshape(*shape, SCALE_BYTES)]
