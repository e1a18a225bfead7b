"""A request in this router: its way through the cluster, and the client's end of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.router.legs import Progress
from services.router.output_buffer import OutputBuffer


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request from its admission until nothing of it is left anywhere."""

    progress: Progress
    buffer: OutputBuffer
    deadline_timer: asyncio.TimerHandle | None = None
    report_timer: asyncio.TimerHandle | None = None  # every choice is over, a report is not here
    hedge_timer: asyncio.TimerHandle | None = None  # its prefill may turn out slow
    wait_until: float | None = None  # it waits for a worker, no longer than this
    when_settled: Callable[[], None] | None = None  # wakes its task where that waits its turn
    is_settled: bool = False  # nothing of it is open at any worker, nothing is booked

    def stop_timers(self) -> None:
        """Let nothing more happen by itself."""
        for timer in (self.deadline_timer, self.report_timer, self.hedge_timer):
            if timer is not None:
                timer.cancel()
