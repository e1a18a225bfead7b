"""Parts of a transfer thread: an inbox that wakes it, and its heap of deadlines."""

from __future__ import annotations

import contextlib
import heapq
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator

Command = Callable[[], None]


class Inbox:
    """Commands for one thread, from any thread; writing never blocks.

    The caller bounds what goes in: a transfer counts against max_transfers before its first
    command, and gives only a few each.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._is_rung = False  # the descriptor is readable
        self._num_holding = 0

    def fileno(self) -> int:
        """Return the descriptor that is readable while there are commands."""
        return self._fd

    def put(self, command: Command) -> bool:
        """Queue a command and wake the thread; False once the thread has gone."""
        with self._lock:
            if self._is_closed:
                return False
            self._commands.append(command)
            if self._num_holding == 0:
                self._ring()
            return True

    @contextlib.contextmanager
    def hold(self, run_now: Callable[[], bool]) -> Iterator[None]:
        """Wake the thread once for all commands put inside, at the end; keep it short.

        Args:
            run_now: tried at the end; True when it has done all there is to do.
        """
        with self._lock:
            self._num_holding += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holding -= 1
                has_work = bool(self._commands)
            if has_work and not run_now():
                self.wake()

    def wake(self) -> None:
        """Wake the thread without a command."""
        with self._lock:
            if not self._is_closed:
                self._ring()

    def take(self) -> list[Command]:
        """Return everything queued (only the owning thread)."""
        with self._lock:
            if self._is_closed:
                return []
            if self._is_rung:
                os.eventfd_read(self._fd)
                self._is_rung = False
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def close(self) -> list[Command]:
        """Refuse further commands; return those that came too late."""
        with self._lock:
            if self._is_closed:
                return []
            self._is_closed = True
            os.close(self._fd)
            late = list(self._commands)
            self._commands.clear()
            return late

    def _ring(self) -> None:
        if not self._is_rung:
            os.eventfd_write(self._fd, 1)
            self._is_rung = True


class Timers:
    """A heap of monotonic deadlines, at most one live entry a key; pure."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Hashable]] = []
        self._due: dict[Hashable, float] = {}
        self._num_pushed = 0

    def at_latest(self, key: Hashable, when: float) -> None:
        """Have `key` popped at `when` or earlier; what is popped too early sets itself again.

        Deadlines mostly move away, at every block; so only an earlier one costs anything.
        """
        current = self._due.get(key)
        if current is not None and current <= when:
            return
        self._due[key] = when
        self._num_pushed += 1  # unique: keys are never compared
        heapq.heappush(self._heap, (when, self._num_pushed, key))
        if len(self._heap) > 64 + 4 * len(self._due):
            self._compact()

    def discard(self, key: Hashable) -> None:
        """Forget a key."""
        self._due.pop(key, None)

    def next_due(self) -> float | None:
        """Return the earliest deadline."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[Hashable]:
        """Return and remove the keys whose time has come."""
        keys: list[Hashable] = []
        while (due := self.next_due()) is not None and due <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._due[key]
            keys.append(key)
        return keys

    def __len__(self) -> int:
        return len(self._due)

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)
