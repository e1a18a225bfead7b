"""Load the C library lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.cpu.launchers import CpuKernels


def kernels() -> CpuKernels | None:
    """Return the loaded ops, or None when they cannot be used."""
    return None


def available() -> tuple[bool, str]:
    """Return whether the library can be used, and which one or why not."""
    return False, "not built"
