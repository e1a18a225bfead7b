"""A peer's KV into blocks of another layout: verified as it came, then converted, then sealed."""

from __future__ import annotations

import numpy as np

from services.kv.block_copy import CopyBlocks, CopyParts
from services.kv.convert import Bytes, Part, convert_part
from services.kv.digest import block_digests, tail_digest
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.transfer.pairing import needed
from services.transfer.placement import Placement
from services.transfer.values import U64Array


def cut_frame(pool: KvLayout, block: Bytes, wire: KvLayout, rows: int) -> Bytes:
    """Return a block as it goes on the wire; a view where that is a run of its bytes.

    Args:
        rows: tokens that mean something; what a tail has behind them does not leave this process.
    """
    same_dtype = pool.kv_dtype == wire.kv_dtype
    has_scales = pool.kv_dtype == "int8"
    if same_dtype and not has_scales and pool.heads == wire.heads and rows == pool.block_size:
        layer_bytes = pool.data_bytes // pool.num_layers
        first = wire.first_layer - pool.first_layer
        return block[first * layer_bytes : (first + wire.num_layers) * layer_bytes]
    frame = np.zeros(wire.block_bytes, np.uint8)
    part = Part(wire.layers, wire.heads, (0, rows))
    convert_part(pool, block, part, wire, frame, part)
    return frame


class Conversion:
    """One receive's way from its peer's layout into ours; belongs to the sink's thread."""

    def __init__(
        self, memory: KvPoolMemory, placement: Placement, peer: KvLayout, wire: KvLayout
    ) -> None:
        self.wire = wire
        self._memory = memory
        self._own: KvLayout = memory.layout
        self._peer = peer
        self._placement = placement
        self._layers, self._heads = needed(wire, self._own)
        self.frame: Bytes = np.zeros(wire.block_bytes, np.uint8)  # what came last
        self._whole: Bytes | None = None

    @property
    def has_wire_digests(self) -> bool:
        """Tell whether DATA brings digests of its own: those announced are of other bytes."""
        return self.wire.kv_dtype != self._peer.kv_dtype

    def pull(self, pool: KvPoolMemory, source_block: int, gen: int, copy: CopyParts) -> bool:
        """Copy the part out of a mapped pool; True only if it was stable meanwhile."""
        if self._peer.has_scales:  # those of a part are not pieces of the same length
            return self.pull_by(pool, source_block, gen, copy)
        (is_good,) = copy(pool, [source_block], [gen], self.frame[None], [0], self.wire)
        return is_good

    def pull_by(self, pool: KvPoolMemory, source_block: int, gen: int, copy: CopyBlocks) -> bool:
        """Do the same where `copy` has to bring the whole block here first."""
        if self._whole is None:
            self._whole = np.zeros((1, self._peer.block_bytes), np.uint8)
        (is_good,) = copy(pool, [source_block], [gen], self._whole, [0])
        if is_good:
            self._cut(self._whole[0])
        return is_good

    def _cut(self, block: Bytes) -> None:
        part = Part(self.wire.layers, self.wire.heads, (0, self.wire.block_size))
        convert_part(self._peer, block, part, self.wire, self.frame, part)

    def is_right(self, slot: int, expected: U64Array, *, of_frame: bool) -> bool:
        """Tell whether the frame is what its digests say; for a tail, over its valid rows.

        Args:
            of_frame: the digests are those of DATA, over the whole frame even of a tail.
        """
        valid = self._placement.num_tokens % self.wire.block_size
        if slot == self._placement.num_slots and not of_frame:
            return tail_digest(self.wire, self.frame, valid) == int(expected[0])
        return bool(np.array_equal(block_digests(self.wire, self.frame), expected))

    def store(self, slot: int) -> None:
        """Convert the frame into our blocks; a full block gets its digests with its last rows."""
        for piece in self._placement.pieces(slot):
            dest = self._placement.dest_of(piece.block)
            if dest is None:
                continue
            block = self._memory.blocks[dest]
            source = Part(self._layers, self._heads, piece.slot_rows)
            target = Part(self._layers, self._heads, piece.block_rows)
            convert_part(self.wire, self.frame, source, self._own, block, target)
            if self._placement.note_written(piece):
                # Of all of the block: a part of it another shard has yet to write gets its
                # right digests when that one comes to its end.
                self._memory.digests[dest] = block_digests(self._own, block)
