"""Which fault comes next, where and for how long: drawn from a seed, decided before it happens."""

from __future__ import annotations

import random
from dataclasses import dataclass

from services.runtime.fault_points import SINK_POINTS, SOURCE_POINTS

# (kind, weight, shortest and longest duration in seconds)
_KINDS = (
    ("kill", 2.0, 0.0, 0.0),
    ("freeze", 3.0, 0.05, 1.5),  # SIGSTOP, then SIGCONT
    ("cut", 3.0, 0.0, 0.0),  # every connection of a KV port, once
    ("silence", 2.0, 0.1, 3.0),  # connections stay, nothing comes through
    ("delay", 2.0, 0.3, 1.0),
    ("duplicate", 2.0, 0.3, 1.5),
    ("flip", 3.0, 0.3, 1.5),  # random bits, control and data
)
LINK_KINDS = frozenset({"cut", "silence", "delay", "duplicate", "flip"})
DELAY_S = 0.03
FLIP_EVERY_BYTES = 96 << 10
DUPLICATE_SHARE = 0.3

_PER_BLOCK = frozenset({"mid_pull", "mid_data", "after_ready"})
_ARMED_SHARE = 0.8  # of lives; the others end by an outer fault or not at all
_STOP_SHARE = 0.15  # of armed lives


@dataclass(frozen=True, slots=True)
class OuterFault:
    """Something done to a worker from outside."""

    kind: str
    worker_idx: int
    hold_s: float


class FaultSchedule:
    """Two streams that do not disturb each other: outer faults, and points of lives to come."""

    def __init__(self, seed: int, num_workers: int) -> None:
        self._outer = random.Random(f"{seed}/outer")
        self._points = random.Random(f"{seed}/points")
        self._num_workers = num_workers

    def next_outer(self) -> OuterFault:
        """Draw the next outer fault."""
        rng = self._outer
        weights = [weight for _, weight, _, _ in _KINDS]
        kind, _, least_s, most_s = rng.choices(_KINDS, weights)[0]
        return OuterFault(kind, rng.randrange(self._num_workers), rng.uniform(least_s, most_s))

    def pause_s(self, mean_s: float) -> float:
        """Draw the time until the next outer fault."""
        return self._outer.uniform(0.5, 1.5) * mean_s

    def next_point(self, role: str) -> str:
        """Draw the fault point of a worker's next life; empty for none."""
        rng = self._points
        name = rng.choice(SOURCE_POINTS if role == "prefill" else SINK_POINTS)
        passes = rng.randint(1, 60 if name in _PER_BLOCK else 5)
        action = ":stop" if rng.random() < _STOP_SHARE else ""
        return f"{name}:{passes}{action}" if rng.random() < _ARMED_SHARE else ""
