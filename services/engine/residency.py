"""Blocks of sequences: taking, growing, sealing, forking and giving back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from typing import Protocol

from services.common.errors import BlocksExhausted
from services.common.ids import BlockId
from services.engine.attachment import AttachedChanged, Attachment
from services.engine.request import Sequence
from services.kv.attached import AttachedKv
from services.kv.block_pool import BlockPool
from services.kv.block_table import is_own
from services.kv.form import EXACT, UNKNOWN


class BlockContent(Protocol):
    """What must happen to the bytes when blocks change hands; called on the engine thread."""

    def seal(self, block_id: BlockId) -> None:
        """Store the digests of a full block, before its generation says it is stable."""
        ...

    def freeze(self, block_id: BlockId) -> None:
        """Make a partial block readable by the sender, before its generation says so."""
        ...

    def copy(self, src: BlockId, dst: BlockId) -> None:
        """Copy a block."""
        ...

    def fetch(self, block_ids: Seq[BlockId]) -> None:
        """Make blocks the receiver wrote readable by the model."""
        ...

    def copy_home(self, kv: AttachedKv, at: int, dst: BlockId, *, verify: bool) -> bool:
        """Copy an attached block and its digests into ours; False if it has changed."""
        ...


class Residency:
    """Moves blocks between the pool and block tables; knows no request states."""

    def __init__(
        self,
        pool: BlockPool,
        content: BlockContent,
        block_size: int,
        on_detached: Callable[[Sequence], None],
    ) -> None:
        """Args:
        on_detached: told when a sequence no longer reads a peer's pool.
        """
        self.pool = pool
        self._content = content
        self._on_detached = on_detached
        self._block_size = block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    def cached_prefix(self, seq: Sequence) -> tuple[BlockId, ...]:
        """Cached blocks this sequence could share when it is computed here.

        At least the last known token is left to compute: its logits are wanted, and a shared
        block is never written.
        """
        limit = (seq.num_tokens - 1) // self._block_size
        return self.pool.cache.match(seq.known_hashes()[:limit])

    def cost(self, seq: Sequence, cached: Seq[BlockId]) -> int:
        """Blocks `take` would remove from those available."""
        fresh = self.blocks_for(seq.num_tokens) - len(cached)
        return fresh + self.pool.num_evictable(cached)

    def take(self, seq: Sequence, cached: Seq[BlockId]) -> None:
        """Give a sequence without blocks all it needs for its known tokens."""
        assert not len(seq.table)
        fresh = self.blocks_for(seq.num_tokens) - len(cached)
        self.share(seq, cached)
        try:
            blocks = self.pool.allocate(fresh, after=cached[-1] if cached else None)
        except BlocksExhausted:
            self.release(seq)
            raise
        for block_id in blocks:
            seq.table.append(block_id)

    def share(self, seq: Sequence, cached: Seq[BlockId]) -> None:
        """Reference cached blocks as the beginning of an empty table."""
        self.pool.incref(cached)
        for block_id in cached:
            seq.table.append(block_id)
        seq.num_sealed = len(cached)
        seq.num_computed = len(cached) * self._block_size

    def extend(self, seq: Sequence, num_blocks: int) -> tuple[BlockId, ...]:
        """Append fresh blocks, or raise BlocksExhausted."""
        last = seq.table[-1] if len(seq.table) and is_own(seq.table[-1]) else None
        blocks = self.pool.allocate(num_blocks, after=last)
        for block_id in blocks:
            seq.table.append(block_id)
        return blocks

    def release(self, seq: Sequence) -> None:
        """Give all blocks back; sealed ones stay cached until evicted."""
        self.pool.decref(seq.table.own_ids)
        seq.table = type(seq.table)(self._block_size)
        seq.num_computed = 0
        seq.num_sealed = 0
        seq.kv_form = EXACT  # whatever comes next is computed here, or says what it is
        self._detach(seq)

    def seal_computed(self, seq: Sequence) -> None:
        """Seal every block whose tokens are all computed, in order.

        A block is cached only after the one before it, so none that follows an attached one is.
        """
        while self._has_unsealed(seq):
            self._seal_next(seq, is_received=False)

    def seal_received(self, seq: Sequence, written: Seq[BlockId]) -> None:
        """Take over blocks the receiver wrote; it has stored the digests of the full ones."""
        self._content.fetch(written)
        seq.num_computed = seq.num_tokens
        while self._has_unsealed(seq):
            self._seal_next(seq, is_received=True)

    def _has_unsealed(self, seq: Sequence) -> bool:
        is_full = (seq.num_sealed + 1) * self._block_size <= seq.num_computed
        return is_full and is_own(seq.table[seq.num_sealed])

    def attach(self, seq: Sequence, kv: AttachedKv) -> None:
        """Read blocks in a peer's pool; those that were reserved for them go back."""
        unused = [seq.table[index] for index in kv.indexes]
        for at, index in enumerate(kv.indexes):
            seq.table.replace(index, kv.entry(at))
        self.pool.decref(unused)
        seq.attached = Attachment(kv, verifies=kv.verifies_moves)

    def move_in(self, seq: Sequence, limit: int) -> int:
        """Move up to `limit` attached blocks into our pool, in token order; return how many.

        Raises:
            BlocksExhausted: we have no block for the next one; those before it have moved.
            AttachedChanged: the next one is not what was attached.
        """
        moved = 0
        while moved < limit and seq.attached is not None and seq.attached.num_left:
            self.seal_computed(seq)  # blocks of ours that lie between
            self._move_next(seq, seq.attached)
            moved += 1
        if seq.attached is not None and not seq.attached.num_left:
            self.seal_computed(seq)
            self._detach(seq)
        return moved

    def _move_next(self, seq: Sequence, attached: Attachment) -> None:
        idx = seq.num_sealed
        assert attached.kv.indexes[attached.num_moved] == idx, "blocks move in token order"
        block_hash = seq.block_hash(idx)
        assert seq.kv_form == EXACT, "only exact KV is attached"
        kept = self.pool.cache.get(block_hash)
        if kept is not None:
            self.pool.incref((kept,))  # we have its content already
        else:
            (kept,) = self.pool.allocate(1, after=seq.table[idx - 1] if idx else None)
            at, verify = attached.num_moved, attached.verifies
            if not self._content.copy_home(attached.kv, at, kept, verify=verify):
                self.pool.decref((kept,))
                raise AttachedChanged(f"block {idx} has changed in its owner's pool")
            self.pool.seal(kept, block_hash, seq.parent_hash(idx))
        seq.table.replace(idx, kept)
        seq.num_sealed += 1
        attached.num_moved += 1

    def _detach(self, seq: Sequence) -> None:
        if seq.attached is not None:
            seq.attached = None
            self._on_detached(seq)

    def _seal_next(self, seq: Sequence, *, is_received: bool) -> None:
        idx = seq.num_sealed
        block_id = seq.table[idx]
        # What is computed over KV that is not exact is of no form that could come again.
        if seq.kv_form == UNKNOWN or (seq.kv_form != EXACT and not is_received):
            if not is_received:
                self._content.seal(block_id)
            self.pool.freeze(block_id)
            seq.num_sealed += 1
            return
        block_hash = seq.cache_key(idx)
        if not is_received and self.pool.cache.get(block_hash) is None:
            self._content.seal(block_id)
        parent = seq.cache_key(idx - 1) if idx else None
        kept = self.pool.seal(block_id, block_hash, parent, is_public=seq.kv_form == EXACT)
        if kept != block_id:
            # Another sequence computed the same content first: share its block, so that the
            # chain stays one chain in the cache. Nobody was told of ours yet.
            seq.table.replace(idx, kept)
        seq.num_sealed += 1

    def unpin(self, seq: Sequence, pulled: Collection[BlockId]) -> int:
        """Give back blocks of a lent sequence that nobody reads any more; return how many.

        They stay cached and may be evicted, so the deeper ones that are still read must leave
        the cache: no cached block may outlive the one before it. Where one cannot leave, because
        others have built on it, the blocks before it stay pinned.
        """
        blocks = seq.table.block_ids
        dropped: list[BlockId] = []
        for block_id in reversed(blocks[: seq.num_sealed]):
            if block_id in pulled:
                dropped.append(block_id)
            elif not self._lets_go_of_parents(block_id):
                break
        gone = frozenset(dropped)
        seq.table = type(seq.table)(self._block_size, (b for b in blocks if b not in gone))
        seq.num_sealed -= len(dropped)
        self.pool.decref(dropped[::-1])
        return len(dropped)

    def _lets_go_of_parents(self, block_id: BlockId) -> bool:
        # One who shares it may give up the blocks before it too, or end while we still hold it, or
        # build on it: a shared block stays cached, and so its parents stay pinned.
        if not self.pool.is_cached(block_id):
            return True
        return self.pool.num_refs(block_id) == 1 and self.pool.uncache(block_id)

    def freeze_tail(self, seq: Sequence) -> tuple[BlockId | None, int]:
        """Freeze the partial last block; return it and its valid tokens, or (None, 0)."""
        valid = seq.num_computed % self._block_size
        if not valid:
            return None, 0
        block_id = seq.table[seq.num_computed // self._block_size]
        self._content.freeze(block_id)
        self.pool.freeze(block_id)
        return block_id, valid

    def fork(self, trunk: Sequence, child: Sequence) -> bool:
        """Share the trunk's full blocks with `child` and copy the partial one.

        Returns False, with nothing taken, when no block is left for the copy.
        """
        num_full = trunk.num_computed // self._block_size
        has_tail = trunk.num_computed % self._block_size != 0
        if has_tail and not self.pool.num_available:
            return False
        self.share(child, trunk.table.block_ids[:num_full])
        child.kv_form = trunk.kv_form
        if has_tail:
            (copy,) = self.extend(child, 1)
            self._content.copy(trunk.table[num_full], copy)
        child.num_computed = trunk.num_computed
        return True
