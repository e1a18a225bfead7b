"""Linear, norm, rotary embedding and activation in plain torch: the truth, in float32 inside."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`; torch picks the order of sums, so rows are not batch invariant."""
    return torch.nn.functional.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `(rms_norm(x + residual), x + residual)`."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin_table: Tensor) -> None:
    """Rotate the first `table.shape[1]` dimensions of each head in place, half against half."""
    rows = cos_sin_table[positions].float()
    cos, sin = rows.chunk(2, dim=-1)
    for heads in (q, k):
        rotate_half_(heads, cos[:, None], sin[:, None])


def rotate_half_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate pairs `(i, i + half)` of heads `[num_tokens, num_heads, head_dim]` in place."""
    half = cos.shape[-1]
    low, high = heads[..., :half].float(), heads[..., half : 2 * half].float()
    # Both before either is stored: in float32 `low` and `high` are views of `heads`.
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    heads[..., : 2 * half] = turned


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, the two halves of the last axis."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
