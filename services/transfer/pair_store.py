"""What two ranks tell each other while their group is built, over the connection they have.

A store of its own would be one more port, open to everybody on its network: entries ride on the
control connection instead, with its address, its encryption and its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

MAX_ENTRIES = 64
MAX_KEY_BYTES = 512
MAX_VALUE_BYTES = 4096


class StoreClosed(Exception):
    """The group this store was for is given up."""


class PairStore:
    """One end; what either end sets, both can get. Any thread."""

    def __init__(self, tell: Callable[[bytes, bytes], None]) -> None:
        """Take what sends an entry to the other end; it must not block."""
        self._tell = tell
        self._entries: dict[bytes, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def set(self, key: str, value: bytes) -> None:
        """Set an entry at both ends."""
        raw = key.encode()
        self._put(raw, value)
        self._tell(raw, value)

    def on_entry(self, key: bytes, value: bytes) -> None:
        """Take an entry of the other end."""
        self._put(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return an entry once it is there; StoreClosed or TimeoutError if it will not be."""
        self.wait([key], timeout_s)
        with self._changed:
            return self._entries[key.encode()]

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Wait until every key is there."""
        wanted = [key.encode() for key in keys]
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._is_closed or all(key in self._entries for key in wanted), timeout_s
            )
            if self._is_closed:
                raise StoreClosed
            if not is_there:
                raise TimeoutError(f"the other end has not said {len(keys)} keys in time")

    def has(self, keys: Sequence[str]) -> bool:
        """Tell whether every key is there."""
        with self._changed:
            return all(key.encode() in self._entries for key in keys)

    def delete(self, key: str) -> bool:
        """Drop an entry of this end."""
        with self._changed:
            return self._entries.pop(key.encode(), None) is not None

    def __len__(self) -> int:
        with self._changed:
            return len(self._entries)

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _put(self, key: bytes, value: bytes) -> None:
        if len(key) > MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
            raise ValueError("an entry is too long")
        with self._changed:
            if key not in self._entries and len(self._entries) >= MAX_ENTRIES:
                raise ValueError("too many entries")
            self._entries[key] = value
            self._changed.notify_all()
