"""Split-KV paged decode: few query rows against long contexts, cut into splits and merged.

Formula: split c of a row covers keys [c SPLIT_KEYS, (c + 1) SPLIT_KEYS) it can see and leaves

    m_c = max_j s_j,   l_c = sum_j exp2(s_j - m_c),   o_c = sum_j exp2(s_j - m_c) v_j

with s_j = scale log2(e) q . k_j; the merge, with w_c = exp2(m_c - max m), gives

    out = sum_c w_c o_c / sum_c w_c l_c.

Bytes moved per row and KV head: 2 * context * head_dim * itemsize of K and V once for the whole
group of query heads, plus (head_dim + 2) * 4 written and read per head and split for the merge:
under 1 % at 512 keys a split for a group of 4. It is bound by memory bandwidth; splits exist so
that a small batch fills the device.

The split size is a constant, so a row's result does not depend on the batch. Compiled and run in
the interpreter; not yet run on a GPU.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_impl.pools import block_offsets, pool_table
from kernels.triton_impl.tuning import FP_FUSION, SPLIT_KEYS, compute_dtype, decode_tiling


@triton.jit
def row_visible_keys(query_starts, context_lens, num_seqs, row):
    """Return (sequence, visible keys) of a query row."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) <= row:
            low = middle
        else:
            high = middle
    end = tl.load(query_starts + low + 1)
    return low, tl.load(context_lens + low) - (end - row) + 1


