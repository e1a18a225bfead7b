"""Blocks of a peer's pool that are read in place: which, under which generations, and how to
bring them home.

The peer may change a block only after its generation has changed, and the generation is looked at
after every use: what was computed from a block that has changed meanwhile is thrown away.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common.ids import BlockId
from services.kv.block_copy import are_stable, pull_blocks
from services.kv.block_table import MAX_POOLS, attached_entry
from services.kv.digest import block_digests
from services.kv.memory import KvPoolMemory


@dataclass(frozen=True, slots=True, eq=False)
class AttachedKv:
    """Full blocks of one request in a peer's pool, verified when they were attached.

    Attributes:
        indexes: which full blocks of the prompt; ascending.
        blocks: `[n]` rows of `pool`.
        gens: `[n]` their generations while they hold what was announced; even.
        digests: `[n, digests_per_block]`.
        verifies_moves: whether digests are checked again when blocks are copied home.
    """

    pool_id: int
    pool: KvPoolMemory
    indexes: tuple[int, ...]
    blocks: npt.NDArray[np.int64]
    gens: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint64]
    verifies_moves: bool = True

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.indexes)

    def entry(self, at: int) -> BlockId:
        """Return what a block table calls the block at `at`."""
        return attached_entry(self.pool_id, int(self.blocks[at]))

    def is_current(self, first: int = 0) -> bool:
        """Say whether the blocks from `first` on still are what was attached."""
        return bool(are_stable(self.pool, self.blocks[first:], self.gens[first:]).all())

    def copy_home(self, at: int, memory: KvPoolMemory, dest: BlockId, *, verify: bool) -> bool:
        """Copy the block at `at` into our pool, its digests with it.

        Returns False, and nothing may be made of `dest`, if the block has changed.
        """
        source, gen = int(self.blocks[at]), int(self.gens[at])
        if not pull_blocks(self.pool, [source], [gen], memory.blocks, [dest])[0]:
            return False
        if verify and (block_digests(memory.layout, memory.blocks[dest]) != self.digests[at]).any():
            return False
        memory.digests[dest] = self.digests[at]
        return True


class PoolBases:
    """Numbers of the peers' pools that block tables may name; any thread.

    A number belongs to one mapping for as long as anyone holds it.
    """

    def __init__(self, max_pools: int = MAX_POOLS) -> None:
        """Args:
        max_pools: with our own.
        """
        if not 2 <= max_pools <= MAX_POOLS:
            raise ValueError(f"{max_pools} pools; block tables can name 2 to {MAX_POOLS}")
        self._lock = threading.Lock()
        self._pools: list[KvPoolMemory | None] = [None] * (max_pools - 1)
        self._holders = [0] * (max_pools - 1)

    def hold(self, pool: KvPoolMemory) -> int | None:
        """Return the number of a pool and hold it; None when all numbers are taken."""
        with self._lock:
            at = self._slot_of(pool)
            if at is None:
                return None
            self._pools[at] = pool
            self._holders[at] += 1
            return at + 1

    def drop(self, pool_id: int) -> None:
        """Give up one hold."""
        with self._lock:
            at = pool_id - 1
            if self._holders[at] < 1:
                raise ValueError(f"pool {pool_id} is not held")
            self._holders[at] -= 1
            if not self._holders[at]:
                self._pools[at] = None

    def num_held(self) -> int:
        """Return how many pools are held."""
        with self._lock:
            return sum(pool is not None for pool in self._pools)

    def _slot_of(self, pool: KvPoolMemory) -> int | None:
        free = None
        for at, held in enumerate(self._pools):
            if held is pool:
                return at
            if held is None and free is None:
                free = at
        return free
