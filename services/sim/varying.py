"""Loads whose rate changes: Poisson arrivals by thinning, prompts that share nothing. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.sim.synthetic import length
from services.sim.workload import MAX_UNIT_TOKENS, Arrival, Workload

Rate = Callable[[float], float]
"""Requests a second at a moment."""


@dataclass(frozen=True, slots=True)
class Sine:
    """From the least rate up to the most and back, once a period."""

    least: float
    most: float
    period_s: float

    def __call__(self, at_s: float) -> float:
        """Return the rate at a moment; it begins at the least."""
        share = (1 - math.cos(2 * math.pi * at_s / self.period_s)) / 2
        return self.least + (self.most - self.least) * share


@dataclass(frozen=True, slots=True)
class Step:
    """A base rate, and a higher one from a moment to another."""

    base: float
    high: float
    begins_s: float
    ends_s: float

    def __call__(self, at_s: float) -> float:
        """Return the rate at a moment."""
        return self.high if self.begins_s <= at_s < self.ends_s else self.base


@dataclass(frozen=True, slots=True)
class VaryingLoad:
    """Requests of one length, or lognormal around these means."""

    name: str
    rate: Rate
    most: float  # that the rate ever is
    duration_s: float
    input_tokens: int
    output_tokens: int
    spread: float = 0.0  # sigma of the logarithm of both lengths


def varying_workload(load: VaryingLoad, seed: int) -> Workload:
    """Draw a load; a seed decides everything.

    Prompts have no units: none is ever cached, and hints of them are of no use.
    """
    rng = random.Random(f"{seed}/{load.name}")
    arrivals: list[Arrival] = []
    now = rng.expovariate(load.most)
    while now < load.duration_s:
        if rng.random() * load.most < load.rate(now):
            num_tokens = length(load.input_tokens, load.spread, rng)
            answer = length(load.output_tokens, load.spread, rng)
            arrivals.append(Arrival(now, num_tokens, answer, ()))
        now += rng.expovariate(load.most)
    return Workload(load.name, MAX_UNIT_TOKENS, tuple(arrivals))


def copies(workload: Workload, count: int, within_s: float, seed: int) -> Workload:
    """Let every request come so many times, each a moment later: more load with the same bursts.

    As above, no prompt of the copy has units.
    """
    rng = random.Random(f"{seed}/copies")
    arrivals: Sequence[Arrival] = sorted(
        (
            Arrival(a.at_s + rng.uniform(0.0, within_s), a.num_tokens, a.output_tokens, ())
            for a in workload.arrivals
            for _ in range(count)
        ),
        key=lambda a: a.at_s,
    )
    return Workload(f"{workload.name}, {count} of each", workload.unit_tokens, tuple(arrivals))
