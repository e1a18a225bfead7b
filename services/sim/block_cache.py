"""Which units of prompts a worker holds: least recently used leaves first. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockCache:
    """A prefix-closed cache: a unit is here only while all units before it are.

    Every use touches a chain from its end to its beginning, so a unit is always younger than
    those that follow it, and the oldest one is a leaf.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a cache holds at least one unit")
        self._capacity = capacity
        self._units: OrderedDict[int, int] = OrderedDict()  # unit -> tokens of it that are filled

    def __len__(self) -> int:
        return len(self._units)

    def units(self) -> list[tuple[int, int]]:
        """Return all units held, each with its filled tokens."""
        return list(self._units.items())

    def match(self, units: Sequence[int]) -> int:
        """Return how many leading units are held."""
        return next((i for i, unit in enumerate(units) if unit not in self._units), len(units))

    def insert(
        self, units: Sequence[int], num_tokens: int, unit_tokens: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Hold a prompt from now on; return (added, evicted), each with its filled tokens."""
        kept = units[: self._capacity]
        added = []
        for place in range(len(kept) - 1, -1, -1):
            unit = kept[place]
            filled = min(unit_tokens, num_tokens - place * unit_tokens)
            if unit not in self._units:
                added.append((unit, filled))
            self._units[unit] = max(filled, self._units.get(unit, 0))
            self._units.move_to_end(unit)
        evicted = []
        while len(self._units) > self._capacity:
            evicted.append(self._units.popitem(last=False))
        return added[::-1], evicted