@triton.jit
def paged_decode_kernel(
    q,  # [num_tokens, num_heads, head_dim]
    kv_pool,  # one layer's K half of [num_blocks, layers, 2, num_kv_heads, block_size, head_dim]
    pool_offsets,  # [MAX_POOLS] int64, elements from kv_pool to the same place of each pool
    block_tables,  # [num_seqs, max_blocks] int32
    query_starts,  # [num_seqs + 1] int32
    context_lens,  # [num_seqs] int32
    partial_out,  # [num_tokens, num_heads, num_splits, head_dim] float32
    partial_stats,  # [num_tokens, num_heads, num_splits, 2 (max, sum)] float32
    num_seqs,
    num_splits,
    scale_log2,
    q_token_stride,
    q_head_stride,
    table_stride,
    kv_block_stride,
    kv_half_stride,
    kv_head_stride,
    kv_slot_stride,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    COMPUTE: tl.constexpr,
    MANY_POOLS: tl.constexpr,
):
    """One program: one query row, one KV head, one split of its keys."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq, visible = row_visible_keys(query_starts, context_lens, num_seqs, row)
    first_key = split * SPLIT
    if first_key >= visible:
        return
    end = tl.minimum(first_key + SPLIT, visible)

    lanes = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + lanes
    dims = tl.arange(0, BLOCK_D)
    head_ok = lanes < GROUP
    dim_ok = dims < HEAD_DIM
    q_rows = row.to(tl.int64) * q_token_stride + heads * q_head_stride
    q_tile = tl.load(
        q + q_rows[:, None] + dims[None, :], mask=head_ok[:, None] & dim_ok[None, :], other=0.0
    ).to(COMPUTE)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first_key, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        key_ok = keys < end
        block_ids = tl.load(
            block_tables + seq * table_stride + keys // BLOCK_SIZE, mask=key_ok, other=0
        )
        slots = (
            block_offsets(block_ids, pool_offsets, kv_block_stride, key_ok, MANY_POOLS)
            + kv_head * kv_head_stride
            + (keys % BLOCK_SIZE) * kv_slot_stride
        )
        k_tile = tl.load(
            kv_pool + slots[None, :] + dims[:, None],
            mask=key_ok[None, :] & dim_ok[:, None],
            other=0.0,
        ).to(COMPUTE)
        scores = tl.dot(q_tile, k_tile, input_precision="ieee") * scale_log2
        scores = tl.where(key_ok[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        v_tile = tl.load(
            kv_pool + kv_half_stride + slots[:, None] + dims[None, :],
            mask=key_ok[:, None] & dim_ok[None, :],
            other=0.0,
        ).to(COMPUTE)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(COMPUTE), v_tile, acc, input_precision="ieee")
        best = new_best

    num_heads = tl.num_programs(1) * GROUP
    cells = (row.to(tl.int64) * num_heads + heads) * num_splits + split
    tl.store(
        partial_out + cells[:, None] * HEAD_DIM + dims[None, :],
        acc,
        mask=head_ok[:, None] & dim_ok[None, :],
    )
    tl.store(partial_stats + cells * 2, best, mask=head_ok)
    tl.store(partial_stats + cells * 2 + 1, total, mask=head_ok)


@triton.jit
def merge_splits_kernel(
    partial_out,  # [num_tokens, num_heads, num_splits, head_dim] float32
    partial_stats,  # [num_tokens, num_heads, num_splits, 2] float32
    query_starts,
    context_lens,
    out,  # [num_tokens, num_heads, head_dim]
    num_seqs,
    num_splits,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program: one row and head; splits in ascending order, only those that were written."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    _, visible = row_visible_keys(query_starts, context_lens, num_seqs, row)
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < HEAD_DIM
    cell = (row.to(tl.int64) * tl.num_programs(1) + head) * num_splits

    best = tl.load(partial_stats + cell * 2)
    total = tl.load(partial_stats + cell * 2 + 1)
    acc = tl.load(partial_out + cell * HEAD_DIM + dims, mask=dim_ok, other=0.0)
    for split in range(1, tl.cdiv(visible, SPLIT)):
        this = cell + split
        split_best = tl.load(partial_stats + this * 2)
        new_best = tl.maximum(best, split_best)
        old_factor = tl.exp2(best - new_best)
        new_factor = tl.exp2(split_best - new_best)
        total = total * old_factor + tl.load(partial_stats + this * 2 + 1) * new_factor
        part = tl.load(partial_out + this * HEAD_DIM + dims, mask=dim_ok, other=0.0)
        acc = acc * old_factor + part * new_factor
        best = new_best

    where = row.to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(out + where + dims, (acc / total).to(out.dtype.element_ty), mask=dim_ok)


def paged_decode(
    q: Tensor,
    kv_pool: Tensor,
    layer: int,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    more_pools: Sequence[Tensor | None] = (),
) -> Tensor:
    """Launch splits, then the merge; takes any batch, pays off when most sequences have one row."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_pool.shape[3], kv_pool.shape[4]
    group, num_seqs = num_heads // num_kv_heads, context_lens.shape[0]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    tiling = decode_tiling(group, head_dim, q.element_size())
    pool = kv_pool[:, layer]
    num_splits = triton.cdiv(block_tables.shape[1] * block_size, SPLIT_KEYS)
    cells = (num_tokens, num_heads, num_splits)
    partial_out = torch.empty(*cells, head_dim, dtype=torch.float32, device=q.device)
    partial_stats = torch.empty(*cells, 2, dtype=torch.float32, device=q.device)
    paged_decode_kernel[(num_tokens, num_kv_heads, num_splits)](
        q,
        pool,
        pool_table(kv_pool, more_pools) if more_pools else query_starts,
        block_tables,
        query_starts,
        context_lens,
        partial_out,
        partial_stats,
        num_seqs,
        num_splits,
        scale * 1.4426950408889634,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        pool.stride(3),
        BLOCK_SIZE=block_size,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=tiling.block_d,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        SPLIT=SPLIT_KEYS,
        COMPUTE=compute_dtype(q.dtype, kv_pool.dtype),
        MANY_POOLS=bool(more_pools),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=FP_FUSION,
    )
    merge_splits_kernel[(num_tokens, num_heads)](
        partial_out,
        partial_stats,
        query_starts,
        context_lens,
        out,
        num_seqs,
        num_splits,
        out.stride(0),
        out.stride(1),
        HEAD_DIM=head_dim,
        BLOCK_D=tiling.block_d,
        SPLIT=SPLIT_KEYS,
        num_warps=1,
        enable_fp_fusion=FP_FUSION,
    )
    return out
