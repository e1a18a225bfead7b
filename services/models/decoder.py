"""The decoder shared by all families: pre-norm attention and gated MLP over a paged KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops.activation import silu_mul
from kernels.ops.attention import paged_attention, write_kv
from kernels.ops.linear import PackedLinear, linear, pack_linear
from kernels.ops.norm import add_rms_norm, rms_norm
from kernels.ops.rope import rope
from services.models.base import StepBatch
from services.models.config import ModelConfig
from services.models.rope import rope_table
from services.models.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class QkNorm:
    """Norms over each head of q and k, before rotation."""

    q: Tensor  # [head_dim]
    k: Tensor  # [head_dim]


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Weights of one layer; projections that read the same input are fused."""

    input_norm: Tensor  # [hidden]
    qkv: PackedLinear  # hidden -> q_size + 2 * kv_size
    qk_norm: QkNorm | None
    attn_out: PackedLinear  # q_size -> hidden
    mlp_norm: Tensor  # [hidden]
    gate_up: PackedLinear  # hidden -> 2 * intermediate
    down: PackedLinear  # intermediate -> hidden


class Decoder:
    """A decoder-only transformer; see services.models.base.Model.

    Every step between the ops is row-wise (additions, row selection), so a token's numbers depend
    on its own sequence only, never on what else is in the batch, as far as the ops promise that.
    """

    def __init__(self, weights: Weights, layers: Sequence[DecoderLayer]) -> None:
        config = weights.config
        self._config = config
        self._device = weights.device
        self._dtype = weights.dtype
        self._embedding = weights.get("model.embed_tokens.weight")  # [vocab_size, hidden]
        self._layers = tuple(layers)
        self._final_norm = weights.get("model.norm.weight")  # [hidden]
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self._lm_head = pack_linear(weights.get(f"{head}.weight"))
        self._rope_table = rope_table(config, weights.device)
        self._scale = config.head_dim**-0.5
        # Norm that follows each layer's MLP: the next layer's, or the final one.
        self._next_norms = (*[layer.input_norm for layer in self._layers[1:]], self._final_norm)

    @property
    def config(self) -> ModelConfig:
        """Geometry of the model."""
        return self._config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self._dtype

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv_pool: Tensor) -> Tensor:
        """Run one step; see services.models.base.Model.forward."""
        eps = self._config.rms_norm_eps
        residual = self._embedding.index_select(0, batch.token_ids)  # [num_tokens, hidden]
        normed = rms_norm(residual, self._layers[0].input_norm, eps)
        last = len(self._layers) - 1
        for i, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            q, k, v = self._project(layer, normed, batch.positions)
            write_kv(k, v, kv_pool, i, batch.slot_mapping)
            if i == last:
                # Beyond the last layer's KV only rows whose logits are wanted matter.
                if batch.logit_rows.numel() == 0:
                    break
                attended = self._attend(q, kv_pool, i, batch).index_select(0, batch.logit_rows)
                residual = residual.index_select(0, batch.logit_rows)
            else:
                attended = self._attend(q, kv_pool, i, batch)
            attn = linear(attended, layer.attn_out)
            normed, residual = add_rms_norm(attn, residual, layer.mlp_norm, eps)
            mlp = linear(silu_mul(linear(normed, layer.gate_up)), layer.down)
            normed, residual = add_rms_norm(mlp, residual, next_norm, eps)
        else:
            return linear(normed, self._lm_head).float()  # [num_logits, vocab_size]
        return torch.empty((0, self._config.vocab_size), device=self._device)

    def _project(
        self, layer: DecoderLayer, normed: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q and k, and v, each `[num_tokens, heads, head_dim]`."""
        config = self._config
        heads = linear(normed, layer.qkv).view(normed.shape[0], -1, config.head_dim)
        first_v = config.num_heads + config.num_kv_heads
        q, k, v = (
            heads[:, : config.num_heads],
            heads[:, config.num_heads : first_v],
            heads[:, first_v:],
        )
        if layer.qk_norm is not None:
            q = rms_norm(q, layer.qk_norm.q, config.rms_norm_eps)
            k = rms_norm(k, layer.qk_norm.k, config.rms_norm_eps)
        q, k = rope(q, k, positions, self._rope_table)
        return q, k, v

    def _attend(self, q: Tensor, kv_pool: Tensor, layer_idx: int, batch: StepBatch) -> Tensor:
        """Return the attention output, `[num_tokens, q_size]`."""
        attended = paged_attention(
            q,
            kv_pool,
            layer_idx,
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            self._scale,
        )
        return attended.flatten(1)


def read_layer(weights: Weights, layer_idx: int, *, qk_norm: QkNorm | None = None) -> DecoderLayer:
    """Read and pack one layer; biases are read where the configuration has them."""
    config = weights.config
    prefix = f"model.layers.{layer_idx}."
    attn = f"{prefix}self_attn."
    qkv_bias = (
        weights.stack(*(f"{attn}{part}_proj.bias" for part in "qkv"))
        if config.attention_bias
        else None
    )
    out_bias = weights.get(f"{attn}o_proj.bias") if config.output_bias else None
    gate, up = f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"
    return DecoderLayer(
        input_norm=weights.get(f"{prefix}input_layernorm.weight"),
        qkv=pack_linear(weights.stack(*(f"{attn}{part}_proj.weight" for part in "qkv")), qkv_bias),
        qk_norm=qk_norm,
        attn_out=pack_linear(weights.get(f"{attn}o_proj.weight"), out_bias),
        mlp_norm=weights.get(f"{prefix}post_attention_layernorm.weight"),
        gate_up=pack_linear(weights.stack(gate, up)),
        down=pack_linear(weights.get(f"{prefix}mlp.down_proj.weight")),
    )
