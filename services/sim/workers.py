"""Workers of a simulation: prompts in order of arrival beside answers, a step for both. Pure.

A worker counts its steps at the pace of the moment. An answer is complete when the count has grown
by its tokens: no event per token.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from services.common.ids import BlockHash
from services.kv.layout import BLOCK_TOKENS
from services.registry.base import HintChange, LoadReport
from services.registry.schema import HASH_FIELD_BYTES
from services.router.policy import REMOTE, Decision, RequestFacts
from services.sim.block_cache import BlockCache
from services.sim.workload import STRIDE_TOKENS, Arrival, Workload, shared_run


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
    def mode(self) -> str:
        """REMOTE, LOCAL or STAY."""
        return self.decision.mode if self.decision is not None else REMOTE

    @property
    def ttft_s(self) -> float:
        """Seconds from its arrival to its first token."""
        assert self.first_token_at is not None, "a simulation ends when all are served"
        return self.first_token_at - self.arrival.at_s


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a worker is."""

    prefill_tok_s: float
    chunk_tokens: int  # of a prompt, computed in one step with the tokens of answers
    tbt_a_us: float
    tbt_b_us: float  # for each token resident

    def decode_s(self, resident_tokens: int) -> float:
        """Seconds of a step that makes tokens of answers."""
        return (self.tbt_a_us + self.tbt_b_us * resident_tokens) / 1e6


@dataclass(slots=True, eq=False)
class Worker:
    """One worker of either pool."""

    workload: Workload
    cache: BlockCache
    capacity_units: int
    pace: Pace
    waiting: deque[Request] = field(default_factory=deque)
    running: Request | None = None  # its prompt is being computed
    resident_tokens: int = 0
    work_tokens: int = 0  # computed of prompts, all in all
    _left: float = 0.0  # tokens of the running prompt
    _steps: float = 0.0
    _answers: list[tuple[float, int, Request]] = field(default_factory=list)  # by last step
    _at: float = 0.0  # everything above is of this moment

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in hand."""
        return self.running is None and not self._answers

    def submit(self, request: Request, now: float) -> None:
        """Let a prompt wait."""
        self._advance(now)
        units = request.arrival.units
        ahead = self.waiting if self.running is None else (*self.waiting, self.running)
        shared = max((shared_run(units, r.arrival.units) for r in ahead), default=0)
        coming = max(shared, self.cache.match(units)) * self.workload.unit_tokens
        request.uncached_hint = max(1, request.arrival.num_tokens - coming)
        self.waiting.append(request)
        self._start()

    def join(self, request: Request, now: float) -> HintChange:
        """Write an answer from its second token on; return what its prompt changes in the cache."""
        self._advance(now)
        self.resident_tokens += _resident(request)
        last = self._steps + request.arrival.output_tokens - 1
        heapq.heappush(self._answers, (last, request.number, request))
        return self._hold(request)

    def next_at(self) -> float:
        """Return when the next prompt or answer is complete; infinity with nothing in hand."""
        return self._at + min(self._prompt_s(), self._answer_s())

    def complete(self, now: float) -> tuple[Request, HintChange | None]:
        """End what is due now; a change of the cache tells a prompt from an answer."""
        is_prompt = self._prompt_s() <= self._answer_s()
        self._advance(now)
        if not is_prompt:
            self._steps, _, request = heapq.heappop(self._answers)
            self.resident_tokens -= _resident(request)
            return request, None
        assert self.running is not None, "a prompt ended that had not begun"
        request, self.running, self._left = self.running, None, 0.0
        change = self._hold(request)
        self._start()
        return request, change

    def load(self, now: float) -> LoadReport:
        """Say what an engine would report now."""
        self._advance(now)
        queued = sum(r.uncached_hint for r in self.waiting) + math.ceil(self._left)
        in_use = self.resident_tokens // self.workload.unit_tokens
        if self.running is not None:
            in_use += len(self.running.arrival.units)
        blocks = self.workload.unit_tokens // BLOCK_TOKENS
        free = max(0, self.capacity_units - in_use)
        return LoadReport(
            queued_uncached_tokens=queued,
            resident_tokens=self.resident_tokens,
            kv_free=free * blocks,
            kv_total=self.capacity_units * blocks,
            rate_tok_s=self.pace.prefill_tok_s,
            tbt_a_us=self.pace.tbt_a_us,
            tbt_b_us=self.pace.tbt_b_us,
            running=int(self.running is not None) + len(self._answers),
            waiting=len(self.waiting),
            kv_cached=min(free, len(self.cache)) * blocks,
        )

    def held(self) -> HintChange:
        """Return all that is cached as one change."""
        return HintChange(self._names(self.cache.units()), ())

    # -- inside ------------------------------------------------------------------------------

    def _start(self) -> None:
        if self.running is not None or not self.waiting:
            return
        request = self.running = self.waiting.popleft()
        request.cached_units, request.cached_tokens = self._cached(request)
        uncached = max(1, request.arrival.num_tokens - request.cached_tokens)
        self.work_tokens += uncached
        self._left = float(uncached)

    def _step_s(self) -> float:
        """Seconds of a step as things are: a chunk of the prompt, and a token for each answer."""
        chunk_s = self.pace.chunk_tokens / self.pace.prefill_tok_s if self.running else 0.0
        return chunk_s + (self.pace.decode_s(self.resident_tokens) if self._answers else 0.0)

    def _prompt_s(self) -> float:
        if self.running is None:
            return math.inf
        return self._left / self.pace.chunk_tokens * self._step_s()

    def _answer_s(self) -> float:
        return (self._answers[0][0] - self._steps) * self._step_s() if self._answers else math.inf

    def _advance(self, now: float) -> None:
        step_s = self._step_s()
        if step_s > 0:
            steps = (now - self._at) / step_s
            self._left = max(0.0, self._left - steps * self.pace.chunk_tokens)
            self._steps += steps
        self._at = now

    def _hold(self, request: Request) -> HintChange:
        arrival, size = request.arrival, self.workload.unit_tokens
        added, evicted = self.cache.insert(arrival.units, arrival.num_tokens, size)
        return HintChange(self._names(added), self._names(evicted))

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


def _resident(request: Request) -> int:
    return request.arrival.num_tokens + request.arrival.output_tokens
