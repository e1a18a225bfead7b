"""The gated activation between a feed-forward layer's two projections."""

from __future__ import annotations

from torch import Tensor

from kernels import dispatch
from kernels.reference import dense as reference


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` with `silu(x) = x / (1 + exp(-x))`.

    Args:
        gate_up: `[num_tokens, 2 * intermediate]`, gate first, last axis contiguous.

    Returns:
        `[num_tokens, intermediate]` of the same dtype, contiguous.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} must be [num_tokens, 2 * intermediate]")
    cpu = dispatch.cpu_kernels(gate_up)
    if cpu is not None and cpu.is_float32(gate_up):
        return cpu.silu_mul(gate_up)
    return reference.silu_mul(gate_up)
