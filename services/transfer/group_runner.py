"""One group at one end: a thread that enters it, and a guard that aborts it in time.

    building --> ready --> dead --> gone
    building ----------------^

Dead is said at once, by whichever signal comes first: an error, a batch past its deadline, the
control connection. The slots stay with the dead group until its abort has returned and its thread
has left; that is gone. A transfer need not wait for it: no slot is a block of the pool.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.common.clock import Clock
from services.transfer.device import Device, Group, GroupError, GroupSpec, HostBytes, Pending
from services.transfer.pair_store import PairStore

MAX_INSIDE = 2  # batches of a group at a time: more are known to hang under load


@dataclass(slots=True, eq=False)
class Batch:
    """The frames in one slot on their way; `about` is the owner's."""

    slot: int
    size_bytes: int
    is_send: bool
    about: object
    deadline: float = 0.0


class RunnerOwner(Protocol):
    """Who is told, on the thread that takes the posted commands."""

    def on_ready(self, runner: GroupRunner) -> None:
        """The group is built at this end."""
        ...

    def on_left(self, runner: GroupRunner, batch: Batch) -> None:
        """A batch has left the group: sent, or here."""
        ...

    def on_dead(self, runner: GroupRunner, why: str) -> None:
        """Nothing comes of this group any more."""
        ...

    def on_gone(self, runner: GroupRunner) -> None:
        """Its abort is done: nothing touches its slots, and their memory is free."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What the runners of one end share."""

    device: Device
    clock: Clock
    post: Callable[[Callable[[], None]], object]  # to the owner's thread
    owner: RunnerOwner
    batch_timeout_s: float


class GroupRunner:
    """Builds one group, moves its batches in order, and ends it. All methods: any thread."""

    def __init__(self, spec: GroupSpec, store: PairStore, parts: RunnerParts) -> None:
        self.spec = spec
        self.store = store
        self._parts = parts
        self._changed = threading.Condition()
        self._queue: deque[Batch] = deque()
        self._inside: deque[tuple[Batch, Pending]] = deque()
        self._group: Group | None = None
        self._why: str | None = None
        short = spec.name.rpartition("/")[2]
        self._worker = threading.Thread(
            target=self._work, name=f"transfer-group-{short}", daemon=True
        )
        self._guard = threading.Thread(
            target=self._watch, name=f"transfer-guard-{short}", daemon=True
        )

    def start(self) -> None:
        """Begin to build."""
        self._worker.start()
        self._guard.start()

    def host(self, slot: int) -> HostBytes:
        """Return the bytes of a slot that is not inside the group."""
        with self._changed:
            if self._group is None:
                raise GroupError("not built, or gone")
            return self._group.host(slot)

    def submit(self, batch: Batch) -> None:
        """Let a batch enter after those before it; both ends have agreed on it by now."""
        with self._changed:
            batch.deadline = self._parts.clock.now() + self._parts.batch_timeout_s
            self._queue.append(batch)
            self._changed.notify_all()

    def abort(self, why: str) -> None:
        """End the group; the first reason counts."""
        with self._changed:
            if self._why is None:
                self._why = why
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait, after `abort`, until it is gone."""
        self._guard.join(timeout_s)
        return not self._guard.is_alive()

    # ---- the thread inside the group ------------------------------------------------------------

    def _work(self) -> None:
        try:
            group = self._parts.device.make_group(self.spec, self.store)
        except GroupError as error:
            self.abort(f"cannot be built: {error}")
            return
        except Exception as error:  # a thread's outermost: no group may die without a word
            self.abort(f"cannot be built: {error!r}")
            return
        with self._changed:
            self._group = group
            if self._why is not None:
                return
        self._post(lambda: self._parts.owner.on_ready(self))
        try:
            while self._enter_some(group):
                batch, pending = self._inside[0]
                pending.wait()
                self._leave(batch)
        except GroupError as error:
            self.abort(str(error))
        except Exception as error:  # see above
            self.abort(repr(error))

    def _enter_some(self, group: Group) -> bool:
        """Enter what waits, in order; False when the group is dead."""
        with self._changed:
            self._changed.wait_for(lambda: self._why is not None or self._queue or self._inside)
            if self._why is not None:
                return False
            room = MAX_INSIDE - len(self._inside)
            batches = [self._queue[i] for i in range(min(room, len(self._queue)))]
        for batch in batches:
            enter = group.send if batch.is_send else group.recv
            pending = enter(batch.slot, batch.size_bytes)
            with self._changed:
                self._queue.popleft()
                self._inside.append((batch, pending))
        return True

    def _leave(self, batch: Batch) -> None:
        with self._changed:
            self._inside.popleft()
            if self._why is not None:
                return  # its end was told: nobody is to read this slot
            self._changed.notify_all()  # another deadline is the next one
        self._post(lambda: self._parts.owner.on_left(self, batch))

    # ---- the guard -------------------------------------------------------------------------------

    def _watch(self) -> None:
        clock = self._parts.clock
        with self._changed:
            while self._why is None:
                due = self._oldest_deadline()
                if due is not None and clock.now() >= due:
                    self._why = f"a batch was inside for {self._parts.batch_timeout_s:g} s"
                    break
                self._changed.wait(None if due is None else max(0.0, due - clock.now()))
            why = self._why
            self._changed.notify_all()
            group = self._group
        self.store.close()
        self._post(lambda: self._parts.owner.on_dead(self, why))
        if group is not None:
            group.abort()
        self._worker.join()
        with self._changed:
            late = self._group if group is None else None
        if late is not None:  # was built at the last moment
            late.abort()
        with self._changed:
            self._group = None
            self._queue.clear()
            self._inside.clear()
        self._post(lambda: self._parts.owner.on_gone(self))

    def _oldest_deadline(self) -> float | None:
        if self._inside:
            return self._inside[0][0].deadline
        return self._queue[0].deadline if self._queue else None

    def _post(self, command: Callable[[], None]) -> None:
        # Where nobody takes commands any more, nobody has an interest in this group either.
        self._parts.post(command)
