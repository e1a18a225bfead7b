"""Names, copies and digests KV blocks by the C library; needs no torch."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Sequence
from ctypes import c_char_p, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kernels.cpu import build

SWITCH = "ISTHMUS_CPU_KERNELS"  # "off" copies with numpy even where the library could be built


_STRIPE_BYTES = 64
_MAX_HEADS = 256  # also in isthmus_kv.c
_NAME_BYTES = 16  # there, too, as the next
_MAX_NAMED_BYTES = 256
_MIN_DIGEST_BYTES = 241  # shorter inputs have other rules in XXH3


class _Plan(ctypes.Structure):
    """`digest_plan` of the library."""

    _fields_: ClassVar[Any] = [
        ("num_heads", c_int64),
        ("run_bytes", c_int64),
        ("num_groups", c_int64),
        ("bounds", c_void_p),
    ]


class _Pieces(ctypes.Structure):
    """`pool_pieces` of the library."""

    _fields_: ClassVar[Any] = [
        ("base", c_void_p),
        ("block_stride", c_int64),
        ("piece_stride", c_int64),
        ("num_pieces", c_int64),
        ("piece_bytes", c_int64),
    ]


_POINTER = ctypes.POINTER(_Pieces)


class DigestPlan:
    """How the digests of a block `[layers][2][heads][run_bytes]` lie: heads, then layer groups."""

    def __init__(self, num_heads: int, run_bytes: int, bounds: Sequence[int]) -> None:
        """Take layer groups [bounds[g], bounds[g + 1])."""
        self._bounds = np.array(bounds, np.int64)  # kept: the structure points to it
        num_groups = len(bounds) - 1
        self.structure = _Plan(num_heads, run_bytes, num_groups, self._bounds.ctypes.data)
        self.num_digests = num_heads * num_groups
        self.block_bytes = 2 * bounds[-1] * num_heads * run_bytes
        smallest = 2 * int(np.diff(self._bounds).min()) * run_bytes
        # What the library can do; others are left to the xxhash package.
        is_striped = run_bytes % _STRIPE_BYTES == 0 and smallest >= _MIN_DIGEST_BYTES
        self.is_possible = is_striped and num_heads <= _MAX_HEADS


@dataclass(frozen=True, slots=True)
class PullJob:
    """Blocks to copy out of a peer's pool, under their generations.

    Args:
        pieces: the peer's blocks, `[num_blocks, num_pieces, piece_bytes]`, by any strides of the
            first two.
        gens: the generations of all of them.
        source_rows: which of them to copy; `wanted_gens` are theirs.
        dest: `[num_blocks, num_pieces * piece_bytes]`; `dest_rows` of it are written.

    Raises:
        ValueError: shapes do not fit together, or a row is outside its pool.
    """

    pieces: npt.NDArray[np.uint8]
    gens: npt.NDArray[np.uint64]
    source_rows: npt.NDArray[np.int64]
    wanted_gens: npt.NDArray[np.uint64]
    dest: npt.NDArray[np.uint8]
    dest_rows: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        _check(self.pieces, self.dest)
        if not (self.gens.flags.c_contiguous and len(self.gens) == len(self.pieces)):
            raise ValueError("as many generations as blocks are needed, in a row")
        lists = (self.source_rows, self.wanted_gens, self.dest_rows)
        if len({len(values) for values in lists}) > 1:
            raise ValueError("as many rows and generations on both sides are needed")
        if not all(values.flags.c_contiguous for values in lists):
            raise ValueError("rows and generations have to lie in a row")
        if len(self.dest_rows):
            _check_rows(self.source_rows, len(self.pieces))
            _check_rows(self.dest_rows, len(self.dest))


class KvBlocks:
    """The functions of the library; all but the shortest run without the interpreter's lock."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._pull = handle.isthmus_pull_blocks
        self._pull.argtypes = (_POINTER, *[c_void_p] * 2, c_int64, *[c_void_p] * 6, c_int64)
        self._pull.restype = None
        self._gather = handle.isthmus_gather_blocks
        self._gather.argtypes = (_POINTER, c_void_p, c_int64, c_void_p)
        self._gather.restype = None
        self._digests = handle.isthmus_block_digests
        self._digests.argtypes = (ctypes.POINTER(_Plan), c_void_p, c_void_p)
        self._digests.restype = None
        # Only where the processor has instructions for it: hashlib is as fast as C without them.
        self.can_hash = hasattr(handle, "isthmus_hash_chain")
        if self.can_hash:
            # With the lock: handing it over would take longer than most chains.
            chain = ctypes.PYFUNCTYPE(
                None, c_char_p, c_int64, c_int64, c_char_p, c_int64, c_int64, c_char_p
            )
            self._hash_chain = chain(("isthmus_hash_chain", handle))

    def hash_chain(self, head: bytes, parent_at: int, tokens: bytes, block_bytes: int) -> bytes:
        """Return 16 bytes for each whole block: a SHA-256 of the head and the block's tokens.

        Args:
            head: holds 16 bytes of the first block's parent; of later ones the block before.
            parent_at: where it holds them.
        """
        if not 0 <= parent_at <= len(head) - _NAME_BYTES:
            raise ValueError("the head does not hold a parent there")
        if block_bytes < 1 or len(head) + block_bytes > _MAX_NAMED_BYTES:
            raise ValueError(f"head and block have 1 to {_MAX_NAMED_BYTES} bytes")
        num_blocks = len(tokens) // block_bytes
        names = ctypes.create_string_buffer(num_blocks * _NAME_BYTES)
        self._hash_chain(head, len(head), parent_at, tokens, block_bytes, num_blocks, names)
        return names.raw

    def digests(self, plan: DigestPlan, block: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
        """Return the xxh3_64 of every part of one block, `[num_digests]`."""
        if not (plan.is_possible and block.flags.c_contiguous):
            raise ValueError("this block's digests are not for the library")
        if block.nbytes != plan.block_bytes:
            raise ValueError(f"a block has {plan.block_bytes} bytes, not {block.nbytes}")
        found = np.empty(plan.num_digests, np.uint64)
        self._digests(plan.structure, block.ctypes.data, found.ctypes.data)
        return found

    def pull(self, job: PullJob, num_threads: int = 1) -> npt.NDArray[np.bool_]:
        """Copy blocks; True for those whose generation was the wanted one and even throughout.

        Args:
            job: what to copy, and where to.
            num_threads: that share the copy where it is long enough.
        """
        return self._run(job, num_threads, None, np.empty(0, np.uint64))

    def pull_with_digests(
        self, job: PullJob, plan: DigestPlan, num_threads: int = 1
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint64]]:
        """Do the same, and digest what was written while it is in a cache.

        Returns:
            Which blocks are good, and digests `[num_blocks, num_digests]` of those.

        Raises:
            ValueError: the plan is not for these blocks.
        """
        if not plan.is_possible or plan.block_bytes != job.dest.shape[1]:
            raise ValueError("the digests of these blocks are not for the library")
        digests = np.zeros((len(job.dest_rows), plan.num_digests), np.uint64)
        return self._run(job, num_threads, ctypes.addressof(plan.structure), digests), digests

    def _run(
        self, job: PullJob, num_threads: int, plan: int | None, digests: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_]:
        count = len(job.dest_rows)
        good = np.empty(count, np.uint8)
        if count:
            self._pull(
                _structure(job.pieces),
                job.gens.ctypes.data,
                job.dest.ctypes.data,
                count,
                job.source_rows.ctypes.data,
                job.dest_rows.ctypes.data,
                job.wanted_gens.ctypes.data,
                good.ctypes.data,
                plan,
                digests.ctypes.data,
                num_threads,
            )
        return good.view(bool)

    def gather(
        self,
        pieces: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.int64],
        dest: npt.NDArray[np.uint8],
    ) -> None:
        """Copy blocks that nobody writes, given in pieces, into `[len(rows), block_bytes]`.

        Raises:
            ValueError: shapes do not fit together, or a row is outside its pool.
        """
        _check(pieces, dest)
        if len(dest) != len(rows):
            raise ValueError("as many rows on both sides are needed")
        if len(rows):
            _check_rows(rows, len(pieces))
            at = np.ascontiguousarray(rows)
            self._gather(_structure(pieces), dest.ctypes.data, len(at), at.ctypes.data)


def _structure(pieces: npt.NDArray[np.uint8]) -> _Pieces:
    _, num_pieces, piece_bytes = pieces.shape
    block_stride, piece_stride, _ = pieces.strides
    if piece_stride == piece_bytes:  # they lie side by side: one
        num_pieces, piece_bytes = 1, num_pieces * piece_bytes
    return _Pieces(pieces.ctypes.data, block_stride, piece_stride, num_pieces, piece_bytes)


def _check(pieces: npt.NDArray[np.uint8], dest: npt.NDArray[np.uint8]) -> None:
    fits = pieces.ndim == 3 and dest.ndim == 2 and math.prod(pieces.shape[1:]) == dest.shape[1]
    # An array's own strides stay inside its memory, so no more is asked of them.
    is_whole = fits and pieces.strides[2] == 1 and dest.flags.c_contiguous
    if not (is_whole and dest.flags.writeable):
        raise ValueError("the pools do not fit together")


def _check_rows(rows: npt.NDArray[np.int64], num_blocks: int) -> None:
    # Without a sign a negative one is a huge one: one look at them instead of two.
    if int(rows.view(np.uint64).max()) >= num_blocks:
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
