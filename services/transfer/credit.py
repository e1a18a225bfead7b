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

    def grant(self, peer: Hashable, wanted_bytes: int) -> int:
        """Return how much of `wanted_bytes` to grant now, whole blocks, and count it as used."""
        used = self.used.get(peer, 0)
        room = min(self.window_bytes - used, self.budget_bytes - sum(self.used.values()))
        size = self._whole(min(wanted_bytes, room))
        if size <= 0:
            # A block may be larger than the window; then one at a time.
            size = self.block_bytes if used == 0 else 0
        elif size < self._whole(min(wanted_bytes, self.chunk_bytes, self.window_bytes // 2)):
            return 0  # what is under way will make room for more
        self.used[peer] = used + size
        return size

    def _whole(self, size_bytes: int) -> int:
        return size_bytes // self.block_bytes * self.block_bytes
