"""Which cluster is looked at next, and when. Pure: time is given.

A cluster that is told of again and again is looked at once in a while, one that cannot be served
ever later, and every one now and then, whatever nobody told of.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_CLUSTERS = 1000
LEAST_GAP_S = 1.0  # between two passes over one cluster
EVERY_S = 120.0  # at the latest
_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One cluster."""

    namespace: str
    name: str


@dataclass(slots=True)
class _Entry:
    due_s: float
    failures: int = 0
    looked_at_s: float = float("-inf")


class Schedule:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}

    def mark(self, key: Key, now_s: float) -> bool:
        """Something is told of a cluster; False = there are too many of them."""
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= MAX_CLUSTERS:
                return False
            self._entries[key] = _Entry(now_s)
        elif not entry.failures:  # one that fails has its own time
            entry.due_s = min(entry.due_s, max(now_s, entry.looked_at_s + LEAST_GAP_S))
        return True

    def next(self, now_s: float) -> Key | None:
        """Return a cluster that is due; None = none is."""
        key = min(self._entries, key=lambda k: (self._entries[k].due_s, k), default=None)
        if key is None or self._entries[key].due_s > now_s:
            return None
        entry = self._entries[key]
        entry.looked_at_s, entry.due_s = now_s, now_s + EVERY_S
        return key

    def wait_s(self, now_s: float) -> float:
        """Return how long nothing is due."""
        due_s = min((entry.due_s for entry in self._entries.values()), default=now_s + EVERY_S)
        return max(0.0, due_s - now_s)

    def done(self, key: Key, now_s: float, again_after_s: float | None) -> None:
        """A pass went well."""
        entry = self._entries[key]
        entry.failures = 0
        if again_after_s is not None:
            entry.due_s = min(entry.due_s, now_s + max(LEAST_GAP_S, again_after_s))

    def failed(self, key: Key, now_s: float) -> float:
        """A pass did not; return after how long it is tried again."""
        entry = self._entries[key]
        entry.failures += 1
        wait_s = min(_FIRST_RETRY_S * 2.0 ** min(entry.failures - 1, 16), _LAST_RETRY_S)
        entry.due_s = now_s + wait_s
        return wait_s

    def forget(self, key: Key) -> None:
        """A cluster is gone."""
        self._entries.pop(key, None)
