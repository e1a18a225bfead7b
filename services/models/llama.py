"""The Llama family: Llama 2 and 3, SmolLM, Mistral. The shared decoder as it is."""

from __future__ import annotations

from services.models.decoder import Decoder, read_layer
from services.models.weights import Weights


def build_llama(weights: Weights) -> Decoder:
    """Read a Llama-shaped model."""
    layers = [read_layer(weights, i) for i in range(weights.config.num_layers)]
    return Decoder(weights, layers)
