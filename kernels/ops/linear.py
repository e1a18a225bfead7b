"""Linear layers over weights that were packed once at load time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import dispatch
from kernels.reference import dense as reference


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight in the order its kernel reads it; made by `pack_linear`, opaque to callers.

    Exactly one of `weight` and `panels` is set: packing does not keep a second copy.
    """

    in_features: int
    out_features: int
    dtype: torch.dtype
    weight: Tensor | None  # [out_features, in_features], when a library routine multiplies
    panels: Tensor | None  # CPU library: [num_panels, in_features, panel_width] float32
    bias: Tensor | None  # [out_features]


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Pack `weight` `[out, in]` (and `bias` `[out]`) for `linear`; the weight may be freed after.

    float32 weights on a CPU become panels of our own GEMM; everything else stays as it is.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight {tuple(weight.shape)} must be [out_features, in_features]")
    out_features, in_features = weight.shape
    if bias is not None and (bias.shape != (out_features,) or bias.dtype != weight.dtype):
        raise ValueError(
            f"bias {tuple(bias.shape)} {bias.dtype} must be [{out_features}] {weight.dtype}"
        )
    cpu = dispatch.cpu_kernels(weight)
    if cpu is None or weight.dtype != torch.float32:
        return PackedLinear(in_features, out_features, weight.dtype, weight, None, bias)
    panels = cpu.pack_panels(weight)
    own_bias = None if bias is None else bias.contiguous()
    return PackedLinear(in_features, out_features, weight.dtype, None, panels, own_bias)


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: `[num_tokens, in_features]` of the weight's dtype, last axis contiguous.
        packed: made by `pack_linear` on the same device.

    Returns:
        `[num_tokens, out_features]`. With panels (CPU, float32) every output is one chain of
        fused multiply-adds over `in_features` in ascending order, so a row's bits depend on
        nothing but the row. Without panels torch picks the order and promises no such thing.
    """
    if x.dim() != 2 or x.shape[1] != packed.in_features:
        raise ValueError(f"x {tuple(x.shape)} must be [num_tokens, {packed.in_features}]")
    if x.dtype != packed.dtype:
        raise ValueError(f"x is {x.dtype}, the weight {packed.dtype}")
    if packed.panels is None:
        assert packed.weight is not None
        return reference.linear(x, packed.weight, packed.bias)
    cpu = dispatch.cpu_kernels(x)
    if cpu is None:
        raise ValueError(f"the weight was packed for the CPU library, x is on {x.device}")
    return cpu.linear(x, packed.panels, packed.out_features, packed.bias)
