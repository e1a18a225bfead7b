"""Copies out of a peer's pool, under the generations of its blocks. The peer may write meanwhile.

A writer makes a block's generation odd before it touches the block, so what was copied between two
looks at an even generation that did not change is what the generation stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kernels.cpu import kv_blocks
from services.kv.digest import digest_plan
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory

# (peer's pool, its blocks, their generations, our blocks, rows of them) -> which were stable
CopyBlocks = Callable[
    [KvPoolMemory, Sequence[int], Sequence[int], npt.NDArray[np.uint8], Sequence[int]], list[bool]
]


class CopyParts(Protocol):
    """Does the same, or copies only a part of each block."""

    def __call__(
        self,
        source: KvPoolMemory,
        source_blocks: Sequence[int],
        gens: Sequence[int],
        dest: npt.NDArray[np.uint8],
        dest_blocks: Sequence[int],
        part: KvLayout | None = None,
    ) -> list[bool]:
        """Copy layers and heads `part` of each block, or all of it."""
        ...


def are_stable(
    pool: KvPoolMemory, blocks: npt.NDArray[np.int64], gens: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Say of blocks of a peer's pool whether they still have these generations, all even."""
    stable: npt.NDArray[np.bool_] = (pool.gens[blocks] == gens) & (gens % 2 == 0)
    return stable


def pull_blocks(
    source: KvPoolMemory,
    source_blocks: Sequence[int],
    gens: Sequence[int],
    dest: npt.NDArray[np.uint8],
    dest_blocks: Sequence[int],
    part: KvLayout | None = None,
    *,
    num_threads: int = 1,
) -> list[bool]:
    """Copy blocks; True for those whose generation was the one in `gens`, even, before and after.

    Args:
        dest: `[num_blocks, block_bytes]`, a pool; `dest_blocks` are rows of it.
        part: layers and heads to copy of each; `dest` is as wide as that.
        num_threads: that may share a long copy.
    """
    library, _ = kv_blocks.available()
    if library is not None:
        job = _job(source, source_blocks, gens, dest, dest_blocks, part)
        good: list[bool] = library.pull(job, num_threads).tolist()
        return good
    rows, wanted = np.array(source_blocks, np.int64), np.array(gens, np.uint64)
    return pull_with_numpy(source, rows, wanted, dest, dest_blocks, part)


def pull_with_digests(
    source: KvPoolMemory,
    source_blocks: Sequence[int],
    gens: Sequence[int],
    dest: KvPoolMemory,
    dest_blocks: Sequence[int],
    *,
    num_threads: int = 1,
) -> tuple[list[bool], npt.NDArray[np.uint64]] | None:
    """Do the same with whole blocks and digest what was written; None where the library cannot.

    Returns:
        Which are stable, and digests `[len(dest_blocks), digests_per_block]` of those.
    """
    library, _ = kv_blocks.available()
    plan = digest_plan(dest.layout)
    if library is None or plan is None:
        return None
    job = _job(source, source_blocks, gens, dest.blocks, dest_blocks)
    good, digests = library.pull_with_digests(job, plan, num_threads)
    return good.tolist(), digests


def _job(
    source: KvPoolMemory,
    source_blocks: Sequence[int],
    gens: Sequence[int],
    dest: npt.NDArray[np.uint8],
    dest_blocks: Sequence[int],
    part: KvLayout | None = None,
) -> kv_blocks.PullJob:
    rows, to = np.array(source_blocks, np.int64), np.array(dest_blocks, np.int64)
    wanted = np.array(gens, np.uint64)
    return kv_blocks.PullJob(source.pieces(part), source.gens, rows, wanted, dest, to)


def pull_with_numpy(
    source: KvPoolMemory,
    rows: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.uint64],
    dest: npt.NDArray[np.uint8],
    dest_blocks: Sequence[int],
    part: KvLayout | None = None,
) -> list[bool]:
    """Do the same without a compiler.

    On x86-64 loads are not reordered with loads; elsewhere the library has to order them.
    """
    source_blocks = rows.tolist()
    before = are_stable(source, rows, wanted)
    for start, stop in runs(before.tolist(), source_blocks, dest_blocks):
        at, to, count = source_blocks[start], dest_blocks[start], stop - start
        pieces = source.pieces(part)[at : at + count]
        np.copyto(dest[to : to + count], pieces.reshape(count, -1))
    good: list[bool] = (before & are_stable(source, rows, wanted)).tolist()
    return good


def read_blocks(memory: KvPoolMemory, blocks: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """Return whole blocks of our own that nobody writes: views, or copies if they lie in pieces."""
    if not memory.layout.is_layer_major:
        return [memory.blocks[block] for block in blocks]
    found = np.empty((len(blocks), memory.layout.block_bytes), np.uint8)
    pieces, rows = memory.pieces(), np.array(blocks, np.int64)
    library, _ = kv_blocks.available()
    if library is not None:
        library.gather(pieces, rows, found)
    else:
        for at, block in enumerate(blocks):
            np.copyto(found[at].reshape(pieces.shape[1:]), pieces[block])
    return list(found)


def write_block(memory: KvPoolMemory, block: int, content: npt.NDArray[np.uint8]) -> None:
    """Put a whole block into our own pool, in pieces if it is layer-major."""
    pieces = memory.pieces()
    pieces[block] = content.reshape(pieces.shape[1:])


def runs(
    wanted: Sequence[bool], source_blocks: Sequence[int], dest_blocks: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of wanted blocks that lie one after the other on both sides."""
    start = None
    for i, is_wanted in enumerate(wanted):
        if start is not None:
            offset = i - start
            follows = (
                source_blocks[i] == source_blocks[start] + offset
                and dest_blocks[i] == dest_blocks[start] + offset
            )
            if is_wanted and follows:
                continue
            yield start, i
        start = i if is_wanted else None
    if start is not None:
        yield start, len(wanted)
