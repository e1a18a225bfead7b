"""What a decoder is made of: the weights of a layer, its geometry, the inputs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.ops.linear import PackedLinear


class StepInputs(Protocol):
    """The index tensors of one step; see `paged_attention` for their meaning."""

    @property
    def positions(self) -> Tensor:
        """`[num_tokens]` int64."""
        ...

    @property
    def slot_mapping(self) -> Tensor:
        """`[num_tokens]` int64."""
        ...

    @property
    def block_tables(self) -> Tensor:
        """`[num_seqs, max_blocks]` int32."""
        ...

    @property
    def query_starts(self) -> Tensor:
        """`[num_seqs + 1]` int32."""
        ...

    @property
    def context_lens(self) -> Tensor:
        """`[num_seqs]` int32."""
        ...

    @property
    def logit_rows(self) -> Tensor:
        """`[num_logits]` int64, at most one a token."""
        ...

    @property
    def more_pools(self) -> Sequence[Tensor | None]:
        """Pools 1, 2, .. that block tables may name; usually none."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Weights of one layer."""

    input_norm: Tensor  # [hidden]
    qkv: PackedLinear  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim
    attn_out: PackedLinear  # num_heads * head_dim -> hidden
    mlp_norm: Tensor  # [hidden]
    gate_up: PackedLinear  # hidden -> 2 * intermediate
    down: PackedLinear  # intermediate -> hidden
    q_norm: Tensor | None = None  # [head_dim], before rotation
    k_norm: Tensor | None = None  # [head_dim]; both or neither


@dataclass(frozen=True, slots=True)
class DecoderGeometry:
    """Numbers that the weights' shapes do not say."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float  # on attention scores
