"""Ownership of KV blocks: reference counts, generations and the order of eviction. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common.errors import BlocksExhausted
from services.common.ids import BlockHash, BlockId
from services.kv.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Where the blocks are; the three sum to `total`."""

    total: int
    free: int
    cached: int
    in_use: int


class BlockPool:
    """Every block is in exactly one of: free, cached (unreferenced, evictable), in use.

    A block's generation is even while its content is stable and odd while it is being written
    or free. It rises at allocate, seal (or freeze) and free, always before the content may
    change, so a reader that sees the same even number before and after a copy has a true copy.

    Cached blocks wait in eviction order: least recently used first, and of one sequence the
    deepest first. Whoever holds a block holds all blocks before it too, so that a parent is
    never evicted before its children.
    """

    def __init__(self, num_blocks: int, gens: npt.NDArray[np.uint64] | None = None) -> None:
        """Args:
        gens: the control page's generations, written in place; a private array if None.
        """
        if num_blocks < 1:
            raise ValueError("a pool needs at least one block")
        self.num_blocks = num_blocks
        self.cache = PrefixCache()
        self._gens = np.zeros(num_blocks, dtype=np.uint64) if gens is None else gens
        if len(self._gens) != num_blocks:
            raise ValueError(f"{len(self._gens)} generations for {num_blocks} blocks")
        self._gens[:] = 1  # odd: free
        self._refs = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(
            BlockId(i) for i in range(num_blocks)
        )
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()

    # -- what there is ---------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free ones and evictable ones."""
        return len(self._free) + len(self._evictable)

    def counts(self) -> PoolCounts:
        """Return how many blocks are free, cached and in use."""
        free, cached = len(self._free), len(self._evictable)
        return PoolCounts(self.num_blocks, free, cached, self.num_blocks - free - cached)

    def gen(self, block_id: BlockId) -> int:
        """Return the block's generation."""
        return int(self._gens[block_id])

    def is_sealed(self, block_id: BlockId) -> bool:
        """Say whether the block's content is stable."""
        return self.gen(block_id) % 2 == 0

    def is_cached(self, block_id: BlockId) -> bool:
        """Say whether the block is in the prefix cache."""
        return self._hashes[block_id] is not None

    def num_refs(self, block_id: BlockId) -> int:
        """Return the block's reference count."""
        return self._refs[block_id]

    def num_evictable(self, block_ids: Sequence[BlockId]) -> int:
        """Of these blocks, those a new reference would take out of `num_available`."""
        return sum(1 for block_id in block_ids if not self._refs[block_id])

    # -- life of a block -------------------------------------------------------------------

    def allocate(self, num_blocks: int, after: BlockId | None = None) -> tuple[BlockId, ...]:
        """Take blocks to write, one reference each; all or none.

        Args:
            after: prefer the ids that follow this one, so that a sequence's blocks form runs.

        Raises:
            BlocksExhausted: fewer are free or evictable.
        """
        if num_blocks > self.num_available:
            raise BlocksExhausted(needed=num_blocks, free=self.num_available)
        taken: list[BlockId] = []
        for _ in range(num_blocks):
            after = self._take(after)
            self._gens[after] += np.uint64(2)  # odd stays odd, and differs from the last life
            self._refs[after] = 1
            taken.append(after)
        return tuple(taken)

    def incref(self, block_ids: Sequence[BlockId]) -> None:
        """Add a reference to blocks that are cached or in use."""
        for block_id in block_ids:
            if not self._refs[block_id]:
                if block_id not in self._evictable:
                    raise ValueError(f"block {block_id} is free and cannot be shared")
                del self._evictable[block_id]
            self._refs[block_id] += 1

    def decref(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference each; give the blocks of one sequence in token order."""
        for block_id in reversed(block_ids):  # deepest first into the eviction order
            if self._refs[block_id] < 1:
                raise ValueError(f"block {block_id} is not in use: freed twice")
            self._refs[block_id] -= 1
            if self._refs[block_id]:
                continue
            if self._hashes[block_id] is None:
                self._free_block(block_id)
            else:
                self._evictable[block_id] = None

    def seal(
        self,
        block_id: BlockId,
        block_hash: BlockHash,
        parent: BlockHash | None,
        *,
        is_public: bool = True,
    ) -> BlockId:
        """Declare a full block stable and enter it in the prefix cache.

        When another block already holds this content, this one is freed and the other is
        returned with the reference: the caller puts it in its block table.

        Args:
            parent: hash of the block before, whose cached block the caller holds too.
            is_public: whether other processes may be told that this content is here.
        """
        self._check_being_written(block_id)
        if self._refs[block_id] != 1:
            raise ValueError(f"block {block_id} is shared and cannot be sealed")
        twin = self.cache.get(block_hash)
        if twin is not None:
            self.incref((twin,))
            self.decref((block_id,))
            return twin
        if parent is not None and not self._refs[self.cache.entry(parent).block_id]:
            raise ValueError(f"block {block_id} is sealed by one who does not hold its parent")
        self.cache.add(block_hash, parent, block_id, is_public=is_public)
        self._hashes[block_id] = block_hash
        self._gens[block_id] += np.uint64(1)
        return block_id

    def freeze(self, block_id: BlockId) -> None:
        """Declare a block stable that never enters the prefix cache, such as a partial last one."""
        self._check_being_written(block_id)
        self._gens[block_id] += np.uint64(1)

    def uncache(self, block_id: BlockId) -> bool:
        """Take a block in use out of the prefix cache; False while a cached block follows it.

        Its holder may then give up the blocks before it. Its content stays, nobody new gets it.
        """
        block_hash = self._hashes[block_id]
        if not self._refs[block_id] or block_hash is None:
            raise ValueError(f"block {block_id} is not a cached block in use")
        if self.cache.num_children(block_hash):
            return False
        self.cache.remove(block_hash)
        self._hashes[block_id] = None
        return True

    def drop_cached(self) -> int:
        """Forget all cached content that nobody uses; return how many blocks became free."""
        count = len(self._evictable)
        for _ in range(count):
            self._evict_one()
        return count

    # -- inside ----------------------------------------------------------------------------

    def _check_being_written(self, block_id: BlockId) -> None:
        if not self._refs[block_id]:
            raise ValueError(f"block {block_id} is not in use")
        if self.is_sealed(block_id):
            raise ValueError(f"block {block_id} is sealed already")

    def _take(self, after: BlockId | None) -> BlockId:
        if not self._free:
            self._evict_one()
        if after is not None:
            follower = BlockId(after + 1)
            if follower in self._free:
                del self._free[follower]
                return follower
        block_id, _ = self._free.popitem(last=False)
        return block_id

    def _evict_one(self) -> None:
        block_id, _ = self._evictable.popitem(last=False)
        block_hash = self._hashes[block_id]
        assert block_hash is not None, "only cached blocks are evictable"
        self.cache.remove(block_hash)
        self._hashes[block_id] = None
        self._free_block(block_id)

    def _free_block(self, block_id: BlockId) -> None:
        self._gens[block_id] += np.uint64(1 if self.is_sealed(block_id) else 2)
        self._free[block_id] = None

    def check_integrity(self) -> None:
        """Raise AssertionError when a block is in no or two places, or a parity is wrong."""
        assert len(self._free) + len(self._evictable) + self.counts().in_use == self.num_blocks
        for idx in range(self.num_blocks):
            self._check_block(BlockId(idx))
        assert len(self.cache) == sum(block_hash is not None for block_hash in self._hashes)
        self.cache.check_integrity()
        self._check_eviction_order()

    def _check_block(self, block_id: BlockId) -> None:
        block_hash, refs = self._hashes[block_id], self._refs[block_id]
        assert refs >= 0
        assert (block_id in self._free) == (not refs and block_hash is None)
        assert (block_id in self._evictable) == (not refs and block_hash is not None)
        if block_id in self._free:
            assert not self.is_sealed(block_id)
        if block_hash is not None:
            assert self.is_sealed(block_id)
            assert self.cache.get(block_hash) == block_id
            parent = self.cache.entry(block_hash).parent
            if refs and parent is not None:
                parent_block = self.cache.get(parent)
                assert parent_block is not None
                assert self._refs[parent_block], "a block is in use, the one before it is not"

    def _check_eviction_order(self) -> None:
        evicted: dict[BlockHash, int] = {}  # hash -> children that would be gone by then
        for block_id in self._evictable:
            block_hash = self._hashes[block_id]
            assert block_hash is not None
            assert evicted.get(block_hash, 0) == self.cache.num_children(block_hash)
            parent = self.cache.entry(block_hash).parent
            if parent is not None:
                evicted[parent] = evicted.get(parent, 0) + 1
