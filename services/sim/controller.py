"""Who changes the size of simulated pools while they serve, and what fails. Pure.

A controller sees the cluster every few seconds of virtual time and says how many workers of each
pool it wants; the simulation starts and drains them. The autoscaler is one; a schedule is another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.sim.cluster import POOLS
from services.sim.report import Served


@dataclass(frozen=True, slots=True)
class PoolState:
    """One pool at a moment."""

    num_live: int
    num_starting: int
    num_draining: int
    queued_tokens: int  # of prompts, to be computed
    num_waiting: int  # prompts not begun, and answers without room
    num_running: int  # prompts and answers under way
    resident_tokens: int
    kv_tokens: int  # that its live workers have room for

    @property
    def size(self) -> int:
        """Workers that serve or are about to."""
        return self.num_live + self.num_starting


@dataclass(frozen=True, slots=True)
class Observation:
    """What a controller sees at a tick."""

    now: float
    pools: Mapping[str, PoolState]
    num_arrived: int  # requests since the tick before
    ended: Sequence[Served]  # since then


class Controller(Protocol):
    """Wants pools to have a size."""

    @property
    def tick_s(self) -> float:
        """Seconds from one look to the next."""
        ...

    def sizes(self, seen: Observation) -> Mapping[str, int]:
        """Return the wanted size of each pool that is to change; those that start count."""
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """A size that a pool has from a moment on."""

    at_s: float
    pool: str
    size: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Sizes that are known beforehand."""

    changes: tuple[Change, ...]
    tick_s: float = 1.0

    def __post_init__(self) -> None:
        if self.tick_s <= 0:
            raise ValueError("a tick takes time")
        for change in self.changes:
            if change.pool not in POOLS:
                raise ValueError(f"{change.pool!r} is none of {', '.join(POOLS)}")
            if change.size < 0 or change.at_s < 0:
                raise ValueError("times and sizes of pools are not negative")

    def sizes(self, seen: Observation) -> Mapping[str, int]:
        """Return what the last change before now says of each pool."""
        due = sorted((c for c in self.changes if c.at_s <= seen.now), key=lambda c: c.at_s)
        return {change.pool: change.size for change in due}


@dataclass(frozen=True, slots=True)
class Failure:
    """The sudden end of one worker."""

    at_s: float
    worker: str  # by name: prefill-0, decode-3
    notice_s: float = 0.0  # until routers know: none for a killed process, 2 s for a silent host
