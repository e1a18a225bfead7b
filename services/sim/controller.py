"""Who changes the size of simulated pools while they serve, and what fails. Pure.

A controller sees the cluster every few seconds of virtual time and says how many workers of each
pool it wants; the simulation starts and drains them. The autoscaler is one; a schedule is another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.sim.cluster import POOLS
from services.sim.report import Served


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker at a moment. Sums are from its start on."""

    name: str
    state: str  # starting, LIVE or DRAINING
    since: float  # in this state
    kv_tokens: int  # that it has room for
    held_tokens: int  # KV in use or promised
    coming_tokens: int  # KV that those need who wait for room
    num_answers: int
    step_s: float  # of a token for each of them, as things are
    prompt_tokens: int  # computed
    output_tokens: float  # written
    prefill_busy_s: float
    decode_busy_s: float


@dataclass(frozen=True, slots=True)
class PoolState:
    """One pool at a moment."""

    num_live: int
    num_starting: int
    num_draining: int
    queued_tokens: int  # of prompts, to be computed; for its prompts that wait at routers, too
    num_waiting: int  # prompts not begun, those at routers as well, and answers without room
    num_running: int  # prompts and answers under way
    resident_tokens: int
    kv_tokens: int  # that its live workers have room for
    workers: Sequence[WorkerState] = ()  # none that is gone

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
    arrived_tokens: int = 0  # of their prompts, to be computed
    ttfts_s: Sequence[float] = ()  # of first tokens since then, the wait in queues included
    num_held: int = 0  # requests that wait at routers until anybody can take them
    num_queued: int = 0  # requests that admission lets wait at routers


@dataclass(frozen=True, slots=True)
class Orders:
    """What is to change."""

    sizes: Mapping[str, int] = field(default_factory=dict)  # by pool; those that start count
    leaving: Sequence[str] = ()  # workers by name; whom a size asks for besides, it gets anew
    moves: Mapping[str, str] = field(default_factory=dict)  # workers that go to another pool


class Controller(Protocol):
    """Wants pools to have a size."""

    @property
    def tick_s(self) -> float:
        """Seconds from one look to the next."""
        ...

    def orders(self, seen: Observation) -> Orders:
        """Return what is to change now: first who moves, then who leaves, then sizes."""
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

    def orders(self, seen: Observation) -> Orders:
        """Return what the last change before now says of each pool."""
        due = sorted((c for c in self.changes if c.at_s <= seen.now), key=lambda c: c.at_s)
        return Orders({change.pool: change.size for change in due})


@dataclass(frozen=True, slots=True)
class Failure:
    """The sudden end of one worker."""

    at_s: float
    worker: str  # by name: prefill-0, decode-3
    notice_s: float = 0.0  # until routers know: none for a killed process, 2 s for a silent host
