"""Sizes of simulated pools over time, whoever decides them, and how they went up and down. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.sim.controller import Controller, Observation, Orders


@dataclass(frozen=True, slots=True)
class Sizes:
    """The pools at a tick, before it."""

    at_s: float
    live: dict[str, int]
    wanted: dict[str, int]  # live and starting


@dataclass(slots=True)
class Recorder:
    """Passes on what another controller wants."""

    controller: Controller
    trail: list[Sizes] = field(default_factory=list)

    @property
    def tick_s(self) -> float:
        """Seconds from one look to the next."""
        return self.controller.tick_s

    def orders(self, seen: Observation) -> Orders:
        """Write down the sizes."""
        pools = seen.pools.items()
        self.trail.append(
            Sizes(
                seen.now,
                {name: pool.num_live for name, pool in pools},
                {name: pool.size for name, pool in pools},
            )
        )
        return self.controller.orders(seen)


def direction_changes(trail: Sequence[Sizes], pool: str) -> list[float]:
    """Return when a pool that last grew began to shrink, and the other way round."""
    turns, last, before = [], 0, None
    for sizes in trail:
        size = sizes.wanted[pool]
        direction = 0 if before is None else (size > before) - (size < before)
        if direction and last and direction != last:
            turns.append(sizes.at_s)
        last, before = direction or last, size
    return turns


def most_within(moments: Sequence[float], window_s: float) -> int:
    """Return the most of these moments, in order, that fall into one window."""
    return max(
        (sum(first <= later < first + window_s for later in moments) for first in moments),
        default=0,
    )


def peak(trail: Sequence[Sizes], pool: str) -> int:
    """Return the largest size a pool was given."""
    return max((sizes.wanted[pool] for sizes in trail), default=0)
