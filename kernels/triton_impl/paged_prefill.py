"""Paged prefill with prefix: every query of a step against its sequence's whole context.

Formula, for a query at position p of a sequence, keys and values read through its block table:

    out = sum_j exp2(s_j - m) v_j / sum_j exp2(s_j - m),   s_j = scale log2(e) q . k_j,   j <= p

Bytes moved per tile of BLOCK_M rows (rows are the `group` query heads of neighbouring tokens that
share a KV head): the tile's q and out once, and 2 * context * head_dim * itemsize of K and V. So a
byte of KV serves BLOCK_M rows and the kernel is bound by matrix arithmetic, not by memory.

Compiled and run in the interpreter; not yet run on a GPU.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_impl.pools import block_offsets, pool_table
from kernels.triton_impl.tuning import FP_FUSION, compute_dtype, prefill_tiling


@triton.jit
def find_sequence(query_starts, num_seqs, tile, TILE_TOKENS: tl.constexpr):
    """Return the sequence of a tile when sequence s owns tiles from starts[s] // TILE + s on."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(query_starts + middle) // TILE_TOKENS + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def paged_prefill_kernel(
    q,  # [num_tokens, num_heads, head_dim]
    kv_pool,  # one layer's K half of [num_blocks, layers, 2, num_kv_heads, block_size, head_dim]
    pool_offsets,  # [MAX_POOLS] int64, elements from kv_pool to the same place of each pool
    block_tables,  # [num_seqs, max_blocks] int32
    query_starts,  # [num_seqs + 1] int32
    context_lens,  # [num_seqs] int32
    out,  # [num_tokens, num_heads, head_dim]
    num_seqs,
    scale_log2,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
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
    COMPUTE: tl.constexpr,
    MANY_POOLS: tl.constexpr,
):
    """One program: up to BLOCK_M // GROUP tokens of one sequence, one KV head."""
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_sequence(query_starts, num_seqs, tile, TILE_TOKENS)
    first_query = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - first_query
    first_token = (tile - (first_query // TILE_TOKENS + seq)) * TILE_TOKENS
    if first_token >= num_queries:
        return

    rows = tl.arange(0, BLOCK_M)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    row_ok = (rows < TILE_TOKENS * GROUP) & (tokens < num_queries)
    dim_ok = dims < HEAD_DIM
    q_rows = (first_query + tokens).to(tl.int64) * q_token_stride + heads * q_head_stride
    q_tile = tl.load(
        q + q_rows[:, None] + dims[None, :], mask=row_ok[:, None] & dim_ok[None, :], other=0.0
    ).to(COMPUTE)

    positions = tl.load(context_lens + seq) - num_queries + tokens
    last_token = tl.minimum(first_token + TILE_TOKENS, num_queries) - 1
    end = tl.load(context_lens + seq) - num_queries + last_token + 1

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, end, BLOCK_N):
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
        scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        # Rows that only pad the tile see no key: -inf - -inf must not make a NaN.
        new_best = tl.maximum(best, tl.max(scores, 1))
        safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - safe_best[:, None])
        shrink = tl.exp2(best - safe_best)
        total = total * shrink + tl.sum(weights, 1)
        v_tile = tl.load(
            kv_pool + kv_half_stride + slots[:, None] + dims[None, :],
            mask=key_ok[:, None] & dim_ok[None, :],
            other=0.0,
        ).to(COMPUTE)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(COMPUTE), v_tile, acc, input_precision="ieee")
        best = new_best

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_rows = (first_query + tokens).to(tl.int64) * out_token_stride + heads * out_head_stride
    tl.store(
        out + out_rows[:, None] + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=row_ok[:, None] & dim_ok[None, :],
    )


def paged_prefill(
    q: Tensor,
    kv_pool: Tensor,
    layer: int,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    more_pools: Sequence[Tensor | None] = (),
) -> Tensor:
    """Launch over (tiles, KV heads); takes any batch, decode rows included, without a host sync."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_pool.shape[3], kv_pool.shape[4]
    group, num_seqs = num_heads // num_kv_heads, context_lens.shape[0]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    tiling = prefill_tiling(group, head_dim, q.element_size())
    pool = kv_pool[:, layer]
    # Sequence s starts at tile starts[s] // tile_tokens + s: room for one ragged tile each.
    num_tiles = num_tokens // (tiling.block_m // group) + num_seqs
    paged_prefill_kernel[(num_tiles, num_kv_heads)](
        q,
        pool,
        pool_table(kv_pool, more_pools) if more_pools else query_starts,
        block_tables,
        query_starts,
        context_lens,
        out,
        num_seqs,
        scale * 1.4426950408889634,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
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
        COMPUTE=compute_dtype(q.dtype, kv_pool.dtype),
        MANY_POOLS=bool(more_pools),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=FP_FUSION,
    )
    return out
