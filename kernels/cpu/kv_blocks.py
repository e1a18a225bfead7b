"""Copies KV blocks out of a peer's pool by the C library; needs no torch."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_long, c_void_p

import numpy as np
import numpy.typing as npt

from kernels.cpu import build

SWITCH = "ISTHMUS_CPU_KERNELS"  # "off" copies with numpy even where the library could be built


class KvBlocks:
    """The functions of the library; every call runs without the interpreter's lock."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._pull = handle.isthmus_pull_blocks
        self._pull.argtypes = (*[c_void_p] * 3, c_long, c_long, *[c_void_p] * 4)
        self._pull.restype = None

    def pull(
        self,
        source: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]],
        source_rows: npt.NDArray[np.int64],
        wanted_gens: npt.NDArray[np.uint64],
        dest: npt.NDArray[np.uint8],
        dest_rows: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Copy blocks; True for those whose generation was the wanted one and even throughout.

        Args:
            source: the peer's blocks `[num_blocks, block_bytes]` and generations `[num_blocks]`.
            dest: `[num_blocks, block_bytes]`.

        Raises:
            ValueError: shapes do not fit together, or a row is outside its pool.
        """
        blocks, gens = source
        count = len(source_rows)
        _check(blocks, dest, gens)
        if not (len(wanted_gens) == len(dest_rows) == count):
            raise ValueError("as many rows and generations on both sides are needed")
        if count == 0:
            return np.empty(0, bool)
        _check_rows(source_rows, len(blocks))
        _check_rows(dest_rows, len(dest))
        good = np.empty(count, np.uint8)
        self._pull(
            blocks.ctypes.data,
            gens.ctypes.data,
            dest.ctypes.data,
            blocks.shape[1],
            count,
            np.ascontiguousarray(source_rows).ctypes.data,
            np.ascontiguousarray(dest_rows).ctypes.data,
            np.ascontiguousarray(wanted_gens).ctypes.data,
            good.ctypes.data,
        )
        return good.view(bool)


def _check(
    blocks: npt.NDArray[np.uint8], dest: npt.NDArray[np.uint8], gens: npt.NDArray[np.uint64]
) -> None:
    is_whole = all(array.flags.c_contiguous for array in (blocks, dest, gens))
    fits = blocks.ndim == dest.ndim == 2 and blocks.shape[1] == dest.shape[1]
    if not (is_whole and fits and len(gens) == len(blocks) and dest.flags.writeable):
        raise ValueError("the pools do not fit together")


def _check_rows(rows: npt.NDArray[np.int64], num_blocks: int) -> None:
    if rows.min() < 0 or rows.max() >= num_blocks:
        raise ValueError("a row is outside its pool")


def available() -> tuple[KvBlocks | None, str]:
    """Return the library, built and loaded on the first call, or None and the reason why not."""
    return _load()


@functools.cache
def _load() -> tuple[KvBlocks | None, str]:
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "false", "no"):
        return None, f"{SWITCH} turns the C library off"
    try:
        return KvBlocks(build.load(os.environ, build.KV_BLOCKS)), "C library"
    except build.BuildFailed as error:
        return None, str(error)
