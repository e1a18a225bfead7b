"""Virtual time: a heap of events, and one of what is merely told meanwhile."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_EVENTS = 50_000_000


@dataclass(slots=True)
class Timeline:
    """What is to happen, by time; at one instant, in the order it was planned.

    A report changes no request and no worker, only what is known of them. So it is no event: all
    that are due are made, each as of its own instant, before the next event can see or change
    anything, and those after the last event are never made.
    """

    now: float = 0.0
    num_events: int = 0  # that happened
    num_reports: int = 0  # that were made
    _num_planned: int = 0
    _events: list[tuple[float, int, int | None, Callable[[], None]]] = field(default_factory=list)
    _reports: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _next: dict[int, tuple[float, int]] = field(default_factory=dict)  # by key, what is not void

    @property
    def now_ms(self) -> int:
        """Now, as the store counts."""
        return round(self.now * 1000)

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Plan an event."""
        heapq.heappush(self._events, (when, self._number(), None, event))

    def replan(self, key: int, when: float, event: Callable[[], None]) -> None:
        """Plan the only event of a key; what was planned for it at another time is void."""
        planned = self._next.get(key)
        if planned is None or planned[0] != when:
            number = self._number()
            self._next[key] = (when, number)
            heapq.heappush(self._events, (when, number, key, event))

    def cancel(self, key: int) -> None:
        """Make void what is planned for a key, if anything is."""
        self._next.pop(key, None)

    def report_at(self, when: float, report: Callable[[], None]) -> None:
        """Plan that something is told."""
        heapq.heappush(self._reports, (when, self._number(), report))

    def run(self) -> None:
        """Let everything happen, until no event is planned."""
        while self._events:
            when, number, key, event = heapq.heappop(self._events)
            if key is not None:
                if self._next.get(key) != (when, number):
                    continue
                del self._next[key]
            self._tell_until(when)
            self.now = when
            self.num_events += 1
            event()

    def _tell_until(self, when: float) -> None:
        while self._reports and self._reports[0][0] <= when:
            self.now, _, report = heapq.heappop(self._reports)
            self.num_reports += 1
            report()

    def _number(self) -> int:
        self._num_planned += 1
        if self._num_planned > MAX_EVENTS:
            raise RuntimeError("the simulation does not end")
        return self._num_planned
