"""The decoder shared by all families: pre-norm attention and gated MLP over a paged KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.ops.decoder import decoder_step, pack_decoder
from kernels.ops.decoder_parts import DecoderGeometry, DecoderLayer
from kernels.ops.linear import linear, pack_linear, pack_stacked
from services.models.base import StepBatch
from services.models.config import ModelConfig
from services.models.rope import rope_table
from services.models.weights import Weights


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
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self._lm_head = pack_linear(weights.get(f"{head}.weight"))
        self._decoder = pack_decoder(
            layers,
            weights.get("model.norm.weight"),
            rope_table(config, weights.device),
            DecoderGeometry(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                eps=config.rms_norm_eps,
                scale=config.head_dim**-0.5,
            ),
        )

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
        hidden = self._embedding.index_select(0, batch.token_ids)  # [num_tokens, hidden]
        normed = decoder_step(hidden, self._decoder, kv_pool, batch)
        return linear(normed, self._lm_head).float()  # [num_logits, vocab_size]


def read_layer(weights: Weights, layer_idx: int) -> DecoderLayer:
    """Read and pack one layer; projections that read the same input become one.

    Biases and norms over heads are read where the configuration has them.
    """
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
        qkv=pack_stacked([weights.get(f"{attn}{part}_proj.weight") for part in "qkv"], qkv_bias),
        attn_out=pack_linear(weights.get(f"{attn}o_proj.weight"), out_bias),
        mlp_norm=weights.get(f"{prefix}post_attention_layernorm.weight"),
        gate_up=pack_stacked([weights.get(gate), weights.get(up)]),
        down=pack_linear(weights.get(f"{prefix}mlp.down_proj.weight")),
        q_norm=weights.get(f"{attn}q_norm.weight") if config.qk_norm else None,
        k_norm=weights.get(f"{attn}k_norm.weight") if config.qk_norm else None,
    )
