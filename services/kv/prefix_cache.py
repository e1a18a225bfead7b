"""Which block holds which prefix: block hash to block id, closed under "parent of"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.ids import BlockHash, BlockId
from services.kv.layout import HINT_STRIDE_BLOCKS


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One cached block. `parent` is the hash before it, None for a chain's first."""

    block_id: BlockId
    parent: BlockHash | None
    depth: int  # blocks of its chain up to and including this one
    is_public: bool  # others may be told of it


class PrefixCache:
    """Map of block hashes. A block is here only while all blocks before it are.

    Children enter after their parent and leave before it, so iteration order (insertion) has
    parents first. Its size is bounded by the pool: one entry holds one block.

    Others are told of every HINT_STRIDE_BLOCKS-th block of a chain only. Since a block leaves
    before the one ahead of it, a hint goes no later than any block it vouches for.
    """

    def __init__(self) -> None:
        self._entries: dict[BlockHash, CacheEntry] = {}
        self._num_children: dict[BlockHash, int] = {}
        self._delta: dict[BlockHash, bool] = {}  # True = added, False = removed, in order

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        return len(self._entries)

    def get(self, block_hash: BlockHash) -> BlockId | None:
        """Return the block with that content."""
        entry = self._entries.get(block_hash)
        return None if entry is None else entry.block_id

    def entry(self, block_hash: BlockHash) -> CacheEntry:
        """Return the entry of a hash that is known to be cached."""
        return self._entries[block_hash]

    def match(self, hashes: Sequence[BlockHash]) -> tuple[BlockId, ...]:
        """Return the blocks of the longest cached prefix of a chain."""
        blocks: list[BlockId] = []
        for block_hash in hashes:
            entry = self._entries.get(block_hash)
            if entry is None:
                break
            blocks.append(entry.block_id)
        return tuple(blocks)

    def add(
        self,
        block_hash: BlockHash,
        parent: BlockHash | None,
        block_id: BlockId,
        *,
        is_public: bool = True,
    ) -> None:
        """Enter a sealed block; its parent (None for the first of a chain) must be here."""
        if block_hash in self._entries:
            raise ValueError(f"block hash {block_hash.hex()} is cached already")
        depth = 1
        if parent is not None:
            if parent not in self._entries:
                raise ValueError(f"the parent of block {block_hash.hex()} is not cached")
            depth += self._entries[parent].depth
            self._num_children[parent] += 1
        entry = self._entries[block_hash] = CacheEntry(block_id, parent, depth, is_public)
        self._num_children[block_hash] = 0
        if self._is_hinted(entry):
            self._note(block_hash, is_added=True)

    def remove(self, block_hash: BlockHash) -> None:
        """Drop a block that no cached block follows."""
        if self._num_children[block_hash]:
            raise ValueError(f"block {block_hash.hex()} has cached children")
        entry = self._entries.pop(block_hash)
        del self._num_children[block_hash]
        if entry.parent is not None:
            self._num_children[entry.parent] -= 1
        if self._is_hinted(entry):
            self._note(block_hash, is_added=False)

    def num_children(self, block_hash: BlockHash) -> int:
        """Cached blocks that directly follow this one."""
        return self._num_children[block_hash]

    def hashes(self) -> tuple[BlockHash, ...]:
        """Every cached hash others may be told of, parents before children."""
        return tuple(h for h, entry in self._entries.items() if entry.is_public)

    def hints(self) -> tuple[BlockHash, ...]:
        """Every cached hash others are told of, parents before children."""
        return tuple(h for h, entry in self._entries.items() if self._is_hinted(entry))

    def take_delta(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """Return hints (added, removed) since the last call, net; no hash is in both."""
        delta, self._delta = self._delta, {}
        added = tuple(block_hash for block_hash, is_added in delta.items() if is_added)
        removed = tuple(block_hash for block_hash, is_added in delta.items() if not is_added)
        return added, removed

    def _is_hinted(self, entry: CacheEntry) -> bool:
        return entry.is_public and entry.depth % HINT_STRIDE_BLOCKS == 0

    def _note(self, block_hash: BlockHash, *, is_added: bool) -> None:
        # Opposite changes cancel: what counts is the difference since the last delta.
        if self._delta.get(block_hash) is (not is_added):
            del self._delta[block_hash]
        else:
            self._delta[block_hash] = is_added

    def check_integrity(self) -> None:
        """Raise AssertionError when the cache is not prefix-closed or the counts are wrong."""
        children: dict[BlockHash, int] = {}
        seen: set[BlockHash] = set()
        for block_hash, entry in self._entries.items():
            if entry.parent is not None:
                assert entry.parent in seen, "a block is cached before or without its parent"
                assert entry.depth == self._entries[entry.parent].depth + 1
                children[entry.parent] = children.get(entry.parent, 0) + 1
            seen.add(block_hash)
        assert self._num_children == {h: children.get(h, 0) for h in self._entries}
