"""Which rows of our blocks a peer's block fills, when theirs are longer or shorter; pure.

A peer's block is a slot. Slots and blocks both count the prompt's tokens from its start, so a
slot is one or more pieces, each inside one block of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.common.ids import BlockId


class Piece(NamedTuple):
    """Rows of one slot and where they go."""

    block: int  # index of our block in the prompt; the tail comes after the full ones
    slot_rows: tuple[int, int]
    block_rows: tuple[int, int]


class Placement:
    """Of one receive. `have` and blocks are ours, slots are the peer's."""

    def __init__(
        self, num_tokens: int, slot_size: int, block_size: int, have: Sequence[bool]
    ) -> None:
        self.num_tokens = num_tokens
        self.num_slots = num_tokens // slot_size  # full ones
        self.num_blocks = num_tokens // block_size
        self._slot_size = slot_size
        self._block_size = block_size
        self._have = (*have, False)  # a tail is never had
        self._dest: tuple[BlockId | None, ...] = ()
        self._missing: list[int] = []  # tokens of each of our blocks

    @property
    def tail_valid(self) -> int:
        """Tokens in our partial last block."""
        return self.num_tokens % self._block_size

    def slots_had(self) -> tuple[bool, ...]:
        """Return which full slots need not come: every row of them is in a block we have."""
        return tuple(
            all(self._have[piece.block] for piece in self.pieces(slot))
            for slot in range(self.num_slots)
        )

    def bind(
        self, block_ids: Sequence[BlockId | None], tail: BlockId | None
    ) -> tuple[list[BlockId | None], BlockId | None]:
        """Take the blocks to write.

        Returns:
            One entry a slot and the tail slot's, None where a block is missing. They say whether
            a slot can be written, not where: `dest_of` does.
        """
        if self._dest:
            return [], None  # bound: only the first reservation counts, at the receiver too
        self._dest = (*block_ids, tail)
        size = self._block_size
        self._missing = [
            min(size, self.num_tokens - index * size) for index in range(self.num_blocks + 1)
        ]
        fits = len(block_ids) == self.num_blocks and all(
            had or block is not None for had, block in zip(self._have, block_ids, strict=False)
        )
        if not fits or (self.tail_valid and tail is None):
            return [], None
        slots: list[BlockId | None] = [BlockId(slot) for slot in range(self.num_slots)]
        has_tail = self.num_tokens % self._slot_size != 0
        return slots, BlockId(self.num_slots) if has_tail else None

    def pieces(self, slot: int) -> list[Piece]:
        """Return where the rows of a slot go."""
        start = slot * self._slot_size
        end = min(start + self._slot_size, self.num_tokens)
        pieces: list[Piece] = []
        at = start
        while at < end:
            index, row = divmod(at, self._block_size)
            count = min(self._block_size - row, end - at)
            pieces.append(Piece(index, (at - start, at - start + count), (row, row + count)))
            at += count
        return pieces

    def dest_of(self, index: int) -> BlockId | None:
        """Return the block to write, None where it is had."""
        return None if self._have[index] else self._dest[index]

    def note_written(self, piece: Piece) -> bool:
        """Count rows that are written; True when a full block has all of its own."""
        lo, hi = piece.block_rows
        self._missing[piece.block] -= hi - lo
        return self._missing[piece.block] == 0 and piece.block < self.num_blocks
