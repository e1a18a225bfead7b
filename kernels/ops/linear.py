"""Linear layers over weights that were packed once at load time."""

from __future__ import annotations

from collections.abc import Sequence
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
    return pack_stacked((weight,), bias)


def pack_stacked(weights: Sequence[Tensor], bias: Tensor | None = None) -> PackedLinear:
    """Pack weights `[out_i, in]` as one, joined along their rows; see `pack_linear`.

    Args:
        weights: at least one, of one dtype and device. Panels are written from them directly,
            without a joined copy.
        bias: `[sum of out_i]`.
    """
    _check_weights(weights)
    first = weights[0]
    out_features, in_features = sum(weight.shape[0] for weight in weights), first.shape[1]
    if bias is not None and (bias.shape != (out_features,) or bias.dtype != first.dtype):
        raise ValueError(
            f"bias {tuple(bias.shape)} {bias.dtype} must be [{out_features}] {first.dtype}"
        )
    cpu = dispatch.cpu_kernels(first)
    if cpu is None or first.dtype != torch.float32:
        joined = first if len(weights) == 1 else torch.cat(tuple(weights))
        return PackedLinear(in_features, out_features, first.dtype, joined, None, bias)
    panels = cpu.pack_panels(weights)
    own_bias = None if bias is None else bias.contiguous()
    return PackedLinear(in_features, out_features, first.dtype, None, panels, own_bias)


def _check_weights(weights: Sequence[Tensor]) -> None:
    if not weights:
        raise ValueError("there is no weight to pack")
    first = weights[0]
    for weight in weights:
        if weight.dim() != 2:
            raise ValueError(f"weight {tuple(weight.shape)} must be [out_features, in_features]")
        if weight.shape[1] != first.shape[1] or weight.dtype != first.dtype:
            raise ValueError(
                f"weight {tuple(weight.shape)} {weight.dtype} does not stack on "
                f"{tuple(first.shape)} {first.dtype}"
            )


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
