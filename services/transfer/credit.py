"""How much data a decode worker lets come: windows of each peer and of all together; pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class CreditRound:
    """One round of granting; `used` is what each peer may send already."""

    block_bytes: int
    window_bytes: int
    budget_bytes: int
    chunk_bytes: int  # smaller grants are not worth a message
    used: dict[Hashable, int] = field(default_factory=dict)

    def grant(self, peer: Hashable, wanted_bytes: int, frame_bytes: int | None = None) -> int:
        """Return how much of `wanted_bytes` to grant now, and count it as used.

        Args:
            frame_bytes: size of a block of this transfer as it comes; grants are whole ones.
        """
        frame = frame_bytes or self.block_bytes
        used = self.used.get(peer, 0)
        room = min(self.window_bytes - used, self.budget_bytes - sum(self.used.values()))
        size = min(wanted_bytes, room) // frame * frame
        if size <= 0:
            # A block may be larger than the window; then one at a time.
            size = frame if used == 0 else 0
        elif size < min(wanted_bytes, self.chunk_bytes, self.window_bytes // 2) // frame * frame:
            return 0  # what is under way will make room for more
        self.used[peer] = used + size
        return size
