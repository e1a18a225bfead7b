"""Receives by peer and by key: the sink's one record of what is open."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from services.transfer.receive import Receive
from services.transfer.renewer import Target


class ReceiveTable:
    """Belongs to the sink's thread."""

    def __init__(self) -> None:
        self._by_key: dict[str, Receive] = {}
        self._by_target: dict[Target, OrderedDict[tuple[int, int], Receive]] = {}

    def add(self, receive: Receive) -> None:
        """Take a new receive."""
        self._by_key[receive.key] = receive
        self._by_target.setdefault(receive.target, OrderedDict())[receive.wire_id] = receive

    def by_key(self, key: str) -> Receive | None:
        """Return the receive the worker calls by `key`, while it is neither ready nor failed."""
        return self._by_key.get(key)

    def open_keys(self) -> list[str]:
        """Return the keys of all that have not ended."""
        return list(self._by_key)

    def by_wire(self, target: Target, wire_id: tuple[int, int]) -> Receive | None:
        """Return the receive a message of a peer means."""
        table = self._by_target.get(target)
        return table.get(wire_id) if table is not None else None

    def of_peer(self, target: Target) -> list[Receive]:
        """Return the receives from one peer."""
        table = self._by_target.get(target)
        return list(table.values()) if table is not None else []

    def uses(self, target: Target) -> bool:
        """Tell whether anything is received from a peer."""
        return target in self._by_target

    def outstanding_bytes(self) -> dict[Hashable, int]:
        """Return how much each peer may send already."""
        return {
            target: sum(receive.machine.outstanding_bytes for receive in table.values())
            for target, table in self._by_target.items()
        }

    def end_key(self, receive: Receive) -> None:
        """Note that the worker has been told how it ended."""
        self._by_key.pop(receive.key, None)

    def forget(self, receive: Receive) -> None:
        """Drop a receive whose peer needs nothing more."""
        table = self._by_target.get(receive.target)
        if table is not None:
            table.pop(receive.wire_id, None)
            if not table:
                del self._by_target[receive.target]

    def forget_all(self) -> None:
        """Drop every receive; keys that have not ended stay."""
        self._by_target.clear()

    def __bool__(self) -> bool:
        return bool(self._by_target)
