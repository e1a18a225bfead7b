"""Root-mean-square norms, alone and fused with the residual addition."""

from __future__ import annotations

from torch import Tensor

from kernels import dispatch
from kernels.reference import dense as reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, computed in float32.

    Args:
        x: `[..., size]`.
        weight: `[size]` of x's dtype.
        eps: added to the mean square.

    Returns:
        x's shape and dtype, contiguous. A row's bits do not depend on other rows.
    """
    _check_weight(x, weight)
    cpu = dispatch.cpu_kernels(x)
    if cpu is not None and cpu.is_float32(x, weight):
        return cpu.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `(rms_norm(x + residual, weight, eps), x + residual)` in one pass.

    Args:
        x, residual: `[num_tokens, size]`, same dtype; neither is changed.
        weight: `[size]`.
        eps: added to the mean square.
    """
    _check_weight(x, weight)
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"residual {tuple(residual.shape)} {residual.dtype} must equal x "
            f"{tuple(x.shape)} {x.dtype}"
        )
    cpu = dispatch.cpu_kernels(x)
    if cpu is not None and cpu.is_float32(x, weight):
        return cpu.add_rms_norm(x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} must be [{x.shape[-1] if x.dim() else 0}]")
    if weight.dtype != x.dtype:
        raise ValueError(f"weight is {weight.dtype}, x {x.dtype}")
