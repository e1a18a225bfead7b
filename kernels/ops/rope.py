"""Rotary position embedding, half against half (dimension i turns with dimension i + half)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dispatch
from kernels.reference import dense as reference


def build_rope_table(head_dim: int, max_pos: int, inv_freq: Tensor, scale: float = 1.0) -> Tensor:
    """Tabulate `scale * cos(p f_i) | scale * sin(p f_i)` as `[max_pos, head_dim]` float32.

    Args:
        head_dim: rotated dimensions of a head; the table's first half is cosines.
        max_pos: number of positions.
        inv_freq: `[head_dim // 2]` angle per position, after any frequency scaling.
        scale: factor on both (the attention factor of long-context schemes).
    """
    if head_dim % 2 or inv_freq.shape != (head_dim // 2,):
        raise ValueError(f"inv_freq {tuple(inv_freq.shape)} must be [{head_dim} // 2]")
    if max_pos < 1:
        raise ValueError(f"max_pos must be at least 1, not {max_pos}")
    positions = torch.arange(max_pos, dtype=torch.float32, device=inv_freq.device)
    angles = torch.outer(positions, inv_freq.float())
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1).contiguous()


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin_table: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k **in place** and return them.

    With half = `rotary_dim // 2`: `x[i], x[i + half] = x[i] cos - x[i + half] sin,
    x[i + half] cos + x[i] sin`.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, last axis contiguous (a view of qkv is fine).
        k: `[num_tokens, num_kv_heads, head_dim]`, likewise.
        positions: `[num_tokens]` int64, each below `max_pos`.
        cos_sin_table: `[max_pos, rotary_dim]` float32 from `build_rope_table`; dimensions beyond
            `rotary_dim` are left alone.
    """
    _check(q, k, positions, cos_sin_table)
    cpu = dispatch.cpu_kernels(q)
    if cpu is not None and cpu.is_float32(q, k):
        cpu.rope(q, k, positions, cos_sin_table)
    else:
        reference.rope(q, k, positions, cos_sin_table)
    return q, k


def _check(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must be [num_tokens, heads, head_dim]"
        )
    if positions.shape != q.shape[:1] or positions.dtype != torch.int64:
        raise ValueError(f"positions must be [{q.shape[0]}] int64, not {positions.dtype}")
    if table.dim() != 2 or table.shape[1] % 2 or table.shape[1] > q.shape[2]:
        raise ValueError(
            f"cos_sin_table {tuple(table.shape)} must be [max_pos, rotary_dim <= {q.shape[2]}]"
        )
    if table.dtype != torch.float32:
        raise ValueError(f"cos_sin_table must be float32, not {table.dtype}")
