"""Workers of a simulation: prompts in order of arrival beside answers, a step for both. Pure.

A worker counts its steps at the pace of the moment. An answer is complete when the count has grown
by its tokens: no event per token.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import chain

from services.common.decayed import Ewma
from services.common.ids import BlockHash
from services.kv.layout import BLOCK_TOKENS
from services.registry.base import HintChange, LoadReport
from services.router.policy import REMOTE
from services.sim.block_cache import BlockCache
from services.sim.performance import PerformanceModel
from services.sim.request import Request
from services.sim.workload import Workload, leading_run

_ALPHA = 0.2  # of a prompt, in the rate a worker reports
_ROUNDING = 1e-9  # of steps
_MIN_PREFILL_TOKENS = 8  # fewer measure the fixed cost


@dataclass(slots=True, eq=False)
class Worker:
    """One worker of any pool."""

    workload: Workload
    model: PerformanceModel
    cache: BlockCache = field(init=False)
    waiting: deque[Request] = field(default_factory=deque)  # for their prefill
    arriving: deque[Request] = field(default_factory=deque)  # for room, to fetch their KV into
    running: Request | None = None  # its prompt is being computed
    resident_tokens: int = 0  # of answers, as they will be at their ends
    held_tokens: int = 0  # KV that is in use or promised
    num_admitted: int = 0  # answers that are written here or have room to be
    work_tokens: int = 0  # computed of prompts, all in all
    prefill_busy_s: float = 0.0
    decode_busy_s: float = 0.0
    output_tokens: float = 0.0  # written, all in all
    _queued_tokens: int = 0  # to compute for those that wait
    _coming: dict[int, int] = field(default_factory=dict)  # units of prompts not computed yet
    _rate: Ewma = field(default_factory=lambda: Ewma(_ALPHA))
    _left: float = math.inf  # steps of the running prompt
    _chunk_s: float = 0.0  # what each of them takes longer for it
    _chunk_tokens: float = 0.0
    _steps: float = 0.0
    _answers: list[tuple[float, int, Request]] = field(default_factory=list)  # by last step
    _is_broken: bool = False  # it does nothing any more
    _at: float = 0.0  # everything above is of this moment

    def __post_init__(self) -> None:
        self.cache = BlockCache(self.capacity_units)
        self._rate.add(self.model.prefill_tok_s)

    @property
    def capacity_units(self) -> int:
        """Units of prompts its KV has room for."""
        return max(1, self.model.kv_tokens // self.workload.unit_tokens)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in hand or promised."""
        return not (self.running or self.held_tokens or self.waiting or self.arriving)

    @property
    def num_answers(self) -> int:
        """Answers that are being written."""
        return len(self._answers)

    @property
    def step_s(self) -> float:
        """Seconds of a step as things are: a chunk of the prompt, and a token for each answer."""
        return (self._chunk_s if self.running is not None else 0.0) + self._decode_s()

    def can_hold(self, request: Request) -> bool:
        """Whether it would fit with nothing else there."""
        return request.final_tokens <= self.model.kv_tokens

    # -- prompts -----------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Let a prompt wait."""
        self._advance(now)
        units = request.arrival.units
        shared = max(leading_run(units, self._coming), self.cache.match(units))
        request.uncached_hint = max(1, request.prompt_tokens - shared * self.workload.unit_tokens)
        self._queued_tokens += request.uncached_hint
        for unit in units:
            self._coming[unit] = self._coming.get(unit, 0) + 1
        self.waiting.append(request)
        self._start()

    def handed_off(self, request: Request, now: float) -> None:
        """Give up the KV of a prompt: another worker has it."""
        self._advance(now)
        self.held_tokens -= request.source_tokens
        self._start()

    # -- answers -----------------------------------------------------------------------------

    def admit(self, now: float) -> list[Request]:
        """Promise room to those that arrive, in order; return whose KV may be fetched now."""
        self._advance(now)
        admitted = []
        while self.arriving and self._has_room(self.arriving[0].final_tokens, is_answer=True):
            request = self.arriving.popleft()
            self._promise(request.final_tokens, is_answer=True)
            admitted.append(request)
        return admitted

    def join(self, request: Request, now: float) -> HintChange:
        """Write an answer that has room here; return what its prompt changes in the cache."""
        self._advance(now)
        self.resident_tokens += request.final_tokens
        request.joined_at_step = self._steps
        last = self._steps + request.left_tokens
        heapq.heappush(self._answers, (last, request.number, request))
        return self._hold(request)

    def turn_away(self, request: Request, now: float) -> None:
        """Take back the room that an answer was promised."""
        self._advance(now)
        self._give_up(request.final_tokens, is_answer=True)
        self._start()

    def break_off(self, now: float) -> None:
        """Stop for good; each answer is left with the tokens it has had so far."""
        self._advance(now)
        for _, _, request in self._answers:
            made = math.floor(self._steps - request.joined_at_step + _ROUNDING)
            request.made_tokens += min(made, request.left_tokens - 1)
        self._is_broken, self.running, self._left = True, None, math.inf
        self._answers.clear()

    # -- time --------------------------------------------------------------------------------

    def next_at(self) -> float:
        """Return when the next prompt or answer is complete; infinity with nothing in hand."""
        steps = min(self._left, self._answer_steps())
        return self._at + steps * self.step_s if steps < math.inf else math.inf

    def complete(self, now: float) -> tuple[Request, HintChange | None]:
        """End what is due now; a change of the cache tells a prompt from an answer."""
        is_prompt = self._left <= self._answer_steps()
        self._advance(now)
        if is_prompt:
            return self._computed()
        self._steps, _, request = heapq.heappop(self._answers)
        self.resident_tokens -= request.final_tokens
        self._give_up(request.final_tokens, is_answer=True)
        self._start()
        return request, None

    def load(self, now: float) -> LoadReport:
        """Say what an engine would report now."""
        self._advance(now)
        queued = self._queued_tokens
        if self.running is not None:
            queued += math.ceil(self._left * self._chunk_tokens)
        unit = self.workload.unit_tokens
        blocks = unit // BLOCK_TOKENS
        free = max(0, self.capacity_units - -(-self.held_tokens // unit))
        num_answers = len(self._answers)
        return LoadReport(
            queued_uncached_tokens=queued,
            resident_tokens=self.resident_tokens,
            kv_free=free * blocks,
            kv_total=self.capacity_units * blocks,
            rate_tok_s=self._rate.value or 0.0,
            tbt_a_us=self.model.decode_s(num_answers, 0) * 1e6,
            tbt_b_us=self.model.decode.token_s * 1e6,
            running=int(self.running is not None) + num_answers,
            waiting=len(self.waiting) + len(self.arriving),
            kv_cached=min(free, len(self.cache)) * blocks,
        )

    def held(self) -> HintChange:
        """Return all that is cached as one change."""
        return HintChange(self._names(self.cache.units()), ())

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is promised is what is here."""
        resident = sum(request.final_tokens for _, _, request in self._answers)
        assert self.resident_tokens == resident <= self.held_tokens <= self.model.kv_tokens
        assert len(self._answers) <= self.num_admitted <= self.model.decode.max_batch
        assert self._queued_tokens == sum(r.uncached_hint for r in self.waiting)
        assert len(self.cache) <= self.capacity_units
        if not self.waiting and self.running is None:
            assert not self._coming

    # -- inside ------------------------------------------------------------------------------

    def _has_room(self, num_tokens: int, *, is_answer: bool) -> bool:
        if is_answer and self.num_admitted >= self.model.decode.max_batch:
            return False
        return self.held_tokens + num_tokens <= self.model.kv_tokens

    def _promise(self, num_tokens: int, *, is_answer: bool) -> None:
        self.held_tokens += num_tokens
        self.num_admitted += is_answer

    def _give_up(self, num_tokens: int, *, is_answer: bool) -> None:
        self.held_tokens -= num_tokens
        self.num_admitted -= is_answer

    def _start(self) -> None:
        """Begin the next prompt, if there is room for it and for the answer it may have here."""
        if self.running is not None or not self.waiting or self._is_broken:
            return
        request = self.waiting[0]
        decodes_here = request.mode != REMOTE
        needed = request.final_tokens if decodes_here else request.prompt_tokens
        if not self._has_room(needed, is_answer=decodes_here):
            return
        self.waiting.popleft()
        self._promise(needed, is_answer=decodes_here)
        request.source_tokens = needed
        self._queued_tokens -= request.uncached_hint
        self._begin(request)

    def _begin(self, request: Request) -> None:
        self.running = request
        request.prefill_began_at = self._at
        units = self.cache.match(request.arrival.units)
        cached = min(units * self.workload.unit_tokens, request.prompt_tokens - 1)
        if not request.made_tokens:
            request.cached_units, request.cached_tokens = units, cached
        uncached = request.prompt_tokens - cached
        self.work_tokens += uncached
        seconds = self.model.prefill_s(uncached, cached)
        if uncached >= _MIN_PREFILL_TOKENS:
            self._rate.add(uncached / seconds)
        # What its last chunk leaves of a step goes to the prompt behind it.
        self._left = uncached / self.model.chunk_tokens
        if not self.waiting:
            self._left = math.ceil(self._left)
        self._chunk_s, self._chunk_tokens = seconds / self._left, uncached / self._left

    def _computed(self) -> tuple[Request, HintChange]:
        request = self.running
        assert request is not None, "a prompt ended that had not begun"
        self.running, self._left = None, math.inf
        for unit in request.arrival.units:
            self._coming[unit] -= 1
            if not self._coming[unit]:
                del self._coming[unit]
        if request.left_tokens == 1:  # its answer ends here, whoever was to write the rest
            self._give_up(request.source_tokens, is_answer=request.mode != REMOTE)
        request.made_tokens += 1
        change = self._hold(request)
        self._start()
        return request, change

    def _answer_steps(self) -> float:
        return self._answers[0][0] - self._steps if self._answers else math.inf

    def _decode_s(self) -> float:
        if not self._answers:
            return 0.0
        return self.model.decode_s(len(self._answers), self.resident_tokens)

    def _advance(self, now: float) -> None:
        elapsed_s, self._at = now - self._at, now
        decode_s = self._decode_s()
        step_s = (self._chunk_s if self.running is not None else 0.0) + decode_s
        if step_s <= 0 or elapsed_s <= 0:
            return
        steps = elapsed_s / step_s
        self._left = max(0.0, self._left - steps)
        self._steps += steps
        self.output_tokens += steps * len(self._answers)
        self.decode_busy_s += steps * decode_s
        self.prefill_busy_s += elapsed_s - steps * decode_s

    def _hold(self, request: Request) -> HintChange:
        arrival, size = request.arrival, self.workload.unit_tokens
        added, evicted = self.cache.insert(arrival.units, arrival.num_tokens, size)
        return HintChange(self._names(added), self._names(evicted))

    def _names(self, units: list[tuple[int, int]]) -> tuple[BlockHash, ...]:
        names = self.workload.filled_names
        return tuple(chain.from_iterable(names(unit, filled) for unit, filled in units))
