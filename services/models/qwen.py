"""The Qwen families: Qwen2 adds biases to q, k and v; Qwen3 norms each head of q and k."""

from __future__ import annotations

from services.models.decoder import Decoder, read_layer
from services.models.weights import Weights


def build_qwen(weights: Weights) -> Decoder:
    """Read a Qwen2 or Qwen3 model; biases and norms follow from its ModelConfig."""
    layers = [read_layer(weights, i) for i in range(weights.config.num_layers)]
    return Decoder(weights, layers)
