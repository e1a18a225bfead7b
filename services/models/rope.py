"""Rotary frequencies of a model, plain or stretched, and the table the kernels read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.ops.rope import build_rope_table
from services.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each rotated pair, `[head_dim // 2]` float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    return _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide slow rotations by the factor, leave fast ones, and blend between the two bounds."""
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    slow = wavelength > original / scaling.low_freq_factor
    fast = wavelength < original / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    share = (original / wavelength - scaling.low_freq_factor) / span
    blended = (1 - share) * plain / scaling.factor + share * plain
    return torch.where(slow, plain / scaling.factor, torch.where(fast, plain, blended))


def rope_table(config: ModelConfig, device: torch.device) -> Tensor:
    """Cosines and sines of every position, `[max_position_embeddings, head_dim]` float32."""
    frequencies = inverse_frequencies(config)
    table = build_rope_table(config.head_dim, config.max_position_embeddings, frequencies)
    return table.to(device)
