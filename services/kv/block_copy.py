"""Copies out of a peer's pool, under the generations of its blocks. The peer may write meanwhile.

A writer makes a block's generation odd before it touches the block, so what was copied between two
looks at an even generation that did not change is what the generation stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kernels.cpu import kv_blocks
from services.kv.memory import KvPoolMemory

# (peer's pool, its blocks, their generations, our blocks, rows of them) -> which were stable
CopyBlocks = Callable[
    [KvPoolMemory, Sequence[int], Sequence[int], npt.NDArray[np.uint8], Sequence[int]], list[bool]
]


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
) -> list[bool]:
    """Copy blocks; True for those whose generation was the one in `gens`, even, before and after.

    Args:
        dest: `[num_blocks, block_bytes]`, a pool; `dest_blocks` are rows of it.
    """
    rows = np.array(source_blocks, dtype=np.int64)
    wanted = np.array(gens, dtype=np.uint64)
    library, _ = kv_blocks.available()
    if library is not None:
        pool = (source.blocks, source.gens)
        to = np.array(dest_blocks, dtype=np.int64)
        good: list[bool] = library.pull(pool, rows, wanted, dest, to).tolist()
        return good
    return pull_with_numpy(source, rows, wanted, dest, dest_blocks)


def pull_with_numpy(
    source: KvPoolMemory,
    rows: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.uint64],
    dest: npt.NDArray[np.uint8],
    dest_blocks: Sequence[int],
) -> list[bool]:
    """Do the same without a compiler.

    On x86-64 loads are not reordered with loads; elsewhere the library has to order them.
    """
    source_blocks = rows.tolist()
    before = are_stable(source, rows, wanted)
    for start, stop in runs(before.tolist(), source_blocks, dest_blocks):
        at, to, count = source_blocks[start], dest_blocks[start], stop - start
        np.copyto(dest[to : to + count], source.blocks[at : at + count])
    good: list[bool] = (before & are_stable(source, rows, wanted)).tolist()
    return good


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
