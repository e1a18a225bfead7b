"""A request in this router: its way through the cluster, and the client's end of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.router.lane import Lane
from services.router.legs import Leg, Progress
from services.router.output_buffer import OutputBuffer


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request from its admission until nothing of it is left anywhere."""

    progress: Progress
    buffer: OutputBuffer
    lane: Lane | None = None  # where its next tokens may go the short way
    deadline_timer: asyncio.TimerHandle | None = None
    report_timer: asyncio.TimerHandle | None = None  # every choice is over, a report is not here
    hedge_timer: asyncio.TimerHandle | None = None  # its prefill may turn out slow
    wait_until: float | None = None  # it waits for a worker, no longer than this
    when_settled: Callable[[], None] | None = None  # wakes its task where that waits its turn
    has_end: bool = False  # its last output is in the buffer
    is_settled: bool = False  # nothing of it is open at any worker, nothing is booked

    def close_lane(self) -> None:
        """Let everything go the long way; to be called before anything but a token is handled."""
        lane, self.lane = self.lane, None
        if lane is not None:
            lane.close()

    def open_lane(self, leg: Leg) -> None:
        """Let the next tokens of a leg go the short way if that can be."""
        sink = self.buffer.sink
        plain = None if sink is None else self.progress.logical.plain()
        write = None if plain is None else self.buffer.writer()
        if sink is not None and plain is not None and write is not None:
            self.lane = Lane(leg, plain, self.progress.marks, sink, write)

    def stop_timers(self) -> None:
        """Let nothing more happen by itself."""
        for timer in (self.deadline_timer, self.report_timer, self.hedge_timer):
            if timer is not None:
                timer.cancel()
