"""The Qwen families: Qwen2 adds biases to q, k and v; Qwen3 norms each head of q and k."""

from __future__ import annotations

from services.models.decoder import Decoder, DecoderLayer, QkNorm, read_layer
from services.models.weights import Weights


def build_qwen2(weights: Weights) -> Decoder:
    """Read a Qwen2 model; its biases follow from ModelConfig.attention_bias."""
    layers = [read_layer(weights, i) for i in range(weights.config.num_layers)]
    return Decoder(weights, layers)


def build_qwen3(weights: Weights) -> Decoder:
    """Read a Qwen3 model."""
    layers = [_qwen3_layer(weights, i) for i in range(weights.config.num_layers)]
    return Decoder(weights, layers)


def _qwen3_layer(weights: Weights, layer_idx: int) -> DecoderLayer:
    attn = f"model.layers.{layer_idx}.self_attn."
    norm = QkNorm(
        q=weights.get(f"{attn}q_norm.weight"),
        k=weights.get(f"{attn}k_norm.weight"),
    )
    return read_layer(weights, layer_idx, qk_norm=norm)
