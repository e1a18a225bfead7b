"""Virtual time: one heap of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_EVENTS = 50_000_000


@dataclass(slots=True)
class Timeline:
    """What is to happen, by time; at one instant, in the order it was planned."""

    now: float = 0.0
    num_events: int = 0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)

    @property
    def now_ms(self) -> int:
        """Now, as the store counts."""
        return round(self.now * 1000)

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Plan an event."""
        self.num_events += 1
        if self.num_events > MAX_EVENTS:
            raise RuntimeError("the simulation does not end")
        heapq.heappush(self._events, (when, self.num_events, event))

    def run(self) -> None:
        """Let everything happen, until nothing is planned."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
