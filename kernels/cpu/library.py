"""Load the CPU library on first use and say whether, and why not, it can be used."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.cpu import build

if TYPE_CHECKING:
    from kernels.cpu.launchers import CpuKernels

SWITCH = "ISTHMUS_CPU_KERNELS"  # "off" serves plain torch even where the library could be built


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The outcome of the one attempt a process makes."""

    kernels: CpuKernels | None
    reason: str


def kernels() -> CpuKernels | None:
    """Return the library's ops, building and loading it on the first call; None if it cannot be."""
    return _load().kernels


def available() -> tuple[bool, str]:
    """Return whether the library serves, with its description or the reason why it does not."""
    loaded = _load()
    return loaded.kernels is not None, loaded.reason


def set_num_threads(num_threads: int) -> None:
    """Let later calls use up to this many threads; results do not depend on it."""
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, not {num_threads}")
    loaded = kernels()
    if loaded is not None:
        loaded.set_num_threads(num_threads)


@functools.cache
def _load() -> _Loaded:
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "false", "no"):
        return _Loaded(None, f"{SWITCH} turns the C library off")
    # torch first: it brings the OpenMP runtime, and both must share one pool of threads.
    from kernels.cpu.launchers import CpuKernels

    try:
        handle = build.load(os.environ, build.OPS)
    except build.BuildFailed as error:
        return _Loaded(None, str(error))
    loaded = CpuKernels(handle)
    return _Loaded(loaded, loaded.describe())
