"""Memory of a KV pool: a control page array and the blocks, in one memfd or one anonymous map.

Bytes, in order: a header that names the geometry, 64 bytes of nonce, `gens u64[num_blocks]`,
`digests u64[num_blocks, digests_per_block]`, padding, and from the next 2 MiB boundary the
blocks: `[num_blocks, block_bytes]`, or `[num_layers * 2, num_blocks, piece]` where the layout is
layer-major.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from kernels.cpu import kv_blocks
from services.kv.layout import KvLayout

NONCE_BYTES = 64
# magic, version, digests a block, blocks, block bytes, offset of the first, stride of the pieces
# of a layer-major block (0 in a block-major pool: its header is that of older versions)
_HEADER = struct.Struct("<8sIIQQQQ")
_HEADER_BYTES = 64
_MAGIC = b"isthmkv\0"
_VERSION = 1
_ALIGN_BYTES = 2 << 20  # a huge page: blocks start on one
_F_SEAL_FUTURE_WRITE = 0x0010  # <linux/fcntl.h>; the fcntl module has no name for it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
_MAX_POOL_BYTES = 1 << 46


@dataclass(frozen=True, slots=True)
class _Plan:
    gens_at: int
    digests_at: int
    blocks_at: int
    size: int


def _plan(layout: KvLayout, num_blocks: int) -> _Plan:
    if num_blocks < 1:
        raise ValueError("a pool needs at least one block")
    why = layout.problem()
    if why is not None:
        raise ValueError(f"a pool cannot have this layout: {why}")
    gens_at = _HEADER_BYTES + NONCE_BYTES
    digests_at = gens_at + 8 * num_blocks
    control_bytes = digests_at + 8 * num_blocks * layout.digests_per_block
    blocks_at = -(-control_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    end = blocks_at + num_blocks * layout.block_bytes
    size = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
    if size > _MAX_POOL_BYTES:
        raise ValueError(f"a pool of {size} bytes is larger than {_MAX_POOL_BYTES}")
    return _Plan(gens_at, digests_at, blocks_at, size)


class KvPoolMemory:
    """Numpy views over one pool's memory: its owner's (writable) or a peer's (read-only).

    The mapping lives as long as any view or array made from one: `close` drops ours.

    Attributes:
        gens: `[num_blocks]` uint64, one generation a block.
        digests: `[num_blocks, digests_per_block]` uint64.
        nonce: `[64]` uint8, free for the handshake.
        fd: the memfd to hand to peers; None for anonymous memory and on a peer's side.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, mapping: mmap.mmap, fd: int | None):
        plan = _plan(layout, num_blocks)
        raw = np.frombuffer(mapping, dtype=np.uint8)
        self.layout = layout
        self.num_blocks = num_blocks
        self.fd = fd
        self.size_bytes = plan.size
        self.nonce: npt.NDArray[np.uint8] = raw[_HEADER_BYTES : _HEADER_BYTES + NONCE_BYTES]
        self.gens: npt.NDArray[np.uint64] = raw[plan.gens_at : plan.digests_at].view(np.uint64)
        num_digests = num_blocks * layout.digests_per_block
        digests_end = plan.digests_at + 8 * num_digests
        self.digests: npt.NDArray[np.uint64] = (
            raw[plan.digests_at : digests_end]
            .view(np.uint64)
            .reshape(num_blocks, layout.digests_per_block)
        )
        blocks_end = plan.blocks_at + num_blocks * layout.block_bytes
        content = raw[plan.blocks_at : blocks_end]
        self._blocks: npt.NDArray[np.uint8] | None = None
        if layout.is_layer_major:
            by_piece = content.reshape(layout.num_layers * 2, num_blocks, -1)
            self._pieces: npt.NDArray[np.uint8] = by_piece.transpose(1, 0, 2)
        else:
            self._blocks = content.reshape(num_blocks, layout.block_bytes)
            values = self._blocks[:, : layout.data_bytes]
            self._pieces = values.reshape(num_blocks, layout.num_layers * 2, -1)

    @classmethod
    def create(cls, layout: KvLayout, num_blocks: int, *, kind: str = "memfd") -> Self:
        """Make a pool of zeroed memory and own it.

        Args:
            kind: "memfd" can be handed to peers on this host, which can then only read it;
                "anonymous" cannot, and may get huge pages.
        """
        kv_blocks.available()  # compiled now if need be, not when the first block is sealed
        plan = _plan(layout, num_blocks)
        if kind == "memfd":
            memory = cls._create_memfd(layout, num_blocks, plan)
        elif kind == "anonymous":
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            mapping = mmap.mmap(-1, plan.size, flags=flags)
            _advise_huge_pages(mapping)
            memory = cls(layout, num_blocks, mapping, None)
            _write_header(mapping, layout, num_blocks, plan)
        else:
            raise ValueError(f"pool memory is 'memfd' or 'anonymous', not {kind!r}")
        return memory

    @classmethod
    def _create_memfd(cls, layout: KvLayout, num_blocks: int, plan: _Plan) -> Self:
        fd = os.memfd_create("isthmus-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, plan.size)
            # Mapped before the seal: FUTURE_WRITE forbids every later writable mapping and
            # write, by us and by peers, but leaves this one.
            mapping = mmap.mmap(fd, plan.size, flags=mmap.MAP_SHARED)
            _advise_huge_pages(mapping)
            _write_header(mapping, layout, num_blocks, plan)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            return cls(layout, num_blocks, mapping, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, layout: KvLayout, num_blocks: int) -> Self:
        """Map a peer's pool read-only; the caller keeps and closes `fd`.

        Raises:
            ValueError: the memory is not what `layout` and `num_blocks` say, or its owner could
                still shrink it (a read would then kill this process).
        """
        plan = _plan(layout, num_blocks)
        size = os.fstat(fd).st_size
        if size != plan.size:
            raise ValueError(f"the peer's pool has {size} bytes, its layout says {plan.size}")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("the peer's pool is not sealed against resizing and writing")
        mapping = mmap.mmap(fd, plan.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        _advise_huge_pages(mapping)
        if mapping[: _HEADER.size] != _header(layout, num_blocks, plan):
            raise ValueError("the peer's pool does not have the geometry its layout says")
        return cls(layout, num_blocks, mapping, None)

    @property
    def blocks(self) -> npt.NDArray[np.uint8]:
        """`[num_blocks, block_bytes]`; ValueError of a layer-major pool, which has none whole."""
        if self._blocks is None:
            raise ValueError("the blocks of a layer-major pool lie in pieces")
        return self._blocks

    def pieces(self, part: KvLayout | None = None) -> npt.NDArray[np.uint8]:
        """View all blocks as `[num_blocks, num_pieces, piece_bytes]`, which make up each in order.

        Args:
            part: layers and heads of each block; None = all of it.
        """
        layout = self.layout
        if part is None:
            return self._pieces if self._blocks is None else self._blocks[:, None]
        if layout.has_scales or (part.kv_dtype, part.block_size) != (
            layout.kv_dtype,
            layout.block_size,
        ):
            raise ValueError(f"{part} is no part of {layout} in pieces")
        head_bytes = layout.data_bytes // (layout.num_layers * 2 * layout.num_kv_heads)
        layers = _inside(part.layers, layout.layers, 2)
        return self._pieces[:, layers, _inside(part.heads, layout.heads, head_bytes)]

    def close(self) -> None:
        """Drop the views and the descriptor; idempotent. Other views keep the mapping alive."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        empty = np.empty(0, dtype=np.uint8)
        self.nonce = empty
        self._pieces = empty.reshape(0, 1, 0)
        if self._blocks is not None:
            self._blocks = empty.reshape(0, self.layout.block_bytes)
        self.gens = np.empty(0, dtype=np.uint64)
        self.digests = np.empty((0, self.layout.digests_per_block), dtype=np.uint64)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _inside(wanted: tuple[int, int], held: tuple[int, int], unit: int) -> slice:
    if not held[0] <= wanted[0] < wanted[1] <= held[1]:
        raise ValueError(f"{wanted} is not inside {held}")
    return slice((wanted[0] - held[0]) * unit, (wanted[1] - held[0]) * unit)


def _advise_huge_pages(mapping: mmap.mmap) -> None:
    # Advice only: without transparent huge pages everything works, a little slower.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def _header(layout: KvLayout, num_blocks: int, plan: _Plan) -> bytes:
    return _HEADER.pack(
        _MAGIC,
        _VERSION,
        layout.digests_per_block,
        num_blocks,
        layout.block_bytes,
        plan.blocks_at,
        num_blocks * layout.block_bytes // (layout.num_layers * 2) if layout.is_layer_major else 0,
    )


def _write_header(mapping: mmap.mmap, layout: KvLayout, num_blocks: int, plan: _Plan) -> None:
    mapping[: _HEADER.size] = _header(layout, num_blocks, plan)
