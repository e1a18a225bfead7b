"""Torch tensors in, C calls out: one lean method per op of the CPU library."""

from __future__ import annotations

from torch import Tensor


class CpuKernels:
    """The ops of the loaded library; callers have checked shapes, `can_*` says what it takes."""

    def is_float32(self, *tensors: Tensor) -> bool:
        """Say whether all are float32 with a contiguous last axis."""
        raise NotImplementedError
