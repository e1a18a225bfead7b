"""Sizes by who knows the future: what an autoscaler is compared with. Pure.

Both kinds pay for starts: what is needed at a moment is asked for a start-up earlier. Both are as
tight as their `share` of a replica's rate lets them be; whoever compares chooses it as high as the
limits still allow.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.sim.controller import Change, Schedule
from services.sim.workload import Arrival


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Sizes of one pool: at the beginning, and as they change."""

    pool: str
    sizes: tuple[int, ...]  # by window
    window_s: float

    @property
    def initial(self) -> int:
        """Replicas that are there from the beginning."""
        return self.sizes[0]

    def changes(self, startup_s: float) -> list[Change]:
        """Ask for more a start-up before they are needed; let go at once."""
        changes = []
        for i in range(1, len(self.sizes)):
            before, size = self.sizes[i - 1], self.sizes[i]
            at_s = i * self.window_s - (startup_s if size > before else 0.0)
            if size != before:
                changes.append(Change(max(0.0, at_s), self.pool, size))
        return changes


def schedule_of(foreseen: Sequence[Foreseen], startup_s: float) -> Schedule:
    """Put the pools together."""
    return Schedule(tuple(c for one in foreseen for c in one.changes(startup_s)))


def least_by_windows(
    arrivals: Sequence[Arrival], *, tokens_s: float, ttft_s: float, window_s: float, goal: float
) -> tuple[int, ...]:
    """Return the least prefill replicas of each window that keep TTFT for a share of its prompts.

    Prompts are computed in order of arrival by whoever is free: better than any placement can do.
    """
    num_windows = int(arrivals[-1].at_s // window_s) + 1
    windows: list[list[Arrival]] = [[] for _ in range(num_windows)]
    for arrival in arrivals:
        windows[int(arrival.at_s // window_s)].append(arrival)
    sizes, free_at = [], [0.0]
    for number, window in enumerate(windows):
        begin_s, low, high = number * window_s, 1, len(window) + 1
        while low < high:
            middle = (low + high) // 2
            num_good, _ = _served(window, _staffed(free_at, middle, begin_s), tokens_s, ttft_s)
            low, high = (low, middle) if num_good >= goal * len(window) else (middle + 1, high)
        _, free_at = _served(window, _staffed(free_at, low, begin_s), tokens_s, ttft_s)
        sizes.append(low)
    return tuple(sizes)


def _staffed(free_at: Sequence[float], size: int, now: float) -> list[float]:
    """Return when each of `size` replicas is free; those that have most to do stay."""
    kept = sorted((max(now, moment) for moment in free_at), reverse=True)[:size]
    return kept + [now] * (size - len(kept))


def _served(
    window: Sequence[Arrival], free_at: list[float], tokens_s: float, ttft_s: float
) -> tuple[int, list[float]]:
    heapq.heapify(free_at)
    num_good = 0
    for arrival in window:
        ended_s = max(arrival.at_s, free_at[0]) + arrival.num_tokens / tokens_s
        heapq.heapreplace(free_at, ended_s)
        num_good += ended_s - arrival.at_s <= ttft_s
    return num_good, free_at


def by_rates(
    tokens: Sequence[tuple[float, float]], *, tokens_s: float, window_s: float, duration_s: float
) -> tuple[int, ...]:
    """Return the replicas that the work of each window needs: when, tokens; least one."""
    work = [0.0] * (int(duration_s // window_s) + 1)
    for at_s, num_tokens in tokens:
        work[min(int(at_s // window_s), len(work) - 1)] += num_tokens
    return tuple(max(1, math.ceil(done / (tokens_s * window_s) - 1e-9)) for done in work)
