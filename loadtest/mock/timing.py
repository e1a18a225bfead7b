"""When a mock server writes what: a queue in front of servers, and standstills. Pure.

Everything is planned in working time, which stands still with the server: a standstill moves all
that comes after it, exactly as one of a real process does.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

from loadtest.mock.settings import MockSettings, draw


@dataclass(frozen=True, slots=True)
class Freezes:
    """Standstills, in seconds since the first request."""

    at_s: float
    for_s: float
    every_s: float  # 0 = once

    def working(self, wall_s: float) -> float:
        """Return how long the server has worked by then."""
        since_s = wall_s - self.at_s
        if not self.for_s or since_s <= 0:
            return wall_s
        number = math.floor(since_s / self.every_s) if self.every_s else 0
        into_s = since_s - number * self.every_s
        return self.at_s + number * (self.every_s - self.for_s) + max(0.0, into_s - self.for_s)

    def wall(self, working_s: float) -> float:
        """Return when it has worked that long."""
        since_s = working_s - self.at_s
        if not self.for_s or since_s <= 0:
            return working_s
        before = math.ceil(since_s / (self.every_s - self.for_s)) if self.every_s else 1
        return working_s + before * self.for_s


@dataclass(frozen=True, slots=True)
class Answer:
    """What becomes of one request, in seconds since the first one."""

    chunks: tuple[tuple[float, int], ...]  # when, and how many tokens
    fault: str = ""  # `internal` or `overloaded`, at once
    queued_s: float = 0.0
    service_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole answer."""
        return sum(tokens for _, tokens in self.chunks)


class Desk:
    """Plans the answer to every request in the moment it comes."""

    def __init__(self, settings: MockSettings) -> None:
        self._settings = settings
        self._rng = random.Random(settings.seed)
        self._freezes = Freezes(settings.freeze_at_s, settings.freeze_s, settings.freeze_every_s)
        self._free_s = [0.0] * settings.servers  # a heap: when each server is free
        self._began_s: float | None = None

    def plan(self, now_s: float, num_tokens: int) -> Answer:
        """Plan an answer of so many tokens; times are on the caller's clock."""
        if self._began_s is None:
            self._began_s = now_s
        settings, rng = self._settings, self._rng
        chance = rng.random()
        if chance < settings.error_share + settings.reject_share:
            fault = "internal" if chance < settings.error_share else "overloaded"
            return Answer((), fault)
        came_s = self._freezes.working(now_s - self._began_s)
        start_s = max(came_s, heapq.heappop(self._free_s)) if self._free_s else came_s
        service_s = draw(settings.service_ms, rng) / 1000 * self._slowness(start_s)
        at_s = start_s + service_s
        if settings.servers:
            heapq.heappush(self._free_s, at_s)
        chunks = [(self._wall(at_s), min(1, num_tokens))]
        left = num_tokens - 1
        while left > 0:
            tokens = min(left, settings.tokens_per_chunk)
            at_s += draw(settings.itl_ms, rng) / 1000 * tokens
            chunks.append((self._wall(at_s), tokens))
            left -= tokens
        return Answer(tuple(chunks), queued_s=start_s - came_s, service_s=service_s)

    def _wall(self, working_s: float) -> float:
        return (self._began_s or 0.0) + self._freezes.wall(working_s)

    def _slowness(self, at_s: float) -> float:
        settings = self._settings
        if at_s >= settings.slow_start_s:
            return 1.0
        left = 1 - at_s / settings.slow_start_s
        return 1 + (settings.slow_start_factor - 1) * left
