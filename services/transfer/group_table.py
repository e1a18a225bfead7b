"""How many groups an end may have, which one makes room for a new one, and their names; pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def group_name(prefill_incarnation: int, decode_incarnation: int, number: int) -> str:
    """Name one group: another life of either worker, or another try of a pair, is another name."""
    return f"kv/{prefill_incarnation:016x}/{decode_incarnation:016x}/{number}"


class GroupTable(Generic[K, V]):
    """Groups by peer, least recently used first, and apart from them those that are ending."""

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._live: OrderedDict[K, V] = OrderedDict()
        self._dying: set[V] = set()

    def get(self, key: K) -> V | None:
        """Return a peer's group."""
        return self._live.get(key)

    def use(self, key: K) -> None:
        """Note that a group is used."""
        self._live.move_to_end(key)

    def all(self) -> list[V]:
        """Return every live group, least recently used first."""
        return list(self._live.values())

    def dying(self) -> list[V]:
        """Return the groups that are ending."""
        return list(self._dying)

    def has_room(self) -> bool:
        """Tell whether one more fits."""
        return len(self._live) < self._max_groups

    @property
    def is_choked(self) -> bool:
        """Tell whether so many aborts hang that no more memory may be given to groups."""
        return len(self._dying) >= self._max_groups

    def evictable(self, is_idle: Callable[[V], bool]) -> tuple[K, V] | None:
        """Return the idle group that was used longest ago."""
        for key, group in self._live.items():
            if is_idle(group):
                return key, group
        return None

    def add(self, key: K, group: V) -> None:
        """Take a new group in; the caller has asked `has_room`."""
        assert key not in self._live
        self._live[key] = group

    def bury(self, key: K) -> V | None:
        """Note that a peer's group is ending; its slots are held until `forget`."""
        group = self._live.pop(key, None)
        if group is not None:
            self._dying.add(group)
        return group

    def forget(self, group: V) -> None:
        """Note that an ended group's slots are free."""
        self._dying.discard(group)

    @property
    def num_live(self) -> int:
        """Groups in use or being built."""
        return len(self._live)

    @property
    def num_dying(self) -> int:
        """Groups whose abort has not returned yet: their slots are quarantined."""
        return len(self._dying)
