"""Who holds a field, as the registry's twin remembers it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

Owner = tuple[int, int]  # slot, slot_gen
Tagged = tuple[int, int]  # slot with its tier in the two high bits, slot_gen
SLOT_MASK = 0x3FFF
TIER_SHIFT = 14
MAX_REMEMBERED = 1024
_MANY = 8  # owners that are worth remembering


@dataclass(slots=True)
class Known:
    """The owners that count, and what was read of fields that many of them hold.

    Fields share one tuple where they share their owners, so a long prompt reads few of them.
    """

    owners: AbstractSet[Owner]
    _whole: dict[int, tuple[tuple[Tagged, ...], AbstractSet[Owner]]] = field(default_factory=dict)
    _read: dict[int, tuple[tuple[Tagged, ...], Mapping[Owner, int]]] = field(default_factory=dict)

    def levels(self, held: tuple[Tagged, ...]) -> Mapping[Owner, int]:
        """Return the owners of a field that count, each with the level of its best tier."""
        if len(held) < _MANY:
            return self._levels(held)
        read = self._read.get(id(held))  # which is kept, so that no other can have its id
        if read is None:
            if len(self._read) >= MAX_REMEMBERED:
                self._read.clear()
            read = self._read[id(held)] = (held, self._levels(held))
        return read[1]

    def holders(self, held: tuple[Owner, ...]) -> AbstractSet[Owner]:
        """Return the owners of a field that count, where all hold it in GPU memory."""
        if len(held) < _MANY:
            return self.owners & set(held)
        read = self._whole.get(id(held))
        if read is None:
            if len(self._whole) >= MAX_REMEMBERED:
                self._whole.clear()
            read = self._whole[id(held)] = (held, self.owners & set(held))
        return read[1]

    def forget(self) -> None:
        """Read everything again: other owners count now."""
        self._read.clear()
        self._whole.clear()

    def _levels(self, held: tuple[Tagged, ...]) -> dict[Owner, int]:
        found: dict[Owner, int] = {}
        for tagged, gen in held:
            owner, level = (tagged & SLOT_MASK, gen), 3 - (tagged >> TIER_SHIFT)
            if owner in self.owners and level > found.get(owner, 0):
                found[owner] = level
        return found
