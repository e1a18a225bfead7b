"""Digests of block content: xxh3_64 per (block, KV head, layer quarter), and of a partial tail.

A digest finds races, reuse and corruption; that content belongs to tokens is what the block
hash says. Fine enough that any head or layer range that may legally move is verified alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from services.kv.layout import DIGEST_LAYER_GROUPS, KvLayout


def layer_bounds(num_layers: int) -> tuple[tuple[int, int], ...]:
    """Layer ranges [lo, hi) of the digests of one head, in order."""
    groups = min(DIGEST_LAYER_GROUPS, num_layers)
    return tuple((g * num_layers // groups, (g + 1) * num_layers // groups) for g in range(groups))


def block_digests(layout: KvLayout, block: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Digest one block.

    Args:
        block: `[block_bytes]`, one row of the pool.

    Returns:
        `[digests_per_block]`: for KV head h and layer group g at `h * num_groups + g`, so the
        digests of a head range are one slice.
    """
    shape = _row_shape(layout, block)
    # One copy with the head outermost makes every (head, layer range) contiguous.
    heads = np.ascontiguousarray(block.reshape(shape).transpose(2, 0, 1, 3, 4))
    bounds = layer_bounds(layout.num_layers)
    digests = [
        xxhash.xxh3_64_intdigest(heads[head, lo:hi].data)
        for head in range(layout.num_kv_heads)
        for lo, hi in bounds
    ]
    return np.array(digests, dtype=np.uint64)


def tail_digest(layout: KvLayout, block: npt.NDArray[np.uint8], valid_tokens: int) -> int:
    """Digest the first `valid_tokens` rows of a partial block; what follows them is ignored."""
    if not 0 < valid_tokens <= layout.block_size:
        raise ValueError(f"{valid_tokens} valid tokens in a block of {layout.block_size}")
    rows = block.reshape(_row_shape(layout, block))[:, :, :, :valid_tokens]
    digest: int = xxhash.xxh3_64_intdigest(np.ascontiguousarray(rows).data, seed=valid_tokens)
    return digest


def _row_shape(layout: KvLayout, block: npt.NDArray[np.uint8]) -> tuple[int, int, int, int, int]:
    if block.nbytes != layout.block_bytes:
        raise ValueError(f"a block has {layout.block_bytes} bytes, not {block.nbytes}")
    row_bytes = layout.head_dim * layout.itemsize
    return layout.num_layers, 2, layout.num_kv_heads, layout.block_size, row_bytes
