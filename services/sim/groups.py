"""Users in groups that share a long prefix: the load that shows what routing by prefix is worth."""

from __future__ import annotations

import random
from dataclasses import dataclass

from services.sim.workload import Arrival, Workload

UNIT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Groups of users; every request repeats the prompt of one user drawn by chance."""

    rate: float  # requests a second
    num_requests: int
    burst: int = 1  # so many requests arrive at one instant
    num_groups: int = 150
    num_users: int = 5  # of a group
    shared_tokens: int = 6016
    private_tokens: int = 1216
    output_tokens: int = 100


def group_workload(load: GroupLoad, seed: int) -> Workload:
    """Draw the arrivals: the instants are a Poisson process, users are drawn one by one."""
    rng = random.Random(seed)
    shared, private = load.shared_tokens // UNIT_TOKENS, load.private_tokens // UNIT_TOKENS
    arrivals: list[Arrival] = []
    now = 0.0
    while len(arrivals) < load.num_requests:
        now += rng.expovariate(load.rate / load.burst)
        for _ in range(min(load.burst, load.num_requests - len(arrivals))):
            user = rng.randrange(load.num_groups * load.num_users)
            group = user // load.num_users
            own = load.num_groups * shared + user * private
            units = (
                *range(group * shared, (group + 1) * shared),
                *range(own, own + private),
            )
            arrivals.append(Arrival(now, len(units) * UNIT_TOKENS, load.output_tokens, units))
    return Workload(f"groups at {load.rate:g} rps", UNIT_TOKENS, tuple(arrivals))
