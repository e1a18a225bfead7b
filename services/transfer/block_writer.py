"""Writes received blocks into the pool and judges them; nothing else writes there for a peer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from services.common.ids import BlockId
from services.kv.block_copy import (
    CopyBlocks,
    CopyParts,
    are_stable,
    pull_blocks,
    pull_with_digests,
)
from services.kv.block_table import MAX_POOL_BLOCKS
from services.kv.digest import block_digests, tail_digest
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.transfer.conversion import Conversion
from services.transfer.receiver import Pull, ReceiverTransfer
from services.transfer.values import U64Array
from services.transfer.zmq_plane import Block

_IN_CACHE_BYTES = 512 << 10  # of a core's own cache, read and written

BAD_LENGTH, BAD_GENERATION, BAD_DIGEST = "length", "generation", "digest"


class BlockWriter:
    """One per sink, used by its thread only. Verdicts are None or what is wrong."""

    def __init__(
        self,
        memory: KvPoolMemory,
        layout: KvLayout,
        digest_sampling: int,
        copy: CopyParts | None = None,
        num_threads: int = 1,
    ) -> None:
        """Args:
        copy: what copies parts of blocks out of a peer's pool; None is the plain way.
        num_threads: that share long copies the plain way.
        """
        self._memory = memory
        self._layout = layout
        self._digest_sampling = digest_sampling
        self._is_plain = copy is None
        self._copy = copy or functools.partial(pull_blocks, num_threads=num_threads)
        self._num_threads = num_threads
        self._num_pulled = 0

    def receive(
        self,
        machine: ReceiverTransfer,
        index: int,
        dest: BlockId,
        recv_into: Callable[[Block], bool],
    ) -> str | None:
        """Write a block that comes off a socket; always verified."""
        if not recv_into(self._memory.blocks[dest]):
            return BAD_LENGTH
        return self._judge(machine, index, dest)

    def pull(
        self,
        machine: ReceiverTransfer,
        pool: KvPoolMemory,
        pulls: Sequence[Pull],
        copy: CopyBlocks | None = None,
    ) -> list[str | None]:
        """Copy blocks out of a peer's pool; digests are verified at the configured rate.

        Args:
            copy: what reads this pool, if it is not memory like ours.
        """
        if any(pull.source_block >= pool.num_blocks for pull in pulls):
            return [BAD_GENERATION] * len(pulls)  # the peer talks nonsense: believe none of it
        by = copy or self._copy
        if self._digest_sampling > 1:
            return self._pull(machine, pool, pulls, by)
        if copy is None and self._is_plain:
            verdicts = self._pull_digested(machine, pool, pulls)
            if verdicts is not None:
                return verdicts
        # A few at a time: what was copied is read again at once, while it is in the cache.
        few = max(1, _IN_CACHE_BYTES // self._layout.block_bytes)
        parts = (pulls[at : at + few] for at in range(0, len(pulls), few))
        return [verdict for part in parts for verdict in self._pull(machine, pool, part, by)]

    def _pull(
        self,
        machine: ReceiverTransfer,
        pool: KvPoolMemory,
        pulls: Sequence[Pull],
        copy: CopyBlocks,
    ) -> list[str | None]:
        good = copy(
            pool,
            [pull.source_block for pull in pulls],
            [pull.gen for pull in pulls],
            self._memory.blocks,
            [pull.dest for pull in pulls],
        )
        verdicts: list[str | None] = []
        unverified: list[Pull] = []
        for pull, is_good in zip(pulls, good, strict=True):
            self._num_pulled += is_good
            if not is_good:
                verdicts.append(BAD_GENERATION)
            elif self._num_pulled % self._digest_sampling:
                verdicts.append(None)
                unverified.append(pull)
            else:
                verdicts.append(self._judge(machine, pull.index, pull.dest))
        self._store_all(machine, unverified)
        return verdicts

    def _pull_digested(
        self, machine: ReceiverTransfer, pool: KvPoolMemory, pulls: Sequence[Pull]
    ) -> list[str | None] | None:
        """Copy and verify all in one call of the library, if it can."""
        found = pull_with_digests(
            pool,
            [pull.source_block for pull in pulls],
            [pull.gen for pull in pulls],
            self._memory,
            [pull.dest for pull in pulls],
            num_threads=self._num_threads,
        )
        if found is None:
            return None
        verdicts: list[str | None] = []
        right: list[Pull] = []
        for pull, is_good, digests in zip(pulls, *found, strict=True):
            if not is_good:
                verdicts.append(BAD_GENERATION)
            elif pull.index == machine.num_blocks:  # the tail, of which a part counts
                verdicts.append(self._judge(machine, pull.index, pull.dest))
            elif digests.tobytes() != machine.digests_of(pull.index).tobytes():
                verdicts.append(BAD_DIGEST)
            else:
                verdicts.append(None)
                right.append(pull)
        self._store_all(machine, right)
        return verdicts

    def verify_in_place(
        self, machine: ReceiverTransfer, pool: KvPoolMemory, pulls: Sequence[Pull]
    ) -> list[str | None]:
        """Verify blocks that will be read in the peer's pool; digests at the configured rate."""
        rows = np.array([pull.source_block for pull in pulls], np.int64)
        gens = np.array([pull.gen for pull in pulls], np.uint64)
        if (rows >= min(pool.num_blocks, MAX_POOL_BLOCKS)).any():
            return [BAD_GENERATION] * len(pulls)  # the peer talks nonsense: believe none of it
        before = are_stable(pool, rows, gens)
        has_digests = [self._has_digests(machine, pool, pull) for pull in pulls]
        is_stable = before & are_stable(pool, rows, gens)
        return [
            BAD_GENERATION if not stable else None if right else BAD_DIGEST
            for stable, right in zip(is_stable.tolist(), has_digests, strict=True)
        ]

    def _has_digests(self, machine: ReceiverTransfer, pool: KvPoolMemory, pull: Pull) -> bool:
        """Read a block where it is, if it is one of those that are checked."""
        self._num_pulled += 1
        if self._num_pulled % self._digest_sampling:
            return True
        found = block_digests(self._layout, pool.blocks[pull.source_block])
        return bool((found == machine.digests_of(pull.index)).all())

    def receive_converted(
        self,
        machine: ReceiverTransfer,
        conversion: Conversion,
        index: int,
        recv_into: Callable[[Block], bool],
        digests: U64Array | None,
    ) -> str | None:
        """Take a frame that is not a block of ours; `digests` are those its message brought."""
        if not recv_into(conversion.frame):
            return BAD_LENGTH
        expected = machine.digests_of(index) if digests is None else digests
        if not conversion.is_right(index, expected, of_frame=digests is not None):
            return BAD_DIGEST
        conversion.store(index)
        return None

    def pull_converted(
        self,
        machine: ReceiverTransfer,
        conversion: Conversion,
        pool: KvPoolMemory,
        pulls: Sequence[Pull],
        copy: CopyBlocks | None = None,
    ) -> list[str | None]:
        """Copy blocks of another layout out of a peer's pool; verified at the configured rate."""
        return [self._pull_converted(machine, conversion, pool, pull, copy) for pull in pulls]

    def _pull_converted(
        self,
        machine: ReceiverTransfer,
        conversion: Conversion,
        pool: KvPoolMemory,
        pull: Pull,
        copy: CopyBlocks | None,
    ) -> str | None:
        if pull.source_block >= pool.num_blocks:
            return BAD_GENERATION
        if copy is None:
            is_stable = conversion.pull(pool, pull.source_block, pull.gen, self._copy)
        else:
            is_stable = conversion.pull_by(pool, pull.source_block, pull.gen, copy)
        if not is_stable:
            return BAD_GENERATION
        self._num_pulled += 1
        is_sampled = self._num_pulled % self._digest_sampling == 0
        expected = machine.digests_of(pull.index)
        if is_sampled and not conversion.is_right(pull.index, expected, of_frame=False):
            return BAD_DIGEST
        conversion.store(pull.index)
        return None

    def _judge(self, machine: ReceiverTransfer, index: int, dest: BlockId) -> str | None:
        block = self._memory.blocks[dest]
        announced = machine.digests_of(index)
        if index == machine.num_blocks:
            found = tail_digest(self._layout, block, machine.tail_valid)
            return None if found == int(announced[0]) else BAD_DIGEST
        if block_digests(self._layout, block).tobytes() != announced.tobytes():
            return BAD_DIGEST
        self._store(machine, index, dest)
        return None

    def _store(self, machine: ReceiverTransfer, index: int, dest: BlockId) -> None:
        if index < machine.num_blocks:
            self._memory.digests[dest] = machine.digests_of(index)

    def _store_all(self, machine: ReceiverTransfer, pulls: Sequence[Pull]) -> None:
        full = [pull for pull in pulls if pull.index < machine.num_blocks]
        if full:
            # Flat first: numpy takes thrice as long over a list of rows.
            digests = np.concatenate([machine.digests_of(pull.index) for pull in full])
            dests = np.array([pull.dest for pull in full], np.int64)
            self._memory.digests[dests] = digests.reshape(len(full), -1)
