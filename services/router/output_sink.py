"""Outputs given to a client in the moment they come, without waking the task that serves it.

A task wake-up and the generators between router and door cost several times what writing a token
costs. So a door may hand in a sink with its call: while the sink takes outputs they go through it,
and in order; what it cannot take waits in the buffer for the task, as everything does without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.router.api import ChoiceDelta, OutputSink


class Door(Protocol):
    """Writes deltas for one client."""

    def write_now(self, output: ChoiceDelta) -> bool:
        """Write without waiting; False when that is not possible now, and nothing was written."""
        ...


class LiveSink:
    """A door's own sink: open only while its task waits for the next output.

    The task takes outputs from the buffer one by one; closed while it writes one, the sink cannot
    overtake it.
    """

    def __init__(self, door: Door) -> None:
        self.is_open = False
        self._door = door

    def push(self, output: ChoiceDelta) -> bool:
        """Write it if the task has nothing in hand."""
        return self.is_open and self._door.write_now(output)


class TappedSink:
    """Tells somebody of every delta that went through another sink."""

    def __init__(self, inner: OutputSink, note: Callable[[ChoiceDelta], None]) -> None:
        self._inner = inner
        self._note = note

    def push(self, output: ChoiceDelta) -> bool:
        """Pass it on; note it if it was taken."""
        if not self._inner.push(output):
            return False
        self._note(output)
        return True
