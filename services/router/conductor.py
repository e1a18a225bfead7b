"""Takes requests through the cluster: sends work items, applies workers' frames, retries, cancels.

Everything happens on one event loop; frames are handled synchronously. A fault in handling one
request ends that request and no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from services.common.clock import Clock
from services.common.errors import ERROR_TABLE, IsthmusError, RequestError
from services.common.ids import Incarnation, WorkerId
from services.common.token_rows import TOKEN_ROW
from services.pb import common_pb2, worker_pb2
from services.resilience.breaker import Outcome, outcome_of
from services.resilience.retry_budget import RetryBudget
from services.router.api import ChoiceDelta, GenerateCall, RequestEnd, RouterOutput
from services.router.cluster_watch import ClusterWatch
from services.router.config import RouterConfig
from services.router.hedge import HedgeClock
from services.router.hint_check import check_progress
from services.router.hooks import RouterHooks
from services.router.legs import CONTINUE, PREFILL, Leg, Progress
from services.router.link import LossCause, ResumePoint, WorkerLink
from services.router.open_request import OpenRequest
from services.router.poison import OpenWork, Quarantine, RecentDeaths, blame, prompt_digest
from services.router.policy import Decision
from services.router.recovery import (
    Cure,
    RecoveryLimits,
    is_loss,
    plan_recovery,
    tells_of_load,
)
from services.router.request import TokensIn
from services.router.sending import Sender
from services.router.view import WorkerView
from services.router.wire import known_code, read_tokens, stage_times
from services.telemetry.logs import get_logger

log = get_logger(__name__)

MIGRATE_RETRY_S = 0.5  # a worker that could not offer a request is asked again after this
# A short answer may be over before its prefill worker's report has come: the end waits this long.
REPORT_WAIT_S = 0.05
LOOK_AGAIN_S = 0.1  # for a worker, on behalf of those that wait for one

_END = RequestEnd(0, 0, 0)  # its figures are filled in when it is given to the client
_FINISH = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class Conductor:
    """Drives every open request; hears from every Link."""

    def __init__(
        self,
        config: RouterConfig,
        cluster: ClusterWatch,
        clock: Clock,
        hooks: RouterHooks,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._clock = clock
        self._hooks = hooks
        self._sender = Sender(config, cluster, clock)
        self._limits = RecoveryLimits(config.max_retries, config.max_losses)
        self._retries = RetryBudget(config.retry_ratio)
        # A death may cost what was open there once, however much that was.
        self._losses = RetryBudget(1.0, float(config.max_open_requests))
        self._hedges = RetryBudget(config.hedge.ratio, config.hedge.reserve)
        self._hedge_clock = HedgeClock(config.hedge)
        self._quarantine = Quarantine(config.poison)
        self._deaths = RecentDeaths(config.poison)
        self._open: dict[int, OpenRequest] = {}
        self._waiting: dict[int, OpenRequest] = {}  # of them: those nobody can take now
        self._look_timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._reserving: set[asyncio.Task[None]] = set()

    # -- requests ----------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests that are not settled."""
        return len(self._open)

    def progresses(self) -> tuple[Progress, ...]:
        """Return how far each of them has come."""
        return tuple(request.progress for request in self._open.values())

    def end(self, request_id: str, error: IsthmusError) -> bool:
        """End one request with an error; False when none of that id is open."""
        for request in self._open.values():
            if request.progress.call.request_id == request_id:
                self.fail(request, error)
                return True
        return False

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def check(self, call: GenerateCall) -> None:
        """Raise RequestError for a prompt that has brought down workers."""
        if not len(self._quarantine):
            return
        if self._quarantine.holds(call.tenant, prompt_digest(call.token_ids), self._clock.now()):
            raise _quarantined()

    def add(self, request: OpenRequest) -> None:
        """Take over a request; from now on it ends by its deadline at the latest."""
        progress = request.progress
        self._open[progress.number] = request
        self._idle.clear()
        left_s = max(0.0, progress.call.deadline - self._clock.now())
        request.deadline_timer = asyncio.get_running_loop().call_later(
            left_s, self._expire, request
        )

    def begin(self, request: OpenRequest, refusal: IsthmusError | None = None) -> None:
        """Send all that the client does not have yet; else wait for a worker, or fail.

        Args:
            refusal: what the request ends with if nobody else can take it.
        """
        failure = self._try_to_begin(request)
        if failure is None:
            self._stop_waiting(request, "taken")
            return
        now, is_waiting = self._clock.now(), request.wait_until is not None
        if not is_waiting:
            request.wait_until = now + self._config.wait_s
        if _goes_on_waiting(request, now, is_coming=self._cluster.is_anyone_coming()):
            if not is_waiting:
                log.info("router.waits", request_id=request.progress.call.request_id)
                self._waiting[request.progress.number] = request
                self._look_later()
            return
        self.fail(request, refusal or failure)

    def fail(self, request: OpenRequest, error: IsthmusError) -> None:
        """End a request with an error, at the client and at its workers."""
        is_slow = error.spec.code == "slow_reader"
        if request.progress.logical.is_over and not is_slow:
            self._finish(request)  # the client has had its whole answer
            return
        if is_slow:
            request.buffer.drop()  # a client that does not read gets no memory to ignore
        request.buffer.fail(error)
        self.settle(request, error.spec.code)

    def fail_all(self, error: IsthmusError) -> None:
        """End every open request."""
        for request in list(self._open.values()):
            self.fail(request, error)

    def settle(self, request: OpenRequest, reason: str) -> None:
        """Cancel what is still open at workers and give back every booking; idempotent."""
        if request.is_settled:
            return
        request.is_settled = True
        request.close_lane()
        self._stop_waiting(request, reason)
        progress = request.progress
        for leg in progress.legs_to_cancel():
            self._sender.cancel(progress, leg, reason)
        for leg in progress.legs:
            self._sender.close(leg)
        check = check_progress(progress)
        if check is not None:
            self._hooks.hint_checked(check.error_tokens)
        self._cluster.desk.ended(progress.number, check.lies if check is not None else ())
        request.stop_timers()
        if request.when_settled is not None:
            request.when_settled()
        del self._open[progress.number]
        if not self._open:
            self._idle.set()

    def _expire(self, request: OpenRequest) -> None:
        self.fail(request, RequestError("deadline_exceeded", "the request's deadline passed"))

    # -- finding somebody --------------------------------------------------------------------

    def _try_to_begin(self, request: OpenRequest) -> IsthmusError | None:
        """Send to somebody; return why that is not possible now."""
        progress = request.progress
        failure: IsthmusError | None = None
        avoided = progress.failed | self._apart_from(progress)
        # Who was lost may be back, but others come first.
        for excluded in (avoided | progress.lost_at, avoided):
            try:
                decision = self._sender.begin(progress, frozenset(excluded))
            except RequestError as error:
                failure = error
                continue
            if len(progress.legs) == 1:
                # Not before: what admission refuses earns nobody a retry.
                for budget in (self._retries, self._losses, self._hedges):
                    budget.note_request()
                waited_s = self._clock.now() - progress.route_began
                self._hooks.decided(progress.call, decision, waited_s)
                self._watch_prefill(request, progress.legs[0])
            return None
        return None if self._sender.take_back(progress) else failure

    def _stop_waiting(self, request: OpenRequest, outcome: str) -> None:
        marks = request.progress.marks
        if request.wait_until is not None and marks.sent is not None:
            # What waits after a loss was sent before.
            marks.queued_s += max(0.0, marks.sent - (request.wait_until - self._config.wait_s))
        request.wait_until = None
        if self._waiting.pop(request.progress.number, None) is not None:
            self._hooks.waited(request.progress.call, outcome)

    def _look_later(self) -> None:
        if self._look_timer is None and self._waiting:
            loop = asyncio.get_running_loop()
            self._look_timer = loop.call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        """Try again for everyone who waits, unless one look shows that nobody can be found."""
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None
        if not self._waiting:
            return
        is_usable, is_coming = self._cluster.is_anyone_usable(), self._cluster.is_anyone_coming()
        now = self._clock.now()
        for request in list(self._waiting.values()):
            # Who offers it takes it back though nobody else is sent to that worker any more.
            is_offered = request.progress.offer() is not None
            if is_usable or is_offered or not _goes_on_waiting(request, now, is_coming=is_coming):
                self._guard(request, self.begin)
        self._look_later()

    def _guard(self, request: OpenRequest, handle: Callable[[OpenRequest], None]) -> None:
        """Let a fault in handling one request end that one alone."""
        try:
            handle(request)
        except Exception as error:
            self._fault(request, error)

    def _fault(self, request: OpenRequest, error: Exception) -> None:
        """End a request with what was raised, and is being caught, while it was handled."""
        if not isinstance(error, IsthmusError):
            request_id = request.progress.call.request_id
            log.exception("router.request_fault", request_id=request_id)  # noqa: LOG004 - it is
            error = _internal()
        self.fail(request, error)

    # -- hedging -----------------------------------------------------------------------------

    def _watch_prefill(self, request: OpenRequest, leg: Leg) -> None:
        """Have another worker try if this one turns out slow."""
        if leg.kind != PREFILL:
            return
        delay_s = self._hedge_clock.delay_s(leg.predicted_s)
        if delay_s is not None:
            loop = asyncio.get_running_loop()
            request.hedge_timer = loop.call_later(delay_s, self._hedge, request, leg)

    def _hedge(self, request: OpenRequest, leg: Leg) -> None:
        if not leg.is_open or leg.was_heard or not self._hedges.take():
            return
        if self._sender.hedge(request.progress, leg):
            self._hooks.hedged(request.progress.call, "sent")

    def _first_heard(self, request: OpenRequest, leg: Leg) -> None:
        """A prefill worker has begun to answer: whoever does the same work may stop."""
        progress, now = request.progress, self._clock.now()
        if leg.goes_on:
            return
        self._hedge_clock.note(leg.predicted_s, now - leg.sent_at)
        for rival in progress.legs:
            if rival is leg or rival.kind != PREFILL or not rival.is_open:
                continue
            self._hedge_clock.note(rival.predicted_s, now - rival.sent_at)
            self._sender.withdraw(progress, rival, "another worker was faster")
            if rival.attempt < leg.attempt:
                self._hooks.hedged(progress.call, "won")

    # -- frames (LinkEvents) -----------------------------------------------------------------

    def on_frame(self, link: WorkerLink, frame: worker_pb2.WorkerFrame) -> None:
        """Apply one frame of a worker."""
        worker_id = link.info.worker_id
        if frame.HasField("welcome"):
            self._look_again()
        if frame.rows:
            self._take_rows(link, frame.rows)
        if frame.tokens:
            self._take_tokens(link, frame.tokens)
        for ready in frame.tickets:
            self._apply(worker_id, ready.request, ready.attempt, partial(self._ticket, ready))
        for refusal in frame.refusals:
            self._apply(
                worker_id, refusal.request, refusal.attempt, partial(self._refusal, refusal)
            )
        for done in frame.done:
            self._apply(worker_id, done.request, done.attempt, partial(self._done, done))

    def _take_rows(self, link: WorkerLink, rows: bytes) -> None:
        """Take tokens that came as rows, each by the shortest way it can go."""
        worker_id, now = link.info.worker_id, self._clock.now()
        acks: dict[int, int] = {}
        for number, attempt, index, token_id in TOKEN_ROW.iter_unpack(rows):
            acks[number] = index
            request = self._open.get(number)
            if request is None:
                continue
            lane = request.lane
            try:
                if lane is None or not lane.take(worker_id, attempt, index, token_id, now):
                    leg = request.progress.open_leg(worker_id, attempt)
                    if leg is not None:
                        self._tokens(TokensIn(0, index, (token_id,)), request, leg, now)
                        request.open_lane(leg)
            except Exception as error:
                self._fault(request, error)
        link.ack(acks)

    def _take_tokens(self, link: WorkerLink, messages: Iterable[worker_pb2.Tokens]) -> None:
        """As _apply and _guard, without their partials: this happens for every token."""
        worker_id, now = link.info.worker_id, self._clock.now()
        for message in messages:
            number = message.request
            request = self._open.get(number)
            try:
                tokens = read_tokens(message)
                if tokens.token_ids:
                    link.ack({number: tokens.end_index - 1}, tokens.choice)
                if request is None:
                    continue
                leg = request.progress.open_leg(worker_id, message.attempt)
                if leg is not None:
                    self._tokens(tokens, request, leg, now)
            except Exception as error:
                if request is not None:
                    self._fault(request, error)

    def _apply(
        self,
        worker_id: WorkerId,
        number: int,
        attempt: int,
        handle: Callable[..., None],
    ) -> None:
        """Handle a message for the open leg it belongs to; late and fenced ones have none."""
        request = self._open.get(number)
        leg = request.progress.open_leg(worker_id, attempt) if request is not None else None
        if request is None or leg is None:
            return
        request.close_lane()
        self._guard(request, partial(handle, leg=leg))

    def _tokens(self, tokens: TokensIn, request: OpenRequest, leg: Leg, now: float) -> None:
        request.close_lane()
        progress = request.progress
        if leg.kind == PREFILL and not leg.was_heard:
            self._first_heard(request, leg)
        if leg.goes_on and not leg.has_tokens:
            self._moved(progress, leg, now)
        marks = progress.marks
        marks.newest_token = now
        leg.note_tokens(tokens.choice, tokens.end_index)
        if leg.kind == CONTINUE and marks.decode_token is None:
            marks.decode_token = now
        outputs = progress.logical.take_tokens(tokens)
        if not outputs:
            return
        if marks.first_token is None:
            marks.first_token = now
        request.buffer.put(outputs)
        if not isinstance(outputs[-1], ChoiceDelta):
            self._end_if_over(request)

    def _ticket(self, message: worker_pb2.TicketReady, request: OpenRequest, leg: Leg) -> None:
        if message.generated:
            self._migrate(message, request, leg)
            return
        if leg.kind != PREFILL or leg.ticket:
            return  # a resume sends it again
        if not leg.was_heard:
            self._first_heard(request, leg)
        leg.ticket = message.ticket
        prefill = self._cluster.view().find(leg.worker_id)
        if prefill is None or self._cluster.degraded:
            self._pass_on(request, leg, None)
            return
        task = asyncio.create_task(self._reserve_decode(request, leg, prefill))
        self._reserving.add(task)
        task.add_done_callback(self._reserving.discard)

    async def _reserve_decode(self, request: OpenRequest, leg: Leg, prefill: WorkerView) -> None:
        """Let the store choose who takes over: it knows what all replicas have sent meanwhile."""
        progress, attempt = request.progress, request.progress.attempt
        avoided = frozenset(progress.failed | progress.lost_at)
        reserved: Decision | None = None
        try:
            reserved = await self._cluster.desk.take_over(
                progress.facts, prefill, progress.number, avoided
            )
        except Exception:
            # Nobody hears of this task's end: the request must go on without the store.
            log.exception("router.reserve_fault", request_id=progress.call.request_id)
        if request.is_settled or leg.has_failed or attempt != progress.attempt:
            if request.is_settled:
                self._cluster.desk.ended(progress.number)
            return  # it ended, or was begun anew, meanwhile
        self._guard(request, partial(self._pass_on, leg=leg, reserved=reserved))

    def _pass_on(self, request: OpenRequest, leg: Leg, reserved: Decision | None) -> None:
        progress = request.progress
        if leg.is_lost:  # with the KV, while the store was asked
            self._replace(request)
            return
        is_passed_on = self._sender.pass_on(progress, leg, reserved)
        if not is_passed_on and not self._sender.stay(progress, leg):
            self._replace(request)

    def _migrate(self, message: worker_pb2.TicketReady, request: OpenRequest, leg: Leg) -> None:
        """A worker has stopped this request and offers its KV to another."""
        if leg.generated:
            return  # a resume sends it again
        leg.ticket, leg.generated = message.ticket, message.generated
        progress = request.progress
        progress.attempt += 1
        # A prefill worker goes on itself: else two of them could pass a request back and forth.
        if not self._sender.pass_on(progress, leg) and not self._sender.stay(progress, leg):
            self._replace(request)

    def _moved(self, progress: Progress, leg: Leg, now: float) -> None:
        """The first token after a migration is here."""
        last = progress.marks.newest_token
        gap_s = now - last if last is not None else 0.0
        progress.num_migrations += 1
        progress.migration_gap_us = max(progress.migration_gap_us, round(gap_s * 1e6))
        self._hooks.migrated(progress.call, gap_s)
        log.info(
            "router.migrated",
            request_id=progress.call.request_id,
            source=leg.source.worker_id if leg.source else "",
            target=leg.worker_id,
            tokens=leg.first_index,
            with_kv=leg.kind == CONTINUE,
            gap_ms=round(gap_s * 1e3, 1),
        )

    def _refusal(self, message: worker_pb2.Refusal, request: OpenRequest, leg: Leg) -> None:
        self._leg_failed(request, leg, known_code(message.error, "internal"), message.error)

    def _done(self, message: worker_pb2.Done, request: OpenRequest, leg: Leg) -> None:
        leg.note_report(stage_times(message.timing), message.cached_tokens)
        if message.reason == common_pb2.FINISH_REASON_ERROR:
            if not message.all_choices:
                # One choice failed; the request fails as a whole, so the others must end too.
                self._sender.cancel(request.progress, leg, "another choice failed")
            self._leg_failed(request, leg, known_code(message.error, "internal"), message.error)
        elif message.handed_off:
            self._handed_off(request, leg)
        elif message.reason in _FINISH:
            self._choice_done(message, request, leg)
        else:
            # Not by us: its leg would be closed. The worker gave the request up.
            self._leg_failed(request, leg, known_code(message.error, "worker_lost"), message.error)

    def _handed_off(self, request: OpenRequest, leg: Leg) -> None:
        """Prefill is over here; the KV stays pinned there until decode has it."""
        if not leg.ticket and leg.kind == PREFILL:
            raise RequestError("handoff_failed", "a worker handed off without a ticket")
        if not leg.ticket:
            # It meant to migrate the request and could not offer it. Tokens are drawn by seed and
            # position, so another worker makes the same ones.
            cause = common_pb2.Error(message="a worker gave a request up without a ticket")
            leg.is_given_up = True
            self._leg_failed(request, leg, "handoff_failed", cause)
            return
        self._cluster.record(leg.worker_id, Outcome.SUCCESS)
        leg.is_handed_off = True
        if leg.kind == PREFILL:
            request.progress.note_prefix(leg.worker_id)
            check = check_progress(request.progress)
            lies = check.lies if check is not None else ()
            self._cluster.desk.handed_off(request.progress.number, lies)
        self._sender.close(leg)
        self._end_if_over(request)

    def _choice_done(self, message: worker_pb2.Done, request: OpenRequest, leg: Leg) -> None:
        logical = request.progress.logical
        outputs = logical.end_choice(message.choice, _FINISH[message.reason])
        if message.all_choices:
            self._cluster.record(leg.worker_id, Outcome.SUCCESS)
            self._sender.close(leg)
            if not logical.has_all_ends():
                raise RequestError("internal", "a worker ended without ending every choice")
        self._deliver(request, outputs)

    def _deliver(self, request: OpenRequest, outputs: list[RouterOutput]) -> None:
        """Hand outputs to the client; with the last choice over, the request is."""
        if outputs:
            request.buffer.put(outputs)
        self._end_if_over(request)

    def _end_if_over(self, request: OpenRequest) -> None:
        """End a request whose choices are over, once its prefill worker has said what it did."""
        if request.is_settled or not request.progress.logical.is_over:
            return
        if not request.progress.awaits_report:
            self._finish(request)
        elif request.report_timer is None:
            loop = asyncio.get_running_loop()
            request.report_timer = loop.call_later(REPORT_WAIT_S, self._finish, request)

    def _finish(self, request: OpenRequest) -> None:
        if request.is_settled or request.has_end:
            return
        try:
            request.buffer.put([_END])
        except RequestError as error:
            self.fail(request, error)
            return
        request.has_end = True
        # Behind the task that writes it: the client need not wait for what is to be tidied up.
        settle = partial(self.settle, reason="complete")
        asyncio.get_running_loop().call_soon(self._guard, request, settle)

    # -- failures ----------------------------------------------------------------------------

    def _leg_failed(
        self, request: OpenRequest, leg: Leg, code: str, cause: common_pb2.Error
    ) -> None:
        """One leg is lost: go on without it, try elsewhere, or end the request."""
        progress = request.progress
        leg.has_failed = True
        self._sender.close(leg)
        if leg.kind == CONTINUE and not leg.has_tokens:
            self._hooks.handoff_failed(code)
        if leg.kind == CONTINUE and code == "handoff_failed" and leg.source is not None:
            # Of the pair alone: many that were under way when prefill died must not take a
            # healthy decode worker out.
            pair = (leg.source.worker_id, leg.worker_id)
            self._cluster.pairs.failed(pair, self._clock.now())
        elif not leg.is_lost:
            self._cluster.record(leg.worker_id, outcome_of(code))
        plan = plan_recovery(progress, leg, code, self._limits)
        if plan.cure is Cure.LEAVE:
            leg.has_failed = plan.reason != "decode_goes_on"  # that part of it was done
            self._end_if_over(request)
            return
        error = RequestError(
            code,
            cause.message or ERROR_TABLE[code].meaning,
            retry_after_ms=cause.retry_after_ms or None,
        )
        budget = self._retries if tells_of_load(code) else self._losses
        if plan.cure is Cure.GIVE_UP or not budget.take():
            self.fail(request, error)
            return
        progress.note_failure(leg, is_loss=is_loss(code))
        self._hooks.retried(progress.call, code)
        # A retry saved the request, but not the time: an operator should know of the worker.
        log.warning(
            "router.retry",
            request_id=progress.call.request_id,
            worker=leg.worker_id,
            kind=leg.kind,
            code=code,
            cure=plan.cure.value,
            reason=plan.reason,
        )
        if plan.source is not None:
            progress.attempt += 1  # fences the failed one at the worker that offers
            source = plan.source
            if self._sender.pass_on(progress, source) or self._sender.stay(progress, source):
                return
        self._replace(request, error)

    def _replace(self, request: OpenRequest, refusal: IsthmusError | None = None) -> None:
        """Have all that the client does not have yet made elsewhere."""
        progress = request.progress
        for leg in progress.legs_to_cancel():
            if leg.is_open:
                self._sender.withdraw(progress, leg, "it goes on elsewhere")
            else:
                self._sender.cancel(progress, leg, "it goes on elsewhere")
        self._deliver(request, progress.logical.rewind())
        if not request.is_settled and not progress.logical.is_over:
            self.begin(request, refusal)

    # -- Links (LinkEvents) ------------------------------------------------------------------

    def on_load(self, worker_id: WorkerId, reported_at: float) -> None:
        """Bookings that the report shows need not be counted twice."""
        self._cluster.bookings.load_reported(worker_id, reported_at)
        link = self._cluster.link(worker_id)
        if link is not None and link.state().is_draining:
            self._move_away(worker_id, link)

    def _move_away(self, worker_id: WorkerId, link: WorkerLink) -> None:
        """Ask a draining worker for what decodes there, as far as another can take it."""
        source, now = self._cluster.view().find(worker_id), self._clock.now()
        if source is None:
            return
        for request in self._open.values():
            progress = request.progress
            leg = _movable_leg(progress, worker_id, link.incarnation)
            if leg is None or now - leg.migrate_asked_at < MIGRATE_RETRY_S:
                continue
            if not self._sender.can_take(progress, source):
                continue
            leg.migrate_asked_at = now
            link.migrate(progress.number, leg.attempt)

    def on_cut(self, worker_id: WorkerId, reason: str) -> None:
        """Count it; requests wait for a resume."""
        self._hooks.link_cut(worker_id, reason)

    def on_lost(
        self,
        worker_id: WorkerId,
        incarnation: Incarnation,
        requests: Sequence[int] | None,
        cause: LossCause,
    ) -> None:
        """Let what was open at a worker that is gone go on elsewhere."""
        wanted = self._open if requests is None else frozenset(requests)
        lost: list[tuple[OpenRequest, Leg]] = []
        for request in self._open.values():
            for leg in request.progress.legs:
                is_theirs = leg.worker_id == worker_id and leg.incarnation == incarnation
                if is_theirs and request.progress.number in wanted:
                    leg.is_lost = True
                    if leg.is_open:
                        lost.append((request, leg))
        if lost and cause in (LossCause.DIED, LossCause.CUT):
            # Once, however much was open: it says one thing of the worker.
            self._cluster.record(worker_id, Outcome.FAILURE)
        if cause is LossCause.DIED:
            self._blame(worker_id, lost)
        for request, leg in lost:
            self._apply(worker_id, request.progress.number, leg.attempt, self._lost)

    def _blame(self, worker_id: WorkerId, lost: Sequence[tuple[OpenRequest, Leg]]) -> None:
        """Find who may have killed a worker; who has done so twice is not sent again."""
        now, poison = self._clock.now(), self._config.poison
        verdict = blame(
            [
                OpenWork(
                    number=request.progress.number,
                    is_new=not leg.was_heard and now - leg.sent_at < poison.new_for_s,
                    num_deaths=request.progress.num_deaths,
                )
                for request, leg in lost
            ],
            self._deaths.count(now),
        )
        self._deaths.note(now)
        for number in verdict.suspects:
            suspect = self._open[number].progress
            suspect.num_deaths += 1
            suspect.keep_apart_until = now + poison.keep_apart_s
        if verdict.quarantined is None:
            return
        guilty = self._open[verdict.quarantined]
        call = guilty.progress.call
        self._quarantine.add(call.tenant, prompt_digest(call.token_ids), now)
        self._hooks.quarantined(call)
        log.error("router.quarantined", request_id=call.request_id, worker=worker_id)
        self.fail(guilty, _quarantined())

    def _apart_from(self, progress: Progress) -> set[WorkerId]:
        """Return workers where another suspect is new: two could not be told apart there."""
        now, poison = self._clock.now(), self._config.poison
        if now >= progress.keep_apart_until:
            return set()
        return {
            leg.worker_id
            for other in self._open.values()
            if other.progress.num_deaths and other.progress is not progress
            for leg in other.progress.legs
            if leg.is_open and not leg.was_heard and now - leg.sent_at < poison.new_for_s
        }

    def _lost(self, request: OpenRequest, leg: Leg) -> None:
        cause = common_pb2.Error(message=f"worker {leg.worker_id} died or was cut off")
        self._leg_failed(request, leg, "worker_lost", cause)

    def resume_points(self, worker_id: WorkerId, incarnation: Incarnation) -> Sequence[ResumePoint]:
        """Return what is open at a worker and how far each choice has come."""
        for request in self._open.values():
            request.close_lane()
        return [
            ResumePoint(request.progress.number, leg.attempt, tuple(leg.next_index))
            for request in self._open.values()
            for leg in request.progress.legs
            if leg.is_open and leg.worker_id == worker_id and leg.incarnation == incarnation
        ]


def _goes_on_waiting(request: OpenRequest, now: float, *, is_coming: bool) -> bool:
    """Say whether waiting may help; what was under way waits even without a sign of it."""
    is_hopeful = is_coming or request.progress.num_losses > 0
    return is_hopeful and request.wait_until is not None and now < request.wait_until


def _movable_leg(
    progress: Progress, worker_id: WorkerId, incarnation: Incarnation | None
) -> Leg | None:
    """Return the leg by which a request decodes at that worker, if it is one that can move."""
    if progress.logical.num_choices != 1:
        return None
    for leg in progress.legs:
        is_theirs = leg.worker_id == worker_id and leg.incarnation == incarnation
        if is_theirs and leg.is_open and leg.kind != PREFILL and leg.has_tokens:
            return None if leg.generated else leg
    return None


def _internal() -> RequestError:
    return RequestError("internal", "the router failed to go on")


def _quarantined() -> RequestError:
    return RequestError("quarantined", "two workers died of this prompt; it is not run again")
