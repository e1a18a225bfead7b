"""Random paged batches for kernel tests: a pool, block tables and the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The arguments of `paged_attention` but q and scale; context is already in the pool."""

    kv_pool: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return int(self.query_starts[-1])


def make_batch(
    seqs: list[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    num_layers: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedBatch:
    """Build a batch of `(num_queries, context_len)` sequences over shuffled blocks.

    Slots no sequence uses hold NaN, so a kernel that lets them in is found out.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // block_size) for _, context in seqs]
    num_blocks = sum(needed) + 3
    shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
    kv_pool = torch.full(shape, float("nan"))
    tables = torch.full((len(seqs), max(needed, default=0) + 1), -1, dtype=torch.int32)
    order = torch.randperm(num_blocks, generator=generator).tolist()
    for seq, (_, context) in enumerate(seqs):
        for index in range(needed[seq]):
            block_id = order.pop()
            tables[seq, index] = block_id
            filled = min(block_size, context - index * block_size)
            kv_pool[block_id, :, :, :, :filled] = torch.randn(
                num_layers, 2, num_kv_heads, filled, head_dim, generator=generator
            )
    starts = torch.tensor([0, *(queries for queries, _ in seqs)], dtype=torch.int32)
    return PagedBatch(
        kv_pool.to(dtype),
        tables,
        starts.cumsum(0).to(torch.int32),
        torch.tensor([context for _, context in seqs], dtype=torch.int32),
    )


def make_queries(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Build `[num_tokens, num_heads, head_dim]` queries from a fixed seed."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)
