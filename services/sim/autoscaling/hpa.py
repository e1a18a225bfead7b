"""The Kubernetes HPA by its documented rules, on a metric that has a target for each replica. Pure.

What is wanted is the metric over its target; the largest (shrinking) or least (growing) wish of a
window counts; rate policies bound the change within a period.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from services.sim.controller import Observation, Orders, PoolState


@dataclass(frozen=True, slots=True)
class Rate:
    """How much a size may change within a period."""

    is_percent: bool
    value: int
    period_s: float


@dataclass(frozen=True, slots=True)
class HpaConfig:
    """One HPA; the defaults are those of Kubernetes. Of several rates, the most change counts."""

    target: float  # of the metric, for each replica
    min_replicas: int = 1
    max_replicas: int = 100
    tolerance: float = 0.1
    up_window_s: float = 0.0
    down_window_s: float = 300.0
    up: tuple[Rate, ...] = (Rate(True, 100, 15.0), Rate(False, 4, 15.0))
    down: tuple[Rate, ...] = (Rate(True, 100, 15.0),)


@dataclass(slots=True)
class Hpa:
    """What one HPA remembers."""

    config: HpaConfig
    wishes: list[tuple[float, int]] = field(default_factory=list)  # when, how many
    changes: list[tuple[float, int]] = field(default_factory=list)  # when, how many more

    def desired(self, now: float, current: int, metric: float) -> int:
        """Return the size wanted now, and remember that it will be taken.

        Args:
            current: replicas, those that start included.
            metric: summed over replicas.
        """
        config = self.config
        if not self.wishes:
            self.wishes.append((now, current))  # what it finds counts as asked for
        wish = proposal(metric, config.target, current, config.tolerance)
        wish = min(max(wish, config.min_replicas), config.max_replicas)
        size = self.limited(now, current, self.stabilized(now, current, wish))
        size = min(max(size, config.min_replicas), config.max_replicas)
        if size != current:
            self.changes.append((now, size - current))
        return size

    def stabilized(self, now: float, current: int, wish: int) -> int:
        """Return the wish that the windows leave, and remember this one."""
        config = self.config
        longest_s = max(config.up_window_s, config.down_window_s)
        self.wishes = [(at, size) for at, size in self.wishes if at > now - longest_s]
        up_s, down_s = now - config.up_window_s, now - config.down_window_s
        least = min([wish, *(size for at, size in self.wishes if at > up_s)])
        most = max([wish, *(size for at, size in self.wishes if at > down_s)])
        self.wishes.append((now, wish))
        return min(max(current, least), most)

    def limited(self, now: float, current: int, wish: int) -> int:
        """Return what rate policies leave of a wish."""
        rates = self.config.up if wish > current else self.config.down
        longest_s = max((rate.period_s for rate in (*self.config.up, *self.config.down)), default=0)
        self.changes = [(at, more) for at, more in self.changes if at > now - longest_s]
        if wish == current or not rates:
            return wish
        limits = [self._limit(rate, now, current, is_up=wish > current) for rate in rates]
        if wish > current:
            return min(wish, max(current, *limits))
        return max(wish, min(current, *limits))

    def _limit(self, rate: Rate, now: float, current: int, *, is_up: bool) -> int:
        before = current - sum(more for at, more in self.changes if at > now - rate.period_s)
        if not rate.is_percent:
            return before + rate.value if is_up else before - rate.value
        share = Fraction(rate.value, 100)
        return math.ceil(before * (1 + share)) if is_up else int(before * (1 - share))


def proposal(metric: float, target: float, current: int, tolerance: float) -> int:
    """Return how many replicas bring a summed metric to its target for each; `current` if near."""
    if current > 0 and abs(1 - metric / (target * current)) <= tolerance:
        return current
    return math.ceil(metric / target)


Gauge = Callable[[PoolState], float]


def queued_tokens(pool: PoolState) -> float:
    """Tokens of prompts that wait in a pool or are under way."""
    return float(pool.queued_tokens)


def in_flight(pool: PoolState) -> float:
    """Requests that wait in a pool or are under way."""
    return float(pool.num_waiting + pool.num_running)


@dataclass(slots=True)
class HpaPools:
    """A controller: one HPA for each pool."""

    pools: Mapping[str, tuple[Hpa, Gauge]]
    tick_s: float = 15.0

    def orders(self, seen: Observation) -> Orders:
        """Size every pool by its own metric."""
        return Orders(
            {
                name: hpa.desired(seen.now, seen.pools[name].size, gauge(seen.pools[name]))
                for name, (hpa, gauge) in self.pools.items()
            }
        )
