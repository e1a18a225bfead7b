"""Outputs given to a client in the moment they come, without waking the task that serves it.

A task wake-up and the generators between router and door cost several times what writing a token
costs. So a door may hand in a sink with its call: while the sink takes outputs they go through it,
and in order; what it cannot take waits in the buffer for the task, as everything does without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.router.api import ChoiceDelta, OutputSink, TextWriter


class Door(Protocol):
    """Writes deltas for one client."""

    def write_now(self, output: ChoiceDelta) -> bool:
        """Write without waiting; False when that is not possible now, and nothing was written."""
        ...

    def writer(self) -> TextWriter | None:
        """Give what writes plain text of the only choice; None before its first delta."""
        ...

    def note_written(self, num_tokens: int) -> None:
        """Hear of tokens written that way."""
        ...


class Tap(Protocol):
    """Hears of tokens that went through a sink."""

    def note(self, output: ChoiceDelta) -> None:
        """Hear of a delta."""
        ...

    def note_written(self, times: Sequence[float]) -> None:
        """Hear when tokens were written, one each."""
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

    def writer(self) -> TextWriter | None:
        """Give the door's writer if the task has nothing in hand."""
        return self._door.writer() if self.is_open else None

    def note(self, times: Sequence[float]) -> None:
        """Tell the door."""
        self._door.note_written(len(times))


class TappedSink:
    """Tells somebody of everything that went through another sink."""

    def __init__(self, inner: OutputSink, tap: Tap) -> None:
        self._inner = inner
        self._tap = tap

    def push(self, output: ChoiceDelta) -> bool:
        """Pass it on; note it if it was taken."""
        if not self._inner.push(output):
            return False
        self._tap.note(output)
        return True

    def writer(self) -> TextWriter | None:
        """Give the inner sink's."""
        return self._inner.writer()

    def note(self, times: Sequence[float]) -> None:
        """Tell of them, here and further in."""
        self._tap.note_written(times)
        self._inner.note(times)
