"""Writes received blocks into the pool and judges them; nothing else writes there for a peer."""

from __future__ import annotations

from collections.abc import Callable

from services.common.ids import BlockId
from services.kv.digest import block_digests, tail_digest
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.transfer.memfd_plane import pull_block
from services.transfer.receiver import Pull, ReceiverTransfer
from services.transfer.zmq_plane import Block

BAD_LENGTH, BAD_GENERATION, BAD_DIGEST = "length", "generation", "digest"


class BlockWriter:
    """One per sink, used by its thread only. Verdicts are None or what is wrong."""

    def __init__(self, memory: KvPoolMemory, layout: KvLayout, digest_sampling: int) -> None:
        self._memory = memory
        self._layout = layout
        self._digest_sampling = digest_sampling
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

    def pull(self, machine: ReceiverTransfer, pool: KvPoolMemory, pull: Pull) -> str | None:
        """Copy a block out of a peer's pool; its digest is verified at the configured rate."""
        dest = self._memory.blocks[pull.dest]
        if pull.source_block >= pool.num_blocks:
            return BAD_GENERATION
        if not pull_block(pool, pull.source_block, pull.gen, dest):
            return BAD_GENERATION
        self._num_pulled += 1
        if self._num_pulled % self._digest_sampling:
            self._store(machine, pull.index, pull.dest)
            return None
        return self._judge(machine, pull.index, pull.dest)

    def _judge(self, machine: ReceiverTransfer, index: int, dest: BlockId) -> str | None:
        block = self._memory.blocks[dest]
        announced = machine.digests_of(index)
        if index == machine.num_blocks:
            found = tail_digest(self._layout, block, machine.tail_valid)
            return None if found == int(announced[0]) else BAD_DIGEST
        if not (block_digests(self._layout, block) == announced).all():
            return BAD_DIGEST
        self._store(machine, index, dest)
        return None

    def _store(self, machine: ReceiverTransfer, index: int, dest: BlockId) -> None:
        if index < machine.num_blocks:
            self._memory.digests[dest] = machine.digests_of(index)
