"""Loads that are drawn instead of read: prompts that share nothing, at Poisson instants. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from services.sim.workload import MAX_UNIT_TOKENS, Arrival, Workload

MAX_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class PlainLoad:
    """Prompts and answers of a length each, or lognormal around these means."""

    input_tokens: int
    output_tokens: int
    rate: float  # requests a second
    spread: float = 0.0  # sigma of the logarithm of both lengths; 0 = every one is the mean

    @property
    def name(self) -> str:
        """Say what it is."""
        kind = f"lognormal (sigma {self.spread:g})" if self.spread else "fixed"
        return f"{kind} {self.input_tokens} in, {self.output_tokens} out at {self.rate:g}/s"


def plain_workload(load: PlainLoad, num_requests: int, seed: int) -> Workload:
    """Draw a load; a seed decides everything."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    now, next_unit = 0.0, 0
    for _ in range(num_requests):
        now += rng.expovariate(load.rate)
        num_tokens = length(load.input_tokens, load.spread, rng)
        num_units = -(-num_tokens // MAX_UNIT_TOKENS)
        units = tuple(range(next_unit, next_unit + num_units))
        next_unit += num_units
        arrivals.append(
            Arrival(now, num_tokens, length(load.output_tokens, load.spread, rng), units)
        )
    return Workload(load.name, MAX_UNIT_TOKENS, tuple(arrivals))


def length(mean: int, spread: float, rng: random.Random) -> int:
    """Draw a length around its mean; `spread` is the sigma of its logarithm."""
    if not spread:
        return mean
    # The logarithm's mean is below the mean's logarithm by half its variance.
    drawn = rng.lognormvariate(math.log(mean) - spread * spread / 2, spread)
    return max(1, round(drawn))
