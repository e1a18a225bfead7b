"""Workers of a simulation: prefill in order of arrival, decode by a step time that grows. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from services.common.ids import BlockHash
from services.kv.layout import BLOCK_TOKENS
from services.registry.base import HintChange, LoadReport
from services.registry.schema import HASH_FIELD_BYTES
from services.router.policy import Decision, RequestFacts
from services.sim.block_cache import BlockCache
from services.sim.workload import STRIDE_TOKENS, Arrival, Workload


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way, and what became of it."""

    number: int
    router: int
    arrival: Arrival
    facts: RequestFacts
    names: bytes
    decision: Decision | None = None
    prefill_slot: int | None = None
    cached_tokens: int = 0
    cached_units: int = 0
    first_token_at: float | None = None
    ended_at: float | None = None
    uncached_hint: int = 0  # tokens to compute as of submission: what its worker reports

    @property
    def rid(self) -> str:
        """Name of its reservation."""
        return f"{self.router}.{self.number}"

    @property
    def ttft_s(self) -> float:
        """Seconds from its arrival to its first token."""
        assert self.first_token_at is not None, "a simulation ends when all are served"
        return self.first_token_at - self.arrival.at_s


@dataclass(slots=True, eq=False)
class PrefillWorker:
    """Computes one prompt after the other at a fixed rate."""

    workload: Workload
    cache: BlockCache
    capacity_units: int
    rate_tok_s: float
    waiting: deque[Request] = field(default_factory=deque)
    running: Request | None = None
    started_at: float = 0.0
    work_tokens: int = 0

    def submit(self, request: Request) -> None:
        """Let a prompt wait."""
        request.uncached_hint = max(1, request.arrival.num_tokens - self._cached(request)[1])
        self.waiting.append(request)

    def start(self, now: float) -> float | None:
        """Begin the next prompt; return when it will be done, None when there is none to begin."""
        if self.running is not None or not self.waiting:
            return None
        request = self.running = self.waiting.popleft()
        request.cached_units, request.cached_tokens = self._cached(request)
        self.started_at = now
        uncached = max(1, request.arrival.num_tokens - request.cached_tokens)
        self.work_tokens += uncached
        return now + uncached / self.rate_tok_s

    def finish(self) -> tuple[Request, HintChange]:
        """End the running prompt; return it with what that changed in the cache."""
        request = self.running
        assert request is not None, "a prefill ended that had not begun"
        self.running = None
        size = self.workload.unit_tokens
        added, evicted = self.cache.insert(request.arrival.units, request.arrival.num_tokens, size)
        return request, HintChange(self._names(added), self._names(evicted))

    def load(self, now: float) -> LoadReport:
        """Say what an engine would report now."""
        queued, in_use = sum(r.uncached_hint for r in self.waiting), 0
        if self.running is not None:
            done = int((now - self.started_at) * self.rate_tok_s)
            arrival = self.running.arrival
            queued += max(0, arrival.num_tokens - self.running.cached_tokens - done)
            in_use = len(arrival.units)
        blocks = self.workload.unit_tokens // BLOCK_TOKENS
        free = max(0, self.capacity_units - in_use)
        return LoadReport(
            queued_uncached_tokens=queued,
            kv_free=free * blocks,
            kv_total=self.capacity_units * blocks,
            rate_tok_s=self.rate_tok_s,
            running=int(self.running is not None),
            waiting=len(self.waiting),
            kv_cached=min(free, len(self.cache)) * blocks,
        )

    def _cached(self, request: Request) -> tuple[int, int]:
        units = self.cache.match(request.arrival.units)
        num_tokens = request.arrival.num_tokens
        return units, min(units * self.workload.unit_tokens, num_tokens - 1)

    def _names(self, units: list[tuple[int, int]]) -> tuple[BlockHash, ...]:
        return tuple(
            BlockHash(names[i : i + HASH_FIELD_BYTES])
            for unit, filled in units
            for names in (self.workload.unit_names(unit),)
            for i in range(0, filled // STRIDE_TOKENS * HASH_FIELD_BYTES, HASH_FIELD_BYTES)
        )


@dataclass(slots=True, eq=False)
class DecodeWorker:
    """Writes answers; each at the step time of the moment it joined."""

    kv_tokens: int
    rate_tok_s: float
    tbt_a_us: float
    tbt_b_us: float
    running: int = 0
    resident_tokens: int = 0

    def join(self, request: Request, now: float) -> float:
        """Take a request over; return when its answer will be complete."""
        self.running += 1
        self.resident_tokens += _resident(request)
        gap_s = (self.tbt_a_us + self.tbt_b_us * self.resident_tokens) / 1e6
        return now + (request.arrival.output_tokens - 1) * gap_s

    def leave(self, request: Request) -> None:
        """Forget a request that is complete."""
        self.running -= 1
        self.resident_tokens -= _resident(request)

    def load(self) -> LoadReport:
        """Say what an engine would report now."""
        total = self.kv_tokens // BLOCK_TOKENS
        return LoadReport(
            resident_tokens=self.resident_tokens,
            kv_free=max(0, total - self.resident_tokens // BLOCK_TOKENS),
            kv_total=total,
            rate_tok_s=self.rate_tok_s,
            tbt_a_us=self.tbt_a_us,
            tbt_b_us=self.tbt_b_us,
            running=self.running,
        )


def _resident(request: Request) -> int:
    return request.arrival.num_tokens + request.arrival.output_tokens
