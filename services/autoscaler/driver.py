"""What starts, drains and stops the replicas of pools: one Protocol, a driver for each place.

A driver acts and tells what there is; it decides nothing and repeats nothing. Every method returns
as soon as what it asks for has begun, may be called again for what has begun already, and may be
cancelled at any await: the controller gives each call a deadline of its own. What did not happen
shows in `replicas` at the next tick, which decides anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.autoscaler.observation import Replica
from services.autoscaler.policy import OnDeadline


class DriverError(Exception):
    """What was asked for could not be done now; the next tick tries again if it still wants it.

    For every fault of the place that is driven (no quota, a conflict, a server that does not
    answer). Anything else that a driver raises is a fault of the driver.
    """


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a place lets be done."""

    can_flip: bool  # move a replica to the other pool in place
    names_victims: bool  # drain the very replica that is named; else any of its pool leaves


class Driver(Protocol):
    """Replicas of one cluster. A replica's id is the worker id under which it registers."""

    @property
    def capabilities(self) -> Capabilities:
        """What can be done here; does not change."""
        ...

    async def replicas(self) -> Mapping[str, tuple[Replica, ...]]:
        """Return all that exist or were asked for, by name of the policy's pool.

        STARTING until its process serves, as far as the place can tell; the controller looks at
        the worker's lease besides, and at what it holds. `since` is in seconds of the clock that
        the driver was given, which is the controller's. One that is stopped is left out.
        """
        ...

    async def start(self, pool: str, count: int) -> None:
        """Ask for so many more replicas of a pool."""
        ...

    async def cancel(self, replica_ids: Sequence[str]) -> None:
        """End replicas that start. One that serves by now is left alone: it has to be drained."""
        ...

    async def drain(self, replica_id: str, deadline_s: float, on_deadline: OnDeadline) -> None:
        """Let a replica take no new work and pass on what it has.

        Only begins: the controller calls `stop` once nothing is left or the deadline is there.

        Args:
            replica_id: which.
            deadline_s: for what it has in hand, from now; where the place stops replicas by itself
                it has to be given this long.
            on_deadline: what becomes of the rest.
        """
        ...

    async def stop(self, replica_id: str) -> None:
        """End a replica, whatever it still holds, and forget it; one that is gone is no error."""
        ...

    async def flip(self, replica_id: str, pool: str) -> None:
        """Move a replica to another pool: it drains, changes, and takes work again.

        DRAINING in its old pool until it serves in the new one. Raises DriverError where
        `capabilities.can_flip` is False.
        """
        ...

    async def close(self) -> None:
        """Let go of what the driver holds itself; replicas go on."""
        ...
