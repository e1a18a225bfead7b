"""Offers by key and by transfer id, with a tombstone for each that is over; bounded."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict

from services.common.errors import RequestError
from services.transfer.offered import Offered

_MAX_TOMBSTONES = 4096


class OfferTable:
    """`admit`, `num_open` and `close` belong to any thread, the rest to the source's."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._lock = threading.Lock()  # guards _open_keys and _is_closed
        self._open_keys: set[str] = set()
        self._is_closed = True
        self._xfer_ids = itertools.count(1)
        self._by_key: dict[str, Offered] = {}
        self._by_xfer: dict[int, Offered] = {}
        self._tombstones: OrderedDict[int, None] = OrderedDict()

    # ---- any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Admit from now on."""
        with self._lock:
            self._is_closed = False

    def close(self) -> bool:
        """Admit nothing any more; True the first time."""
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
            return was_open

    def admit(self, key: str) -> int:
        """Take a place and return a transfer id; RequestError when there is none."""
        with self._lock:
            if self._is_closed:
                raise RequestError("draining", "this worker is stopping")
            if key in self._open_keys:
                raise RequestError("duplicate_request", "the request is already offered")
            if len(self._open_keys) >= self._max_open:
                raise RequestError("overloaded", "too many handoffs are open")
            self._open_keys.add(key)
            return next(self._xfer_ids)

    def num_open(self) -> int:
        """Transfers not yet closed."""
        with self._lock:
            return len(self._open_keys)

    # ---- the source's thread ------------------------------------------------------------------

    def add(self, offered: Offered) -> None:
        """Enter an admitted offer."""
        self._by_key[offered.offer.key] = offered
        self._by_xfer[offered.machine.xfer_id] = offered

    def by_key(self, key: str) -> Offered | None:
        """Return an open offer."""
        return self._by_key.get(key)

    def by_xfer(self, xfer_id: int) -> Offered | None:
        """Return an offer, open or a tombstone."""
        return self._by_xfer.get(xfer_id)

    def open(self) -> list[Offered]:
        """Return every open offer."""
        return list(self._by_key.values())

    def busy_peers(self) -> set[bytes]:
        """Return the peers that have an offer open."""
        return {o.machine.owner.base for o in self._by_key.values() if o.machine.owner}

    def release(self, offered: Offered) -> int | None:
        """Make an offer a tombstone; return a transfer that must be forgotten for it."""
        key, xfer_id = offered.offer.key, offered.machine.xfer_id
        self._by_key.pop(key, None)
        with self._lock:
            self._open_keys.discard(key)
        self._tombstones[xfer_id] = None
        return next(iter(self._tombstones)) if len(self._tombstones) > _MAX_TOMBSTONES else None

    def bury(self, xfer_id: int) -> None:
        """Forget a tombstone."""
        self._by_xfer.pop(xfer_id, None)
        self._tombstones.pop(xfer_id, None)
