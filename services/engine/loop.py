"""The engine thread: takes commands, runs steps, delivers events. The only owner of blocks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from services.common.clock import Clock
from services.common.errors import RequestError
from services.common.ids import BlockHash, BlockId
from services.engine.api import (
    CacheDelta,
    EndReason,
    EngineEvent,
    EngineLoad,
    EngineRequest,
    FirstToken,
    Refused,
    RequestKey,
)
from services.engine.config import EngineConfig, check_role_weights
from services.engine.plan import StepPlan, StepResult
from services.engine.scheduler import Scheduler
from services.engine.watchdog import Watchdog, patience_s
from services.kv.attached import AttachedKv
from services.kv.form import EXACT
from services.telemetry.logs import get_logger

log = get_logger(__name__)

_SNAPSHOT_WAIT_S = 5.0


class Executor(Protocol):
    """What runs a step plan."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; raise only when nothing can be computed any more."""
        ...


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do between steps. `key` names the work item that pays for a failure."""

    run: Callable[[float], None]
    key: RequestKey | None = None
    is_submit: bool = False


class EngineLoop:
    """The engine on its own thread (services.engine.api.Engine)."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        on_step: Callable[[StepPlan, StepResult], None] | None = None,
    ) -> None:
        """Prepare; `on_step` is told of every finished step, on the engine thread."""
        self._on_step = on_step
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._config: EngineConfig = scheduler.config
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._wake = threading.Condition()
        # Guarded by _wake. Submissions are bounded by _num_inbox_submits; the other commands
        # number a few per open work item.
        self._inbox: deque[_Command] = deque()
        self._num_inbox_submits = 0
        self._is_stopping = False
        self._has_failed = False
        self._progress_at = clock.now()
        self._predicted_s = 0.0  # of the step under way
        self._watchdog = Watchdog()
        self._load = scheduler.load()
        self._on_events: Callable[[Sequence[EngineEvent]], None] | None = None
        self._on_cache_delta: Callable[[CacheDelta], None] | None = None

    # -- any thread ------------------------------------------------------------------------

    def start(
        self,
        on_events: Callable[[Sequence[EngineEvent]], None],
        on_cache_delta: Callable[[CacheDelta], None],
    ) -> None:
        """Start the thread; the callbacks run on it and must not block."""
        self._on_events = on_events
        self._on_cache_delta = on_cache_delta
        self._progress_at = self._clock.now()
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        """Queue a work item; the answer is an event.

        Raises:
            RequestError: the engine has stopped, or more work came than one step can take in.
        """
        with self._wake:
            if self._is_stopping or self._has_failed:
                raise RequestError("draining", "the engine has stopped")
            if self._num_inbox_submits >= self._config.max_open_requests:
                raise RequestError("overloaded", "too much work arrived within one step")
            self._num_inbox_submits += 1
            self._inbox.append(
                _Command(lambda now: self._submit(request, now), request.key, is_submit=True)
            )
            self._wake.notify()

    def cancel(self, key: RequestKey, reason: str) -> None:
        """End a work item in whatever state it is; idempotent, unknown keys are ignored."""
        self._send(key, lambda now: self._scheduler.cancel(key, reason, now))

    def pause(self, key: RequestKey) -> None:
        """Make no more tokens for a work item until `resume`; what it holds stays its own."""
        self._send(key, lambda _now: self._scheduler.pause(key))

    def resume(self, key: RequestKey) -> None:
        """Go on with a paused work item; idempotent, unknown keys are ignored."""
        self._send(key, lambda _now: self._scheduler.resume(key))

    def migrate(self, key: RequestKey) -> None:
        """Stop a decoding work item and offer its KV; it ends handed off, or MigrateRefused."""
        self._send(key, lambda now: self._scheduler.migrate(key, now))

    def source_released(self, key: RequestKey) -> None:
        """The sender no longer reads this request's blocks."""
        self._send(key, lambda now: self._scheduler.source_released(key, now))

    def source_unpinned(self, key: RequestKey, block_ids: Sequence[BlockId]) -> None:
        """The sender no longer reads these blocks of a request whose prefill is done."""
        ids = tuple(block_ids)
        self._send(key, lambda _now: self._scheduler.source_unpinned(key, ids))

    def received(
        self,
        key: RequestKey,
        first: tuple[FirstToken, ...],
        prefill_us: int,
        kv_form: str = EXACT,
        attached: AttachedKv | None = None,
    ) -> None:
        """All blocks of a CONTINUE item are verified: written, or `attached` where they are."""
        del prefill_us  # spent on another worker: the router has it from there
        self._send(key, lambda now: self._scheduler.received(key, first, now, kv_form, attached))

    def move_attached(self, key: RequestKey) -> None:
        """Move what a request reads in a peer's pool into ours, soon; unknown keys are ignored."""
        self._send(key, lambda _now: self._scheduler.move_attached(key))

    def receive_failed(self, key: RequestKey, code: str, message: str, *, recompute: bool) -> None:
        """The receiver has stopped writing; with `recompute` prefill here, else end the item."""
        self._send(
            key,
            lambda now: self._scheduler.receive_failed(
                key, code, message, recompute=recompute, now=now
            ),
        )

    def set_role(self, prefill_weight: float, decode_weight: float) -> None:
        """Change the shares of the step budget; ConfigError for impossible weights."""
        check_role_weights(prefill_weight, decode_weight)
        self._send(None, lambda _now: self._scheduler.set_role(prefill_weight, decode_weight))

    def load(self) -> EngineLoad:
        """Latest load."""
        return self._load

    def cached_hashes(self) -> tuple[BlockHash, ...]:
        """Every hint of what is in the prefix cache, parents before children.

        Raises:
            TimeoutError: the engine thread did not answer within 5 s.
        """
        if not self._thread.is_alive():
            return self._scheduler.pool.cache.hints()
        answer: Future[tuple[BlockHash, ...]] = Future()
        self._send(None, lambda _now: self._answer(answer))
        return answer.result(_SNAPSHOT_WAIT_S)

    def drop_cache(self) -> Future[tuple[int, int]]:
        """Forget cached prefixes no request uses; gives blocks dropped and kept, between steps."""
        answer: Future[tuple[int, int]] = Future()
        self._send(None, lambda _now: answer.set_result(self._scheduler.drop_cache()))
        return answer

    def is_alive(self) -> bool:
        """False once the thread has died or made no progress for its watchdog time.

        To be asked by one thread, several times a second.
        """
        if self._has_failed or not self._thread.is_alive():
            return False
        stalled_s = self._watchdog.stalled_s(self._progress_at, self._clock.now())
        return stalled_s <= self._patience_s()

    def stop(self, timeout_s: float) -> None:
        """Stop the thread; open work items end as cancelled.

        Raises:
            TimeoutError: a step did not end within `timeout_s`.
        """
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine thread did not stop within {timeout_s} s")

    def _send(self, key: RequestKey | None, run: Callable[[float], None]) -> None:
        with self._wake:
            self._inbox.append(_Command(run, key))
            self._wake.notify()

    def _patience_s(self) -> float:
        usual = self._scheduler.stats.step_s
        if usual is None:  # first steps page in weights and build kernels
            return self._config.warmup_watchdog_s
        return patience_s(self._config.watchdog_s, usual, self._predicted_s)

    # -- engine thread ---------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
            self._end_all(EndReason.CANCELLED, "cancelled", "the worker is stopping")
        except Exception:
            # Whatever it was, the state of the pool is not to be trusted any more.
            log.exception("engine.failed")
            self._has_failed = True
            self._end_all(EndReason.ERROR, "internal", "the engine of this worker has failed")

    def _turn(self) -> None:
        self._run_commands()
        plan = self._scheduler.schedule(self._clock.now())
        if not plan.rows:
            self._deliver()
            self._progress_at = self._clock.now()
            self._wait()
            return
        if self._scheduler.has_events:
            # A receive opens, and a cancelled transfer ends, before the step and not after it.
            self._deliver()
        self._predicted_s = self._scheduler.stats.predicted_s(
            plan.num_prefill_tokens, self._load.resident_tokens
        )
        result = self._executor.execute(plan)
        self._scheduler.apply(result, self._clock.now())
        self._deliver()
        self._progress_at = self._clock.now()
        if self._on_step is not None:
            self._on_step(plan, result)

    def _take_inbox(self) -> deque[_Command]:
        with self._wake:
            commands, self._inbox = self._inbox, deque()
            self._num_inbox_submits = 0
        return commands

    def _run_commands(self) -> None:
        for command in self._take_inbox():
            now = self._clock.now()
            try:
                command.run(now)
            except (RuntimeError, ValueError):
                # A command that does not suit its work item's state is that item's end only.
                log.exception("engine.command_failed")
                if command.key is not None:
                    message = "the work item was mishandled"
                    self._scheduler.fail(command.key, "internal", message, now)

    def _answer(self, answer: Future[tuple[BlockHash, ...]]) -> None:
        answer.set_result(self._scheduler.pool.cache.hints())

    def _submit(self, request: EngineRequest, now: float) -> None:
        try:
            self._scheduler.submit(request, now)
        except (TypeError, AttributeError, OverflowError) as error:
            log.exception("engine.submit_failed")
            message = f"the work item is malformed: {type(error).__name__}"
            self._emit((Refused(request.key, "internal", message),))

    def _wait(self) -> None:
        deadline = self._scheduler.next_deadline()
        timeout = self._config.idle_wait_s
        if deadline is not None:
            timeout = min(timeout, max(deadline - self._clock.now(), 0.0))
        with self._wake:
            if not self._inbox and not self._is_stopping:
                self._wake.wait(timeout)

    def _deliver(self) -> None:
        # The load goes first: who reacts to an event must not see the load from before it.
        self._load = self._scheduler.load()
        added, removed = self._scheduler.pool.cache.take_delta()
        events = self._scheduler.take_events()
        self._emit(events)
        if (added or removed) and self._on_cache_delta is not None:
            self._on_cache_delta(CacheDelta(added, removed))

    def _emit(self, events: Sequence[EngineEvent]) -> None:
        if events and self._on_events is not None:
            self._on_events(events)

    def _end_all(self, reason: EndReason, code: str, message: str) -> None:
        with self._wake:
            self._is_stopping = True  # from here on `submit` refuses
        if not self._has_failed:
            self._run_commands()  # what was submitted last is ended with the rest
        else:
            refused = [cmd.key for cmd in self._take_inbox() if cmd.is_submit and cmd.key]
            self._emit([Refused(key, code, message) for key in refused])
        self._scheduler.end_all(reason, code, message, self._clock.now())
        self._deliver()
