"""What both ends do alike with their groups: find them, hand entries on, wait for their ends."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Protocol, TypeVar

from services.pb import transfer_pb2 as pb
from services.telemetry.logs import get_logger
from services.transfer.group_runner import GroupRunner
from services.transfer.group_table import GroupTable
from services.transfer.wire import WireError

log = get_logger(__name__)


class Lane(Protocol):
    """One end's view of one group."""

    @property
    def number(self) -> int:
        """Which try of its pair it is."""
        ...

    @property
    def runner(self) -> GroupRunner | None:
        """The group itself; None until both ends know of it."""
        ...


K = TypeVar("K", bound=Hashable)
L = TypeVar("L", bound=Lane)


class LaneTable(GroupTable[K, L]):
    """The groups of one end; belongs to its thread."""

    def numbered(self, key: K, number: int) -> L | None:
        """Return a peer's group if it has that number: messages about earlier ones come late."""
        lane = self.get(key)
        return lane if lane is not None and lane.number == number else None

    def of_runner(self, runner: GroupRunner) -> L | None:
        """Return the live group that a runner speaks for."""
        return next((lane for lane in self.all() if lane.runner is runner), None)

    def take_entry(self, key: K, entry: pb.GroupEntry) -> None:
        """Give what the other rank said while its group is built to the group's thread."""
        lane = self.numbered(key, entry.number)
        if lane is None or lane.runner is None:
            return
        try:
            lane.runner.store.on_entry(entry.key, entry.value)
        except ValueError:
            raise WireError("group_entry") from None

    def runner_gone(self, runner: GroupRunner) -> None:
        """Free the slots of a group whose abort has returned."""
        for lane in self.dying():
            if lane.runner is runner:
                self.forget(lane)

    def join_dying(self, timeout_s: float) -> None:
        """Wait for the threads of all groups that are ending, and say which did not end."""
        end = time.monotonic() + timeout_s
        for lane in self.dying():
            left_s = max(0.0, end - time.monotonic())
            if lane.runner is not None and not lane.runner.join(left_s):
                log.error("transfer.group_stuck", group=lane.runner.spec.name)
