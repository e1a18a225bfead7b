"""Attention over block tables that name blocks of several pools (the attach plane)."""

from __future__ import annotations

import pytest
import torch

from kernels.ops import attention as ops
from kernels.reference import attention as reference
from services.kv import block_table
from tests.support.paged_batch import make_batch, make_queries, spread_over_pools

SEQS = [(1, 7), (1, 33), (5, 64), (20, 51), (1, 100)]


@pytest.mark.parametrize("num_pools", [2, 4, ops.MAX_POOLS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_same_bits_wherever_the_blocks_lie(
    num_pools: int, dtype: torch.dtype, head_dim: int
) -> None:
    batch = make_batch(SEQS, dtype=dtype, head_dim=head_dim)
    moved, more_pools = spread_over_pools(batch, num_pools)
    assert (moved.block_tables >= 1 << ops.POOL_SHIFT).any()
    q = make_queries(batch.num_tokens, 4, head_dim)
    rest = (batch.query_starts, batch.context_lens, head_dim**-0.5)

    here = ops.paged_attention(q, batch.kv_pool, 1, batch.block_tables, *rest)
    there = ops.paged_attention(q, moved.kv_pool, 1, moved.block_tables, *rest, more_pools)

    assert torch.equal(here, there)


def test_reference_reads_every_pool() -> None:
    batch = make_batch(SEQS)
    moved, more_pools = spread_over_pools(batch, 5)
    q = make_queries(batch.num_tokens, 4, 64)
    rest = (batch.query_starts, batch.context_lens, 0.125)

    here = reference.paged_attention(q, batch.kv_pool, 0, batch.block_tables, *rest)
    there = reference.paged_attention(q, moved.kv_pool, 0, moved.block_tables, *rest, more_pools)

    assert torch.equal(here, there)


@pytest.mark.parametrize("entry", [5 << 24, 1 << 24 | 9_999, 2 << 24, 3 << 24 | 0])
def test_blocks_of_no_pool_are_refused(entry: int) -> None:
    batch = make_batch([(1, 40)])
    tables = batch.block_tables.clone()
    tables[0, 1] = entry
    q = make_queries(1, 4, 64)
    rest = (batch.query_starts, batch.context_lens, 0.125)
    more_pools = (batch.kv_pool.clone(), None)
    with pytest.raises(ValueError, match="block_tables"):
        ops.paged_attention(q, batch.kv_pool, 0, tables, *rest, more_pools)


def test_pools_of_another_geometry_or_too_many_are_refused() -> None:
    batch = make_batch([(1, 40)])
    q = make_queries(1, 4, 64)
    args = (0, batch.block_tables, batch.query_starts, batch.context_lens, 0.125)
    other = make_batch([(1, 40)], num_layers=3).kv_pool
    with pytest.raises(ValueError, match="beside one of"):
        ops.paged_attention(q, batch.kv_pool, *args, (other,))
    with pytest.raises(ValueError, match="pools"):
        ops.paged_attention(q, batch.kv_pool, *args, (None,) * ops.MAX_POOLS)


def test_scheduler_and_kernels_agree_on_entries() -> None:
    assert (block_table.POOL_SHIFT, block_table.MAX_POOLS) == (ops.POOL_SHIFT, ops.MAX_POOLS)
