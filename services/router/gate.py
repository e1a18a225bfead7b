"""The gate between accepted requests and the workers: lets start, lets wait, refuses.

Thin: `admission` decides, `FairQueue` says who is next. A request that waits is woken when it may
start, when it must make room for another, or when it is too late; its own task does the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from services.common.clock import Clock
from services.common.errors import RequestError
from services.common.ids import WorkerId
from services.registry import cost
from services.registry.brief import Hold
from services.resilience.fair_queue import FairQueue, Waiting
from services.router.admission import (
    REFUSE,
    START,
    Admission,
    AdmissionConfig,
    Backlog,
    Standing,
    TtftRatio,
    Wish,
    admit,
    admit_without_worker,
    backlog_of,
    clamp_retry_after,
    is_decode_full,
    least_gaps,
    longest_backlog_s,
)
from services.router.api import GenerateCall
from services.router.hooks import RouterHooks
from services.router.legs import Progress
from services.router.policy import Field, Links, PolicyConfig, expected_tokens, lay_out, weigh
from services.router.pool_queue import PoolQueue
from services.router.view import ClusterView, WorkerView
from services.telemetry.logs import get_logger

log = get_logger(__name__)

LOOK_S = 0.01  # between two looks at the workers while something waits; they have more in hand
ENTRY_BYTES = 2048  # what a waiting request takes besides its prompt
# What has to wait for the loop until a request is sent: its bytes, before anything knows of them,
# and the store's answer. From there on the learned ratio knows.
_LOOP_PASSES = 2
_MESSAGES = {
    "ttft_slo": "the first token would come later than the request's or the policy's SLO",
    "tpot_slo": "tokens would come slower than the request's or the policy's SLO",
    "deadline": "the first token would come later than the request's deadline",
    "queue_full": "too many requests wait in this router",
    "displaced": "the request made room for others: too many wait in this router",
    "late": "the request's SLO for the first token passed while it waited",
}


@dataclass(slots=True, eq=False)
class _Entry:
    """One request between its arrival and its first token."""

    progress: Progress
    pool: PoolQueue  # it waits for, then starts in
    tokens: int  # it will have computed there
    predicted_ttft_s: float | None = None  # at its arrival; None = by whoever it was sent to
    predicted_wait_s: float = 0.0  # in the queue; inf = nothing to learn from
    turn: asyncio.Future[None] | None = None
    waiting: Waiting | None = None  # its place in the queue
    is_let_go: bool = False
    is_sent: bool = False


@dataclass(slots=True)
class _Look:
    """The workers at one moment, put into numbers once if anybody has to choose."""

    view: ClusterView
    links: Links
    policy: PolicyConfig
    _arena: Field | None = None

    def guess(self, progress: Progress) -> _Guess:
        """Say where a request would start now. Raises RequestError: no_workers."""
        if self._arena is None:
            self._arena = lay_out(self.view, self.policy, self.links)
        facts, arena = progress.facts, self._arena
        chosen = weigh(facts, self.view, arena, progress.depth, self.policy).chosen
        # All of it where the terms do not say.
        uncached = round(chosen.uncached_tokens) or facts.num_tokens
        return _Guess(arena.workers[chosen.slot], uncached, chosen.kind == cost.STAY)


@dataclass(slots=True)
class _Guess:
    worker: WorkerView
    uncached_tokens: int  # to be computed there
    is_stay: bool  # it would decode there, too


class Surroundings(Protocol):
    """What the gate is told by whoever watches the cluster."""

    def view(self) -> ClusterView:
        """Return the cluster as it is now."""
        ...

    def links(self) -> Links:
        """Return the ways between workers."""
        ...

    def is_anyone_coming(self) -> bool:
        """Say whether a worker that is not usable now may be in a moment."""
        ...


class Gate:
    """Admission of one router. Belongs to the event loop."""

    def __init__(
        self,
        config: AdmissionConfig,
        policy: PolicyConfig,
        around: Surroundings,
        clock: Clock,
        hooks: RouterHooks,
        wait_s: float,
        lag_s: Callable[[], float],
    ) -> None:
        """Start with nothing waiting.

        Args:
            wait_s: how long a request is kept for workers that may be back in a moment.
            lag_s: how late this router's loop runs what is due.
        """
        self._lag_s = lag_s
        self._config = config
        self._wait_s = wait_s
        self._policy = policy
        self._around = around
        self._clock = clock
        self._hooks = hooks
        self._ratio = TtftRatio()
        self._pools: dict[str, PoolQueue] = {}
        self._entries: dict[int, _Entry] = {}
        self._by_waiting: dict[Waiting, _Entry] = {}
        self._watcher: asyncio.Task[None] | None = None
        self.hold: Hold | None = None  # requests that no worker is there for

    # -- questions ---------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Requests that wait here."""
        return len(self._by_waiting)

    @property
    def num_held(self) -> int:
        """Requests that wait here because no worker is there that could take them."""
        return sum(entry.predicted_wait_s == inf for entry in self._by_waiting.values())

    def queued_tokens(self) -> dict[str, int]:
        """Return the tokens of prompts that wait here, less expected hits, by pool."""
        tokens = Counter[str]()
        for entry in self._by_waiting.values():
            tokens[entry.pool.role] += entry.tokens
        for role, pool in self._pools.items():
            tokens[role] += pool.starting_tokens
        return dict(tokens)

    @property
    def ttft_ratio(self) -> float:
        """Measured over predicted TTFT, as learned."""
        return self._ratio.value

    def check_integrity(self) -> None:
        """Raise AssertionError when the parts do not agree."""
        for pool in self._pools.values():
            pool.queue.check_integrity()
            assert pool.starting_tokens >= 0
        assert sum(len(p.queue) for p in self._pools.values()) == self.num_queued
        starting = [e for e in self._entries.values() if e.is_let_go and not e.is_sent]
        total = sum(p.starting_tokens for p in self._pools.values())
        assert total == sum(e.tokens for e in starting)

    # -- a request's way ---------------------------------------------------------------------

    async def enter(self, progress: Progress, hints: Callable[[], Mapping[WorkerId, int]]) -> None:
        """Return when the request may start.

        Args:
            hints: who holds how much of the prompt, as far as is known without asking the store;
                asked only where the start depends on it.

        Raises:
            RequestError: overloaded, with a time to come back; deadline_exceeded.
        """
        view = self._around.view()
        wish = _wish(progress.call, self._config, self._clock.now())
        if self._starts_anywhere(progress, wish, view):
            return
        look = self._look(view)
        progress.depth = hints()
        try:
            guess = look.guess(progress)
        except RequestError:
            # Nobody can take it. Who sends it knows what is to be done then, but what came before
            # it goes first.
            if self._holds(view):
                await self._wait_for_workers(progress, replace(wish, slo_ttft_s=0.0))
            elif self._may_wait(progress.call, view):
                await self._wait_for_workers(progress, wish)
            return
        pool, now = self._pool(guess.worker.role), self._clock.now()
        entry = _Entry(progress, pool, guess.uncached_tokens)
        backlog = self._backlog(guess, view)
        waiting = self._waiting(entry, now)
        standing = self._standing(entry, waiting, backlog, view)
        admission = admit(wish, standing, self._config)
        if admission.reason == "queue_full" and self._make_room(pool, waiting):
            admission = admit(wish, replace(standing, fits_queue=True), self._config)
        entry.predicted_ttft_s = admission.predicted_ttft_s
        entry.predicted_wait_s = standing.queue_wait_s
        self._hooks.admitted(progress.call, admission)
        if admission.action == REFUSE:
            raise _overloaded(admission.reason, admission.retry_after_s)
        self._entries[progress.number] = entry
        if admission.action == START:
            self._let_go(entry)
        else:
            await self._wait(entry, waiting, admission, wish)

    def _may_wait(self, call: GenerateCall, view: ClusterView) -> bool:
        """Say whether a request that nobody can take now waits in the queue.

        One that asks for a mode by itself does not: it would hold up those that others can take.
        """
        if call.force_mode is not None:
            return False
        is_kept = bool(self._by_waiting) and view.has_suspect
        return is_kept or self._around.is_anyone_coming()

    def _holds(self, view: ClusterView) -> bool:
        """Say whether the cluster is scaled to zero: an autoscaler will start workers."""
        return self.hold is not None and not any(map(view.usable, ("prefill", "decode")))

    def _has_place_held(self) -> bool:
        return self.hold is None or self.num_held < self.hold.limit

    async def _wait_for_workers(self, progress: Progress, wish: Wish) -> None:
        longest = max(self._pools.values(), key=lambda pool: len(pool.queue), default=None)
        pool = longest if longest is not None and len(longest.queue) else self._pool("prefill")
        entry = _Entry(progress, pool, progress.facts.num_tokens, predicted_wait_s=inf)
        waiting = self._waiting(entry, self._clock.now())
        fits = self._has_place_held() and (self._fits(waiting) or self._make_room(pool, waiting))
        admission = admit_without_worker(wish, self._config, fits_queue=fits)
        self._hooks.admitted(progress.call, admission)
        if admission.action == REFUSE:
            raise _overloaded(admission.reason, admission.retry_after_s)
        self._entries[progress.number] = entry
        await self._wait(entry, waiting, admission, wish)

    def leave(self, progress: Progress) -> None:
        """The request was ended by someone else: `enter` returns at once if it waits here."""
        entry = self._entries.get(progress.number)
        if entry is not None and entry.waiting is not None:
            self._wake(entry, None)

    def sent(self, progress: Progress) -> None:
        """It is out of our hands: a worker's bookings count it, or it waits for one elsewhere."""
        entry = self._entries.get(progress.number)
        if entry is not None:
            self._count_sent(entry)

    def first_token(self, progress: Progress) -> None:
        """The first token is here: learn from it."""
        entry, now = self._entries.get(progress.number), self._clock.now()
        sent_at, decision = progress.marks.sent, progress.decision
        if entry is None or sent_at is None or decision is None:
            return
        if progress.num_retries or progress.num_losses:
            return  # after a retry the time says nothing of the worker it was predicted for
        # Of the decision it was sent by, which may have come long after it was let go.
        sent_prediction_s = decision.terms[0].prefill_s
        received_at, predicted_s = progress.call.received_at, entry.predicted_ttft_s
        if predicted_s is None:
            predicted_s = sent_at - received_at + sent_prediction_s * self._ratio.value
        if sent_prediction_s > 0:
            self._ratio.note(sent_prediction_s, now - sent_at, now)
        self._hooks.ttft_predicted(predicted_s, now - received_at)

    def ended(self, progress: Progress) -> None:
        """The request is over, however; idempotent."""
        entry = self._entries.pop(progress.number, None)
        if entry is not None:
            self._count_sent(entry)

    def close(self) -> None:
        """Wake whoever waits: their requests are ended by someone else."""
        if self._watcher is not None:
            self._watcher.cancel()
        for entry in list(self._by_waiting.values()):
            self._wake(entry, RequestError("draining", "the router is shutting down"))

    # -- waiting -----------------------------------------------------------------------------

    async def _wait(
        self, entry: _Entry, waiting: Waiting, admission: Admission, wish: Wish
    ) -> None:
        pool = entry.pool
        entry.turn, entry.waiting = asyncio.get_running_loop().create_future(), waiting
        if not len(pool.queue):
            pool.stuck_since = None
        pool.queue.add(waiting)
        self._by_waiting[waiting] = entry
        pool.note_left(0, self._clock.now())
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch(), name="admission")
        is_late_first = admission.late_in_s < wish.left_s
        try:
            async with asyncio.timeout(min(admission.late_in_s, wish.left_s)):
                await entry.turn
        except TimeoutError:
            if is_late_first:
                raise _overloaded("late", admission.wait_s) from None
            raise RequestError("deadline_exceeded", "the request's deadline passed") from None
        finally:
            self._leave_queue(entry)

    def _leave_queue(self, entry: _Entry) -> None:
        waiting, entry.waiting = entry.waiting, None
        if waiting is None:
            return  # it was taken
        entry.pool.queue.remove(waiting)
        self._has_waited(entry, waiting, 0)

    def _has_waited(self, entry: _Entry, waiting: Waiting, tokens_done: int) -> None:
        """Learn from one that is out of its queue."""
        now, pool = self._clock.now(), entry.pool
        del self._by_waiting[waiting]
        waited_s = now - waiting.queued_at
        entry.progress.marks.queued_s += waited_s
        pool.margin(waiting.tenant).note(entry.predicted_wait_s, waited_s, now)
        pool.note_left(tokens_done, now)

    def _wake(self, entry: _Entry, error: RequestError | None) -> None:
        """End an entry's waiting; its task goes on in the loop's next round."""
        self._leave_queue(entry)
        if entry.turn is None or entry.turn.done():
            return
        if error is None:
            entry.turn.set_result(None)
        else:
            entry.turn.set_exception(error)

    def _make_room(self, pool: PoolQueue, newcomer: Waiting) -> bool:
        """Send someone away for a newcomer that has more right to wait; False when none is."""
        last = pool.queue.displaced_by(newcomer)
        if last is None or last.size_bytes < newcomer.size_bytes - self._free_bytes():
            return False
        drain_s = pool.queue.cost / max(1.0, pool.drain.rate(0.0))
        self._wake(self._by_waiting[last], _overloaded("displaced", drain_s / 2))
        return True

    def _fits(self, waiting: Waiting) -> bool:
        has_place = self.num_queued < self._config.max_queued
        return has_place and waiting.size_bytes <= self._free_bytes()

    def _free_bytes(self) -> int:
        used = sum(pool.queue.size_bytes for pool in self._pools.values())
        return self._config.max_queued_bytes - used

    # -- letting go --------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look at the workers while something waits."""
        while self._by_waiting:
            await asyncio.sleep(LOOK_S)
            try:
                self._start_others()
            except Exception:
                # The outermost loop: without it nobody who waits would ever start.
                log.exception("router.admission_fault")

    def _start_others(self) -> None:
        """Let start whoever is next, as long as the workers have room."""
        if not self._by_waiting:
            return
        look = self._look(self._around.view())
        for pool in self._pools.values():
            while (head := pool.queue.head()) is not None and self._try_start(pool, head, look):
                pass

    def _try_start(self, pool: PoolQueue, head: Waiting, look: _Look) -> bool:
        view = look.view
        if pool.is_full(view.usable(pool.role), self._policy, self._config):
            pool.unstick(self._clock.now())
            return False  # known without choosing, which takes ten times as long
        entry, enters = self._by_waiting[head], pool
        try:
            guess = look.guess(entry.progress)
        except RequestError as error:
            if view.has_suspect or self._holds(view):
                self._keep(pool, error, view)
                return False
            # Else no worker is left: who sends it says so.
        else:
            pool.unstick(self._clock.now())
            entry.tokens, enters = guess.uncached_tokens, self._pool(guess.worker.role)
            if not self._backlog(guess, view).has_room:
                return False
        pool.queue.take(head)
        self._has_waited(entry, head, head.cost)
        entry.waiting, entry.pool = None, enters
        self._let_go(entry)
        self._wake(entry, None)
        return True

    def _keep(self, pool: PoolQueue, error: RequestError, view: ClusterView) -> None:
        """Keep the queue while a worker may be back; end with the error who has waited long for it.

        Let go, all of it would be sent at once to the first worker that is back.
        """
        now = self._clock.now()
        if pool.stuck_since is None:
            pool.stuck_since = now
            pool.note_left(0, now)
        wait_s = self._wait_s
        if self.hold is not None and self._holds(view):
            wait_s = max(wait_s, self.hold.timeout_s)
        if now - pool.stuck_since < wait_s:
            return
        for waiting in list(pool.queue):
            if now - max(pool.stuck_since, waiting.queued_at) >= wait_s:
                ended = RequestError(
                    error.spec.code, error.message, retry_after_ms=error.retry_after_ms
                )
                self._wake(self._by_waiting[waiting], ended)

    def _let_go(self, entry: _Entry) -> None:
        entry.is_let_go = True
        entry.pool.starting_tokens += entry.tokens

    def _count_sent(self, entry: _Entry) -> None:
        if entry.is_let_go and not entry.is_sent:
            entry.is_sent = True
            entry.pool.starting_tokens -= entry.tokens

    # -- what a request would find -----------------------------------------------------------

    def _look(self, view: ClusterView) -> _Look:
        return _Look(view, self._around.links(), self._policy)

    def _starts_anywhere(self, progress: Progress, wish: Wish, view: ClusterView) -> bool:
        """Let a request go that starts whoever is chosen: choosing costs more than all the rest."""
        if self._by_waiting or wish.slo_ttft_s or wish.slo_tpot_s:
            return False
        policy, config = self._policy, self._config
        pools = {role: view.usable(role) for role in ("prefill", "decode")}
        if not any(pools.values()) or is_decode_full(pools["decode"], config):
            return False
        wait_s = self._ratio.value * max(
            longest_backlog_s(pool, self._pool(role).starting_tokens, policy, config)
            for role, pool in pools.items()
        )
        if wait_s > self._config.worker_backlog_s:
            return False
        if wait_s + self._lag_s() * _LOOP_PASSES > wish.left_s:
            return False
        entry = _Entry(progress, self._pool("prefill"), progress.facts.num_tokens)
        self._entries[progress.number] = entry
        self._let_go(entry)
        self._hooks.admitted(progress.call, Admission(START, "room", 0.0, wait_s))
        return True

    def _pool(self, role: str) -> PoolQueue:
        pool = self._pools.get(role)
        if pool is None:
            config = self._config
            pool = PoolQueue(role, FairQueue(config.tenant_weights, config.priority_ageing_s))
            self._pools[role] = pool
        return pool

    def _waiting(self, entry: _Entry, now: float) -> Waiting:
        call, facts = entry.progress.call, entry.progress.facts
        answer = expected_tokens(facts, self._policy) - facts.num_tokens
        return Waiting(
            tenant=call.tenant,
            priority=call.priority,
            cost=entry.tokens + answer,
            size_bytes=call.token_ids.nbytes + 64 * len(entry.progress.hashes) + ENTRY_BYTES,
            queued_at=now,
        )

    def _backlog(self, guess: _Guess, view: ClusterView) -> Backlog:
        worker, policy, config = guess.worker, self._policy, self._config
        pool, starting = view.usable(worker.role), self._pool(worker.role).starting_tokens
        backlog = backlog_of(worker, pool, guess.uncached_tokens, starting, policy, config)
        if not guess.is_stay and is_decode_full(view.usable("decode"), config):
            return replace(backlog, has_room=False)
        return backlog

    def _standing(
        self, entry: _Entry, waiting: Waiting, backlog: Backlog, view: ClusterView
    ) -> Standing:
        need = expected_tokens(entry.progress.facts, self._policy)
        return entry.pool.standing(
            waiting,
            entry.tokens,
            backlog,
            self._ratio.value,
            fits_queue=self._fits(waiting),
            gaps_s=least_gaps(view.usable("decode"), need, self._policy),
            router_s=self._lag_s() * _LOOP_PASSES,
        )


def _wish(call: GenerateCall, config: AdmissionConfig, now: float) -> Wish:
    return Wish(
        elapsed_s=now - call.received_at,
        left_s=call.deadline - now,
        slo_ttft_s=call.slo_ttft_ms / 1000 or config.slo_ttft_s,
        slo_tpot_s=call.slo_tpot_ms / 1000 or config.slo_tpot_s,
    )


def _overloaded(reason: str, retry_after_s: float) -> RequestError:
    retry_after_ms = round(clamp_retry_after(retry_after_s) * 1000)
    return RequestError("overloaded", _MESSAGES[reason], retry_after_ms=retry_after_ms)
