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


def spread_over_pools(
    batch: PagedBatch, num_pools: int, seed: int = 1
) -> tuple[PagedBatch, tuple[Tensor | None, ...]]:
    """Move blocks of a batch to further pools, leaving NaN behind; some pools are left out."""
    generator = torch.Generator().manual_seed(seed)
    own, tables = batch.kv_pool.clone(), batch.block_tables.clone()
    pools: list[Tensor | None] = []
    for number in range(1, num_pools):
        size = number + len(own) // 2  # pools differ in size
        pools.append(None if number == 2 else torch.full_like(own[:1], torch.nan).repeat(
            size, 1, 1, 1, 1, 1
        ))  # fmt: skip
    taken = [0] * num_pools
    for row in range(tables.shape[0]):
        for column in range(tables.shape[1]):
            entry = int(tables[row, column])
            number = int(torch.randint(num_pools, (1,), generator=generator))
            pool = pools[number - 1] if number else None
            if entry < 0 or pool is None or taken[number] == len(pool):
                continue
            to = taken[number] = taken[number] + 1
            pool[-to] = own[entry]
            own[entry] = torch.nan
            tables[row, column] = number << 24 | len(pool) - to
    moved = PagedBatch(own, tables, batch.query_starts, batch.context_lens)
    return moved, tuple(pools)


def make_queries(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Build `[num_tokens, num_heads, head_dim]` queries from a fixed seed."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)
