"""Paged attention and KV writes in plain torch: the truth every kernel is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_POOL_SPAN = 1 << 24  # entries of block tables per pool


def paged_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    kv_pool: Tensor,  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    layer: int,
    block_tables: Tensor,  # [num_seqs, max_blocks] int32
    query_starts: Tensor,  # [num_seqs + 1] int32
    context_lens: Tensor,  # [num_seqs] int32
    scale: float,
    more_pools: Sequence[Tensor | None] = (),
) -> Tensor:
    """Gather each sequence's context and attend to it causally, in float32."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts, lens = query_starts.tolist(), context_lens.tolist()
    for seq, context_len in enumerate(lens):
        first, last = starts[seq], starts[seq + 1]
        if first == last:
            continue
        keys, values = gather_context(kv_pool, layer, block_tables[seq], context_len, more_pools)
        out[first:last] = causal_attention(q[first:last], keys, values, scale).to(q.dtype)
    return out


def gather_context(
    kv_pool: Tensor,
    layer: int,
    block_table: Tensor,
    context_len: int,
    more_pools: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Tensor]:
    """Copy out one sequence: keys, values, each `[context_len, num_kv_heads, head_dim]`."""
    block_size = kv_pool.shape[4]
    block_ids = block_table[: -(-context_len // block_size)].long()
    # blocks: `[num_ctx_blocks, 2, num_kv_heads, block_size, head_dim]`
    blocks = kv_pool[block_ids % _POOL_SPAN, layer] if more_pools else kv_pool[block_ids, layer]
    for number, pool in enumerate(more_pools, start=1):
        if pool is not None:
            theirs = block_ids // _POOL_SPAN == number
            blocks[theirs] = pool[block_ids[theirs] % _POOL_SPAN, layer]
    tokens = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context_len]
    return tokens[0], tokens[1]


def causal_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend with the last `len(q)` positions of the context; groups of heads share a KV head."""
    num_queries, num_heads, _ = q.shape
    context_len, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    keys = keys.float().repeat_interleave(group, dim=1)
    values = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    query_positions = torch.arange(context_len - num_queries, context_len, device=q.device)
    key_positions = torch.arange(context_len, device=q.device)
    scores.masked_fill_(key_positions[None, :] > query_positions[:, None], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)


def write_kv(k: Tensor, v: Tensor, kv_pool: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """Scatter new keys and values `[num_tokens, num_kv_heads, head_dim]` into their slots."""
    block_size = kv_pool.shape[4]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    kv_pool[block_ids, layer, 0, :, offsets] = k.to(kv_pool.dtype)
    kv_pool[block_ids, layer, 1, :, offsets] = v.to(kv_pool.dtype)
