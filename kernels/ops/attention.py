"""Attention over a paged KV pool, and the write that feeds it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import dispatch
from kernels.reference import attention as reference

_KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# An entry of a block table is `pool << POOL_SHIFT | block`; pool 0 is the one that is written.
POOL_SHIFT = 24
MAX_POOLS = 8


def paged_attention(
    q: Tensor,
    kv_pool: Tensor,
    layer: int,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    more_pools: Sequence[Tensor | None] = (),
) -> Tensor:
    """Attend causally over each sequence's own blocks: prefill with prefix and decode in one op.

    Token t of sequence i (row `query_starts[i] + t`) stands at position
    `context_lens[i] - num_queries[i] + t` and sees every position up to its own:
    `out = softmax(scale * q @ K^T) @ V`. Keys and values of the step must already be in the pool.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, last axis contiguous, float32/bfloat16/float16.
        kv_pool: `[num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]`,
            contiguous within a block; `num_heads` is a multiple of `num_kv_heads`.
        layer: which layer of the pool.
        block_tables: `[num_seqs, max_blocks]` int32 entries in order, -1 = unused: a block id, or
            `p << POOL_SHIFT | block id` for block of `more_pools[p - 1]`.
        query_starts: `[num_seqs + 1]` int32, first row of each sequence and the total.
        context_lens: `[num_seqs]` int32, tokens of the sequence including this step's.
        scale: factor on the scores, usually `head_dim ** -0.5`.
        more_pools: up to MAX_POOLS - 1 pools of the same geometry, None where there is none; they
            are read only.

    Returns:
        `[num_tokens, num_heads, head_dim]` of q's dtype, contiguous. On the CPU library each row
        is bitwise independent of the rest of the batch and of how the prompt was chunked.
    """
    _check_pool(kv_pool, layer)
    _check_query(q, kv_pool)
    _check_sequences(q, block_tables, query_starts, context_lens)
    check_more_pools(kv_pool, more_pools)
    args = (q, kv_pool, layer, block_tables, query_starts, context_lens, scale, more_pools)
    cpu = dispatch.cpu_kernels(q)
    if cpu is not None and cpu.can_attend(q, kv_pool):
        return cpu.paged_attention(*args)
    triton = dispatch.triton_kernels(q)
    if triton is not None:
        return triton.paged_attention(*args)
    return reference.paged_attention(*args)


def write_kv(k: Tensor, v: Tensor, kv_pool: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """Store `k` and `v` at `pool[slot // block_size, layer, 0 or 1, :, slot % block_size]`.

    Args:
        k, v: `[num_tokens, num_kv_heads, head_dim]`, last axis contiguous; cast to the pool dtype.
        kv_pool: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, written to.
        layer: which layer of the pool.
        slot_mapping: `[num_tokens]` int64, `block_id * block_size + offset`, all distinct.
    """
    _check_pool(kv_pool, layer)
    expected = (slot_mapping.shape[0], kv_pool.shape[3], kv_pool.shape[5])
    if k.shape != expected or v.shape != expected:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must be {expected}")
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
        raise ValueError(f"slot_mapping must be 1-d int64, not {slot_mapping.dtype}")
    cpu = dispatch.cpu_kernels(k)
    if cpu is not None and cpu.can_write(k, v, kv_pool):
        cpu.write_kv(k, v, kv_pool, layer, slot_mapping)
    else:
        reference.write_kv(k, v, kv_pool, layer, slot_mapping)


def _check_pool(kv_pool: Tensor, layer: int) -> None:
    if kv_pool.dim() != 6 or kv_pool.shape[2] != 2:
        raise ValueError(
            "kv_pool must be [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], "
            f"not {tuple(kv_pool.shape)}"
        )
    if kv_pool.dtype not in _KV_DTYPES:
        raise ValueError(f"kv_pool dtype {kv_pool.dtype} is not one of {_KV_DTYPES}")
    if not 0 <= layer < kv_pool.shape[1]:
        raise ValueError(f"layer {layer} is outside the pool's {kv_pool.shape[1]} layers")


def check_more_pools(kv_pool: Tensor, more_pools: Sequence[Tensor | None]) -> None:
    """Raise ValueError unless block tables can name blocks of these pools beside ours."""
    if len(more_pools) >= MAX_POOLS:
        raise ValueError(f"{1 + len(more_pools)} pools, {MAX_POOLS} can be named")
    for pool in more_pools:
        if pool is None:
            continue
        same = (pool.shape[1:], pool.stride()) == (kv_pool.shape[1:], kv_pool.stride())
        if not same or (pool.dtype, pool.device) != (kv_pool.dtype, kv_pool.device):
            raise ValueError(f"a pool {tuple(pool.shape)} beside one of {tuple(kv_pool.shape)}")


def _check_query(q: Tensor, kv_pool: Tensor) -> None:
    if q.dim() != 3 or q.shape[2] != kv_pool.shape[5]:
        raise ValueError(f"q {tuple(q.shape)} must be [num_tokens, num_heads, {kv_pool.shape[5]}]")
    if q.shape[1] % kv_pool.shape[3]:
        raise ValueError(f"{q.shape[1]} heads are not a multiple of {kv_pool.shape[3]} KV heads")
    if q.device != kv_pool.device:
        raise ValueError(f"q is on {q.device} and kv_pool on {kv_pool.device}")


def _check_sequences(
    q: Tensor, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor
) -> None:
    num_seqs = context_lens.shape[0]
    if block_tables.dim() != 2 or block_tables.shape[0] != num_seqs:
        raise ValueError(
            f"block_tables {tuple(block_tables.shape)} must be [{num_seqs}, max_blocks]"
        )
    if query_starts.shape != (num_seqs + 1,):
        raise ValueError(f"query_starts {tuple(query_starts.shape)} must be [{num_seqs + 1}]")
    for name, tensor in (
        ("block_tables", block_tables),
        ("query_starts", query_starts),
        ("context_lens", context_lens),
    ):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, not {tensor.dtype}")
    if num_seqs == 0 and q.shape[0]:
        raise ValueError(f"{q.shape[0]} query rows belong to no sequence")
