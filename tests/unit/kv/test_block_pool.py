"""Properties of the block pool: every block in one place, generations that tell the truth."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from services.common.errors import BlocksExhausted
from services.common.ids import BlockHash, BlockId
from services.kv.block_pool import BlockPool

NUM_BLOCKS = 9


def block_hash(*path: int) -> BlockHash:
    """The name of a chain."""
    return BlockHash(hashlib.sha256(repr(path).encode()).digest()[:16])


def sealed_chain(pool: BlockPool, *path: int) -> tuple[BlockId, ...]:
    """Allocate and seal a chain of one block per element, as one sequence would."""
    blocks: list[BlockId] = []
    for depth in range(len(path)):
        (block_id,) = pool.allocate(1, after=blocks[-1] if blocks else None)
        parent = block_hash(*path[:depth]) if depth else None
        blocks.append(pool.seal(block_id, block_hash(*path[: depth + 1]), parent))
    return tuple(blocks)


class Sequence:
    """What one request holds: a chain of sealed blocks, then blocks being written."""

    def __init__(self) -> None:
        self.path: tuple[int, ...] = ()
        self.blocks: list[BlockId] = []

    @property
    def sealed(self) -> int:
        return len(self.path)


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share, grow, seal, freeze and go in any order (I1, I2, I3)."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.gens = np.zeros(NUM_BLOCKS, dtype=np.uint64)
        self.pool = BlockPool(NUM_BLOCKS, self.gens)
        self.content: dict[BlockId, BlockHash] = {}  # what each block last held when sealed
        self.held: list[Sequence] = []
        self.last_gens = self.gens.copy()
        self.known: set[BlockHash] = set()  # as a consumer of the deltas sees the cache

    @rule(target=sequences, path=st.lists(st.integers(0, 2), max_size=5))
    def begin(self, path: list[int]) -> Sequence:
        seq = Sequence()
        hashes = [block_hash(*path[: i + 1]) for i in range(len(path))]
        cached = self.pool.cache.match(hashes)
        for name, block_id in zip(hashes, cached, strict=False):
            assert self.content[block_id] == name
        self.pool.incref(cached)
        seq.blocks.extend(cached)
        seq.path = tuple(path[: len(cached)])
        self.held.append(seq)
        return seq

    @rule(seq=sequences, num_blocks=st.integers(0, 4))
    def grow(self, seq: Sequence, num_blocks: int) -> None:
        if num_blocks > self.pool.num_available:
            with pytest.raises(BlocksExhausted):
                self.pool.allocate(num_blocks)
            return
        taken = self.pool.allocate(num_blocks, after=seq.blocks[-1] if seq.blocks else None)
        held = {block_id for other in self.held for block_id in other.blocks}
        assert not held & set(taken)
        for block_id in taken:
            assert not self.pool.is_sealed(block_id)
            self.content.pop(block_id, None)
        seq.blocks.extend(taken)

    @rule(seq=sequences, step=st.integers(0, 2))
    def seal(self, seq: Sequence, step: int) -> None:
        if seq.sealed == len(seq.blocks):
            return
        block_id = seq.blocks[seq.sealed]
        if self.pool.is_sealed(block_id):  # frozen
            return
        parent = block_hash(*seq.path) if seq.path else None
        seq.path += (step,)
        name = block_hash(*seq.path)
        kept = self.pool.seal(block_id, name, parent)
        self.content.setdefault(kept, name)
        assert self.content[kept] == name
        seq.blocks[seq.sealed - 1] = kept

    @rule(seq=sequences)
    def freeze(self, seq: Sequence) -> None:
        if seq.sealed < len(seq.blocks) and not self.pool.is_sealed(seq.blocks[-1]):
            self.pool.freeze(seq.blocks[-1])
            assert self.pool.is_sealed(seq.blocks[-1])

    @rule(target=sequences, seq=sequences)
    def fork(self, seq: Sequence) -> Sequence:
        child = Sequence()
        child.path, child.blocks = seq.path, seq.blocks[: seq.sealed]
        self.pool.incref(child.blocks)
        self.held.append(child)
        return child

    @rule(target=sequences, seq=consumes(sequences))
    def end(self, seq: Sequence) -> object:
        self.pool.decref(seq.blocks)
        self.held.remove(seq)
        return multiple()

    @rule()
    def publish(self) -> None:
        added, removed = self.pool.cache.take_delta()
        assert not set(added) & self.known
        assert set(removed) <= self.known
        self.known = (self.known - set(removed)) | set(added)
        assert self.known == set(self.pool.cache.hints())

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        self.pool.check_integrity()
        refs: dict[BlockId, int] = {}
        for seq in self.held:
            for block_id in seq.blocks:
                refs[block_id] = refs.get(block_id, 0) + 1
        for idx in range(NUM_BLOCKS):
            assert self.pool.num_refs(BlockId(idx)) == refs.get(BlockId(idx), 0)
        counts = self.pool.counts()
        assert counts.free + counts.cached + counts.in_use == counts.total == NUM_BLOCKS
        assert counts.in_use == len(refs)

    @invariant()
    def generations_only_rise(self) -> None:
        assert (self.gens >= self.last_gens).all()
        self.last_gens = self.gens.copy()

    def teardown(self) -> None:
        for seq in self.held:
            self.pool.decref(seq.blocks)
        self.pool.check_integrity()
        assert self.pool.counts().in_use == 0


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_generation_differs_whenever_content_may_have_changed() -> None:
    """A reader that saw an even number sees another one after any reuse (seqlock)."""
    pool = BlockPool(1)
    (block_id,) = pool.allocate(1)
    seen = [pool.gen(block_id)]
    pool.seal(block_id, block_hash(1), None)
    seen.append(pool.gen(block_id))
    pool.decref((block_id,))
    seen.append(pool.gen(block_id))  # cached: still stable
    pool.allocate(1)
    seen.append(pool.gen(block_id))
    pool.decref((block_id,))
    pool.allocate(1)
    seen.append(pool.gen(block_id))
    assert [gen % 2 for gen in seen] == [1, 0, 0, 1, 1]
    assert seen[1] == seen[2]
    assert sorted(set(seen)) == [seen[0], seen[1], seen[3], seen[4]]


def test_evicts_least_recently_used_first_and_the_deepest_first() -> None:
    pool = BlockPool(6)
    old, new = sealed_chain(pool, 1, 1, 1), sealed_chain(pool, 2, 2, 2)
    pool.decref(old)
    pool.decref(new)
    pool.incref(old)  # used again: now the other is older
    pool.decref(old)
    for gone in (3, 2, 1):
        pool.allocate(1)
        chain = [block_hash(*((2,) * (i + 1))) for i in range(3)]
        assert len(pool.cache.match(chain)) == gone - 1
    assert len(pool.cache.match([block_hash(1), block_hash(1, 1), block_hash(1, 1, 1)])) == 3


def test_prefers_runs_of_ids() -> None:
    pool = BlockPool(8)
    first = pool.allocate(3)
    other = pool.allocate(1)
    pool.decref(other)
    assert pool.allocate(2, after=first[-1]) == (first[-1] + 1, first[-1] + 2)


def test_a_twin_is_shared_instead_of_kept() -> None:
    pool = BlockPool(4)
    (mine,) = sealed_chain(pool, 1)
    (other,) = pool.allocate(1)
    assert pool.seal(other, block_hash(1), None) == mine
    assert pool.num_refs(mine) == 2
    assert pool.counts().free == 3


def test_misuse_raises() -> None:
    pool = BlockPool(4)
    (block_id,) = pool.allocate(1)
    pool.seal(block_id, block_hash(1), None)
    with pytest.raises(ValueError, match="sealed already"):
        pool.seal(block_id, block_hash(1), None)
    with pytest.raises(ValueError, match="sealed already"):
        pool.freeze(block_id)
    (child,) = pool.allocate(1)
    with pytest.raises(ValueError, match="not cached"):
        BlockPool(1).cache.add(block_hash(1, 1), block_hash(1), child)
    pool.decref((block_id,))
    with pytest.raises(ValueError, match="does not hold its parent"):
        pool.seal(child, block_hash(1, 1), block_hash(1))
    with pytest.raises(ValueError, match="freed twice"):
        pool.decref((block_id,))
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.incref((BlockId(3),))


def test_hints_name_every_fourth_block_of_a_chain_and_go_first() -> None:
    """A hint at depth 8 vouches for blocks 1 to 8: it leaves before any of them does."""
    pool, path = BlockPool(9), tuple(range(9))
    blocks = sealed_chain(pool, *path)
    fourth, eighth = block_hash(*path[:4]), block_hash(*path[:8])
    assert pool.cache.take_delta() == ((fourth, eighth), ())
    assert pool.cache.hints() == (fourth, eighth)
    pool.decref(blocks)
    pool.allocate(1)
    assert pool.cache.take_delta() == ((), ())
    pool.allocate(1)
    assert pool.cache.take_delta() == ((), (eighth,))
    assert len(pool.cache.match([block_hash(*path[: i + 1]) for i in range(9)])) == 7


def test_dropping_the_cache_keeps_what_is_in_use() -> None:
    """A block in use and all before it stay cached; the rest is free and told as removed."""
    pool = BlockPool(NUM_BLOCKS)
    used, idle = sealed_chain(pool, 1, 2), sealed_chain(pool, 1, 3, 4, 5)
    pool.decref(idle)
    pool.cache.take_delta()
    assert pool.drop_cached() == 3
    assert pool.cache.take_delta() == ((), (block_hash(1, 3, 4, 5),))
    assert pool.cache.match([block_hash(1), block_hash(1, 2)]) == used
    assert pool.counts().free == NUM_BLOCKS - 2
    pool.check_integrity()
    assert pool.drop_cached() == 0
