"""The blocks of one sequence, in token order."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from services.common.ids import BlockId

# An entry is `pool << POOL_SHIFT | block`. Pool 0 is our own; the others are peers' pools, mapped
# read-only, and their blocks are no business of our block pool.
POOL_SHIFT = 24
MAX_POOLS = 8
MAX_POOL_BLOCKS = 1 << POOL_SHIFT


def attached_entry(pool_id: int, block: int) -> BlockId:
    """Return the entry of a block of a peer's pool."""
    if not 0 < pool_id < MAX_POOLS or not 0 <= block < MAX_POOL_BLOCKS:
        raise ValueError(f"no entry names block {block} of pool {pool_id}")
    return BlockId(pool_id << POOL_SHIFT | block)


def is_own(entry: BlockId) -> bool:
    """Say whether an entry names a block of our own pool."""
    return entry < MAX_POOL_BLOCKS


class BlockTable:
    """Append-only list of block ids: token `i` lives in block `i // block_size`.

    Block tables only grow, and a block that was lent to a transfer is never replaced: the
    transfer layer relies on it. Entries may name blocks of a peer's pool while they are attached:
    those are read, never written, and never counted.
    """

    __slots__ = ("_block_ids", "block_size")

    def __init__(self, block_size: int, block_ids: Iterable[BlockId] = ()) -> None:
        self.block_size = block_size
        self._block_ids: list[BlockId] = list(block_ids)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._block_ids)

    def __getitem__(self, idx: int) -> BlockId:
        """Return the id of block `idx`."""
        return self._block_ids[idx]

    @property
    def block_ids(self) -> tuple[BlockId, ...]:
        """All ids, in token order."""
        return tuple(self._block_ids)

    @property
    def own_ids(self) -> tuple[BlockId, ...]:
        """The entries that are blocks of our own pool, in token order."""
        return tuple(filter(is_own, self._block_ids))

    @property
    def num_slots(self) -> int:
        """Tokens that fit without another block."""
        return len(self._block_ids) * self.block_size

    def append(self, block_id: BlockId) -> None:
        """Add the next block."""
        self._block_ids.append(block_id)

    def replace(self, idx: int, block_id: BlockId) -> None:
        """Put a block of equal content in place of one that nobody else was told of."""
        self._block_ids[idx] = block_id

    def as_array(self) -> npt.NDArray[np.int32]:
        """All ids as the device wants them."""
        return np.array(self._block_ids, dtype=np.int32)

    def slots(self, lo: int, hi: int) -> npt.NDArray[np.int64]:
        """Slot `block_id * block_size + offset` of tokens [lo, hi)."""
        if not 0 <= lo <= hi <= self.num_slots:
            raise ValueError(f"tokens [{lo}, {hi}) are not within {self.num_slots} slots")
        first = lo // self.block_size
        last = -(-hi // self.block_size)
        ids = np.array(self._block_ids[first:last], dtype=np.int64)
        if (ids >= MAX_POOL_BLOCKS).any():
            raise ValueError(f"tokens [{lo}, {hi}) lie in blocks that are only read")
        bases = ids * self.block_size
        all_slots = (bases[:, None] + np.arange(self.block_size)).reshape(-1)
        start = lo - first * self.block_size
        return all_slots[start : start + hi - lo]
