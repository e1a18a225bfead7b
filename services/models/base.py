"""The one interface between the step runner and a model family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of one step, flattened over sequences.

    A sequence contributes `query_starts[i+1] - query_starts[i]` tokens, the last ones of its
    `context_lens[i]` tokens. Every token's KV is written to the pool before it is attended to.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64: block_id * block_size + offset
    block_tables: Tensor  # [num_seqs, max_blocks] int32, -1 = unused
    query_starts: Tensor  # [num_seqs + 1] int32
    context_lens: Tensor  # [num_seqs] int32, including this step's tokens
    logit_rows: Tensor  # [num_logits] int64: rows of which logits are wanted
    # Pools 1, 2, .. that block tables may name besides ours; read only, of the same geometry.
    more_pools: tuple[Tensor | None, ...] = ()


class Model(Protocol):
    """A decoder-only model over a paged KV pool."""

    @property
    def config(self) -> ModelConfig:
        """Geometry of the model."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype; the KV pool has the same unless configured otherwise."""
        ...

    def forward(self, batch: StepBatch, kv_pool: Tensor) -> Tensor:
        """Run one step.

        Args:
            batch: the step's tokens.
            kv_pool: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`,
                written in place.

        Returns:
            Logits `[num_logits, vocab_size]` float32.
        """
        ...
