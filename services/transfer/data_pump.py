"""Turns of DATA among the transfers of each peer, and the messages ZMQ has not let go of yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from services.transfer.zmq_plane import DataSent


@dataclass(slots=True, eq=False)
class _Flight:
    xfer_id: int
    base: bytes
    sent: DataSent


class DataPump:
    """Bounds what is inside ZMQ for one peer, so that an abort never waits for more than that."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._hungry: dict[bytes, OrderedDict[int, None]] = {}
        self._flights: list[_Flight] = []
        self._num_flying: dict[bytes, int] = {}

    @property
    def is_flying(self) -> bool:
        """Tell whether ZMQ still reads some blocks."""
        return bool(self._flights)

    @property
    def is_hungry(self) -> bool:
        """Tell whether `run` has something to try, or waits for a message to land first."""
        return bool(self._hungry)

    def wants(self, base: bytes, xfer_id: int) -> None:
        """Note that a transfer may have something to send to a peer."""
        self._hungry.setdefault(base, OrderedDict())[xfer_id] = None

    def flying(self, base: bytes, xfer_id: int, sent: DataSent) -> None:
        """Note a message that is inside ZMQ."""
        self._flights.append(_Flight(xfer_id, base, sent))
        self._num_flying[base] = self._num_flying.get(base, 0) + 1

    def landed(self) -> list[int]:
        """Return the transfer of each message that ZMQ has let go of since the last call."""
        done = [flight for flight in self._flights if flight.sent.is_done()]
        if not done:
            return []
        self._flights = [flight for flight in self._flights if flight not in done]
        for flight in done:
            self._num_flying[flight.base] -= 1
            if self._num_flying[flight.base] == 0:
                del self._num_flying[flight.base]
        return [flight.xfer_id for flight in done]

    def run(self, send_one: Callable[[int], bool]) -> None:
        """Let transfers take turns; `send_one` says whether its transfer may have more."""
        for base, queue in list(self._hungry.items()):
            # A queue whose connection is full goes round at most once.
            for _ in range(len(queue) + self._max_in_flight):
                if not queue or self._num_flying.get(base, 0) >= self._max_in_flight:
                    break
                xfer_id, _ = queue.popitem(last=False)
                if send_one(xfer_id):
                    queue[xfer_id] = None  # to the back
            if not queue:
                del self._hungry[base]
