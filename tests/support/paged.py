"""Drives a model over a paged pool with shuffled blocks, as the engine does, for model tests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.kv.layout import BLOCK_TOKENS
from services.models.base import Model, StepBatch


class PagedDriver:
    """Sequences in one pool; each step appends tokens to some of them and returns logits."""

    def __init__(
        self, model: Model, num_blocks: int = 64, seed: int = 0, kv_dtype: torch.dtype | None = None
    ) -> None:
        config = model.config
        self.model = model
        self.pool = torch.full(
            (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim),
            float("nan"),  # whatever was not written must not be read
            dtype=kv_dtype or model.dtype,
        )
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(self, work: Mapping[str, Sequence[int]], rows: Sequence[int] | None = None) -> Tensor:
        """Run one step; logits of every row, or of `rows` of the flattened batch."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for seq, new_tokens in work.items():
            table = self._tables.setdefault(seq, [])
            length = self._lengths.get(seq, 0)
            for position in range(length, length + len(new_tokens)):
                if position % BLOCK_TOKENS == 0:
                    table.append(self._free.pop())
                block_id = table[position // BLOCK_TOKENS]
                slots.append(block_id * BLOCK_TOKENS + position % BLOCK_TOKENS)
                positions.append(position)
            self._lengths[seq] = length + len(new_tokens)
            tokens.extend(new_tokens)
            starts.append(len(tokens))
        width = max(len(self._tables[seq]) for seq in work) + 1
        tables = [self._tables[s] + [-1] * (width - len(self._tables[s])) for s in work]
        batch = StepBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([self._lengths[seq] for seq in work], dtype=torch.int32),
            logit_rows=torch.tensor(
                list(range(len(tokens))) if rows is None else list(rows), dtype=torch.int64
            ),
        )
        return self.model.forward(batch, self.pool)
