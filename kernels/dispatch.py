"""Which implementation of an op serves a tensor: our C library, Triton, or plain torch."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kernels.cpu import library

if TYPE_CHECKING:
    from kernels.cpu.launchers import CpuKernels


class AttentionKernels(Protocol):
    """What a GPU backend offers: attention with the signature of the public op."""

    def paged_attention(
        self,
        q: Tensor,
        kv_pool: Tensor,
        layer: int,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        scale: float,
        more_pools: Sequence[Tensor | None] = (),
    ) -> Tensor:
        """See `kernels.ops.attention.paged_attention`."""
        ...


def cpu_kernels(tensor: Tensor) -> CpuKernels | None:
    """Return the C library's ops if `tensor` is on a CPU and the library can be used."""
    return library.kernels() if tensor.device.type == "cpu" else None


def triton_kernels(tensor: Tensor) -> AttentionKernels | None:
    """Return the Triton launchers if `tensor` is on a CUDA device and Triton is installed."""
    return _load_triton() if tensor.device.type == "cuda" else None


@functools.cache
def _load_triton() -> AttentionKernels | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from kernels.triton_impl.attention import TritonKernels

    return TritonKernels()


def describe(device: torch.device | str) -> str:
    """Say in one line which path serves ops on `device`, and why if it is not the fast one."""
    kind = torch.device(device).type
    if kind == "cuda" and _load_triton() is not None:
        return "Triton attention, torch for the rest"
    if kind != "cpu":
        return f"plain torch reference ({kind} needs the triton package)"
    usable, reason = library.available()
    return reason if usable else f"plain torch reference ({reason})"


def set_num_threads(num_threads: int) -> None:
    """Let CPU ops, ours and torch's, use up to this many threads; ours give the same bits."""
    library.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)
