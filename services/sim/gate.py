"""Admission in a simulation: lets start, lets wait, refuses, by the router's own code.

The router's gate is tasks and futures around the same decisions; this one is events. A request that
is let go is sent within the same instant, so none is ever between the gate and a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.registry.cost import STAY
from services.registry.scripts import RouteAsk
from services.resilience.fair_queue import FairQueue, Waiting
from services.router.admission import (
    REFUSE,
    START,
    Admission,
    AdmissionConfig,
    Backlog,
    TtftRatio,
    Wish,
    admit,
    backlog_of,
    clamp_retry_after,
    is_decode_full,
    least_gaps,
)
from services.router.gate import ENTRY_BYTES, LOOK_S
from services.router.policy import PolicyConfig, ask_for, expected_tokens
from services.router.pool_queue import PoolQueue
from services.router.view import WorkerView
from services.sim.fleet import Fleet
from services.sim.request import Request

_TOKEN_BYTES = 4
_NO_DEADLINE_S = 86_400.0  # clients of a simulation are patient


@dataclass(slots=True, eq=False)
class _Entry:
    """One request from its arrival to its first token."""

    request: Request
    pool: PoolQueue
    tokens: int  # to be computed of its prompt
    predicted_wait_s: float = 0.0
    waiting: Waiting | None = None  # its place in the queue
    sent_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Guess:
    """Where a request would start now."""

    worker: WorkerView
    uncached_tokens: int
    is_stay: bool  # it would decode there, too


class _Look:
    """The workers as a router knows them at one moment."""

    def __init__(self, fleet: Fleet, policy: PolicyConfig) -> None:
        self._fleet, self._policy = fleet, policy
        arena, twin, now_ms = fleet.arena, fleet.twin, fleet.time.now_ms
        self._workers: dict[int, WorkerView] = {}
        for candidate in arena.candidates:
            load = twin.load_of(candidate, now_ms)
            if load is not None:
                booked = twin.booked((candidate.slot, candidate.gen))
                worker = replace(arena.workers[candidate.slot], load=load, booked=booked)
                self._workers[candidate.slot] = worker

    def usable(self, role: str) -> list[WorkerView]:
        """Return the live workers of a role."""
        return [worker for worker in self._workers.values() if worker.role == role]

    def guess(self, request: Request) -> _Guess | None:
        """Say who would be chosen; None = nobody can take it."""
        fleet = self._fleet
        ask = RouteAsk(
            ask_for(request.facts, self._policy, fleet.arena, frozenset()), request.names
        )
        (verdict,) = fleet.twin.route_indexed(
            fleet.arena.weights, fleet.index, fleet.arena.pairs, [ask], fleet.time.now_ms
        )
        if verdict is None:
            return None
        chosen = verdict.chosen
        uncached = round(chosen.uncached_tokens) or request.facts.num_tokens
        return _Guess(self._workers[chosen.slot], uncached, chosen.kind == STAY)


@dataclass(slots=True, eq=False)
class SimGate:
    """Admission of one simulated router."""

    config: AdmissionConfig
    policy: PolicyConfig
    fleet: Fleet
    send: Callable[[Request], None]
    refuse: Callable[[Request, Admission], None]
    _ratio: TtftRatio = field(default_factory=TtftRatio)
    _pools: dict[str, PoolQueue] = field(default_factory=dict)
    _entries: dict[int, _Entry] = field(default_factory=dict)  # by number
    _by_waiting: dict[Waiting, _Entry] = field(default_factory=dict)
    _is_watching: bool = False

    @property
    def num_queued(self) -> int:
        """Requests that wait here."""
        return len(self._by_waiting)

    @property
    def queued_tokens(self) -> int:
        """Tokens of their prompts that are to be computed."""
        return sum(entry.tokens for entry in self._by_waiting.values())

    def enter(self, request: Request) -> None:
        """Let a request start, let it wait, or refuse it."""
        look, now = _Look(self.fleet, self.policy), self.fleet.time.now
        guess = look.guess(request)
        if guess is None:
            self.send(request)  # whoever sends it knows what is to be done then
            return
        entry = _Entry(request, self._pool(guess.worker.role), guess.uncached_tokens)
        pool, waiting = entry.pool, self._waiting(entry, now)
        need = expected_tokens(request.facts, self.policy)
        standing = pool.standing(
            waiting,
            entry.tokens,
            self._backlog(guess, look),
            self._ratio.value,
            fits_queue=self._fits(waiting),
            gaps_s=least_gaps(look.usable("decode"), need, self.policy),
        )
        config = self.config
        wish = Wish(
            now - request.arrival.at_s, _NO_DEADLINE_S, config.slo_ttft_s, config.slo_tpot_s
        )
        admission = admit(wish, standing, config)
        if admission.reason == "queue_full" and self._make_room(pool, waiting):
            admission = admit(wish, replace(standing, fits_queue=True), config)
        entry.predicted_wait_s = standing.queue_wait_s
        if admission.action == REFUSE:
            self.refuse(request, admission)
            return
        self._entries[request.number] = entry
        if admission.action == START:
            self._let_go(entry)
        else:
            self._wait(entry, waiting, admission)

    def first_token(self, request: Request) -> None:
        """Learn from a first token."""
        entry, now = self._entries.pop(request.number, None), self.fleet.time.now
        if entry is None or entry.sent_at is None or request.decision is None:
            return
        predicted_s = request.decision.terms[0].prefill_s
        if predicted_s > 0 and not request.num_losses:
            self._ratio.note(predicted_s, now - entry.sent_at, now)

    def ended(self, request: Request) -> None:
        """The request is over, however."""
        self._entries.pop(request.number, None)

    def check_integrity(self) -> None:
        """Raise AssertionError unless nothing is left here."""
        assert not self._by_waiting
        assert not self._entries
        for pool in self._pools.values():
            pool.queue.check_integrity()
            assert not len(pool.queue)

    # -- waiting -----------------------------------------------------------------------------

    def _wait(self, entry: _Entry, waiting: Waiting, admission: Admission) -> None:
        time, pool = self.fleet.time, entry.pool
        entry.waiting = waiting
        if not len(pool.queue):
            pool.stuck_since = None
        pool.queue.add(waiting)
        self._by_waiting[waiting] = entry
        pool.note_left(0, time.now)
        if admission.late_in_s < _NO_DEADLINE_S:
            late = replace(admission, action=REFUSE, reason="late")
            time.at(time.now + admission.late_in_s, lambda: self._send_away(entry, late))
        if not self._is_watching:
            self._is_watching = True
            time.at(time.now + LOOK_S, self._watch)

    def _watch(self) -> None:
        """Let start whoever is next, as long as the workers have room."""
        look = _Look(self.fleet, self.policy)
        for pool in list(self._pools.values()):
            while (head := pool.queue.head()) is not None and self._try_start(pool, head, look):
                look = _Look(self.fleet, self.policy)  # one of them has more to do now
        self._is_watching = bool(self._by_waiting)
        if self._is_watching:
            self.fleet.time.at(self.fleet.time.now + LOOK_S, self._watch)

    def _try_start(self, pool: PoolQueue, head: Waiting, look: _Look) -> bool:
        if pool.is_full(look.usable(pool.role), self.policy, self.config):
            pool.unstick(self.fleet.time.now)
            return False
        entry = self._by_waiting[head]
        guess = look.guess(entry.request)
        if guess is not None:  # else no worker is left: who sends it says so
            pool.unstick(self.fleet.time.now)
            if not self._backlog(guess, look).has_room:
                return False
            entry.tokens = guess.uncached_tokens
        pool.queue.take(head)
        self._has_waited(entry, head, head.cost)
        self._let_go(entry)
        return True

    def _send_away(self, entry: _Entry, why: Admission) -> None:
        """Refuse one that waits; nothing if it does not any more."""
        waiting = entry.waiting
        if waiting is None:
            return
        entry.pool.queue.remove(waiting)
        self._has_waited(entry, waiting, 0)
        del self._entries[entry.request.number]
        retry_after_s = clamp_retry_after(why.wait_s)
        self.refuse(entry.request, replace(why, retry_after_s=retry_after_s))

    def _make_room(self, pool: PoolQueue, newcomer: Waiting) -> bool:
        """Send someone away for a newcomer that has more right to wait; False when none is."""
        last = pool.queue.displaced_by(newcomer)
        if last is None or last.size_bytes < newcomer.size_bytes - self._free_bytes():
            return False
        drain_s = pool.queue.cost / max(1.0, pool.drain.rate(0.0))
        self._send_away(
            self._by_waiting[last], Admission(REFUSE, "displaced", 0.0, wait_s=drain_s / 2)
        )
        return True

    def _has_waited(self, entry: _Entry, waiting: Waiting, tokens_done: int) -> None:
        """Learn from one that is out of its queue."""
        now, pool = self.fleet.time.now, entry.pool
        entry.waiting = None
        del self._by_waiting[waiting]
        pool.margin(waiting.tenant).note(entry.predicted_wait_s, now - waiting.queued_at, now)
        pool.note_left(tokens_done, now)

    def _let_go(self, entry: _Entry) -> None:
        entry.sent_at = self.fleet.time.now
        self.send(entry.request)

    # -- what a request would find -----------------------------------------------------------

    def _pool(self, role: str) -> PoolQueue:
        pool = self._pools.get(role)
        if pool is None:
            config = self.config
            pool = PoolQueue(role, FairQueue(config.tenant_weights, config.priority_ageing_s))
            self._pools[role] = pool
        return pool

    def _waiting(self, entry: _Entry, now: float) -> Waiting:
        request = entry.request
        answer = expected_tokens(request.facts, self.policy) - request.facts.num_tokens
        return Waiting(
            tenant=request.arrival.tenant,
            priority=request.arrival.priority,
            cost=entry.tokens + answer,
            size_bytes=_TOKEN_BYTES * request.facts.num_tokens + ENTRY_BYTES,
            queued_at=now,
        )

    def _backlog(self, guess: _Guess, look: _Look) -> Backlog:
        pool = look.usable(guess.worker.role)
        backlog = backlog_of(guess.worker, pool, guess.uncached_tokens, 0, self.policy, self.config)
        if not guess.is_stay and is_decode_full(look.usable("decode"), self.config):
            return replace(backlog, has_room=False)
        return backlog

    def _fits(self, waiting: Waiting) -> bool:
        has_place = self.num_queued < self.config.max_queued
        return has_place and waiting.size_bytes <= self._free_bytes()

    def _free_bytes(self) -> int:
        used = sum(pool.queue.size_bytes for pool in self._pools.values())
        return self.config.max_queued_bytes - used
