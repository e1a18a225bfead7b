"""Takes requests through the cluster: sends work items, applies workers' frames, retries, cancels.

Everything happens on one event loop; frames are handled synchronously. A fault in handling one
request ends that request and no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from services.common.clock import Clock
from services.common.errors import ERROR_TABLE, IsthmusError, RequestError
from services.common.ids import Incarnation, WorkerId
from services.pb import common_pb2, worker_pb2
from services.resilience.breaker import Outcome, outcome_of
from services.resilience.retry_budget import RetryBudget
from services.router.api import RequestEnd, RouterOutput
from services.router.cluster_watch import ClusterWatch
from services.router.config import RouterConfig
from services.router.hooks import RouterHooks
from services.router.legs import Leg, Progress
from services.router.link import ResumePoint, WorkerLink
from services.router.output_buffer import OutputBuffer
from services.router.policy import (
    LOCAL,
    REMOTE,
    STAY,
    Decision,
    choose,
    choose_decode,
    expected_tokens,
)
from services.router.view import WorkerView
from services.router.wire import (
    CONTINUE,
    PREFILL,
    WHOLE,
    WorkHead,
    build_work,
    known_code,
    read_tokens,
    stage_times,
)
from services.telemetry.logs import get_logger

log = get_logger(__name__)

MIGRATE_RETRY_S = 0.5  # a worker that could not offer a request is asked again after this
# A short answer may be over before its prefill worker's report has come: the end waits this long.
REPORT_WAIT_S = 0.05

_FINISH = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request in this router: its way through the cluster, and the client's end of it."""

    progress: Progress
    buffer: OutputBuffer
    deadline_timer: asyncio.TimerHandle | None = None
    report_timer: asyncio.TimerHandle | None = None  # every choice is over, a report is not here
    is_settled: bool = False  # nothing of it is open at any worker, nothing is booked


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
        self._budget = RetryBudget(config.retry_ratio)
        self._open: dict[int, OpenRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    # -- requests ----------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests that are not settled."""
        return len(self._open)

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def add(self, request: OpenRequest) -> None:
        """Take over a request; from now on it ends by its deadline at the latest."""
        progress = request.progress
        self._open[progress.number] = request
        self._idle.clear()
        self._budget.note_request()
        left_s = max(0.0, progress.call.deadline - self._clock.now())
        request.deadline_timer = asyncio.get_running_loop().call_later(
            left_s, self._expire, request
        )

    def begin(self, request: OpenRequest, exclude: frozenset[WorkerId]) -> Decision:
        """Choose mode and worker for the whole request and send it.

        Raises:
            RequestError: no_workers.
        """
        progress = request.progress
        while True:
            decision = choose(
                progress.facts, self._cluster.view(), progress.depth, self._config.policy, exclude
            )
            progress.attempt += 1
            progress.decision = decision
            progress.mode, progress.reason = decision.mode, decision.reason
            kind = PREFILL if decision.mode == REMOTE else WHOLE
            if self._send(request, kind, decision.worker, uncached_tokens=_uncached(decision)):
                return decision
            # Its Link broke in this very moment, or its queue is full.
            exclude |= {decision.worker.worker_id}

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
        progress = request.progress
        for leg in progress.legs_to_cancel():
            self._cancel(progress, leg, reason)
        for leg in progress.legs:
            self._close(leg)
        if request.deadline_timer is not None:
            request.deadline_timer.cancel()
        if request.report_timer is not None:
            request.report_timer.cancel()
        del self._open[progress.number]
        if not self._open:
            self._idle.set()

    def _expire(self, request: OpenRequest) -> None:
        self.fail(request, RequestError("deadline_exceeded", "the request's deadline passed"))

    # -- sending work ------------------------------------------------------------------------

    def _continue(self, request: OpenRequest, source: Leg) -> bool:
        """Pass the ticket to a decode worker; False when none can take it."""
        progress = request.progress
        while True:
            view = self._cluster.view()
            prefill, decision = view.find(source.worker_id), None
            # One that offers a running request is not who it should go on at.
            excluded = progress.failed | ({source.worker_id} if source.generated else set())
            if prefill is not None:
                decision = choose_decode(
                    progress.facts, prefill, view, self._config.policy, frozenset(excluded)
                )
            if decision is None:
                return False
            if self._send(request, CONTINUE, decision.worker, source=source):
                if not source.generated:
                    progress.marks.continued = self._clock.now()
                return True
            progress.failed.add(decision.worker.worker_id)

    def _stay(self, request: OpenRequest, source: Leg) -> bool:
        """Let the prefill worker go on by itself: nobody is left to hand off to.

        It starts the request anew under a higher attempt, which fences the first: the prompt is
        in its cache, and tokens are drawn by seed and position, so what the client already has
        comes out again and is taken once.
        """
        progress = request.progress
        worker = self._cluster.view().find(source.worker_id)
        if worker is None or progress.facts.force_mode == REMOTE:
            return False
        progress.attempt += 1
        if not self._send(request, WHOLE, worker):
            return False
        progress.mode, progress.reason = STAY, "no_decode_worker"
        source.has_failed = True
        self._close(source)
        return True

    def _start_over(self, request: OpenRequest, source: Leg) -> bool:
        """Compute a request anew whose KV cannot be had; what the client has is not drawn again."""
        progress = request.progress
        for mode in (LOCAL, STAY):
            facts = replace(progress.facts, force_mode=mode)
            view, excluded = self._cluster.view(), frozenset({*progress.failed, source.worker_id})
            try:
                decision = choose(facts, view, progress.depth, self._config.policy, excluded)
            except RequestError:
                continue  # no worker of that role
            progress.attempt += 1
            if self._send(request, WHOLE, decision.worker, source=source):
                return True
        # Nobody else: the worker that offered it takes it back, draining or not.
        worker = self._cluster.view().find(source.worker_id)
        progress.attempt += 1
        return worker is not None and self._send(request, WHOLE, worker, source=source)

    def _send(
        self,
        request: OpenRequest,
        kind: str,
        worker: WorkerView,
        *,
        uncached_tokens: int = 0,
        source: Leg | None = None,
    ) -> bool:
        """Send one work item and book it; False when the Link cannot take it.

        Args:
            source: whose KV, or whose tokens so far, the worker goes on from.
        """
        progress = request.progress
        link = self._cluster.link(worker.worker_id)
        if link is None or link.incarnation is None:
            return False
        now = self._clock.now()
        head = WorkHead(
            request=progress.number,
            attempt=progress.attempt,
            kind=kind,
            incarnation=link.incarnation,
            # After a refusal the generation is left out: the store's word on it may be old.
            slot_gen=0 if progress.num_retries else worker.slot_gen,
            deadline_ms=max(1, int((progress.call.deadline - now) * 1000)),
            ticket=source.ticket if source is not None and kind == CONTINUE else b"",
            generated=source.generated if source is not None else b"",
        )
        if not link.send_work(build_work(head, progress.call, progress.hashes)):
            return False
        self._cluster.acquire(worker.worker_id)
        resident = 0 if kind == PREFILL else expected_tokens(progress.facts, self._config.policy)
        booking = self._cluster.bookings.book(worker.worker_id, uncached_tokens, resident, now)
        progress.legs.append(
            Leg(
                kind=kind,
                worker_id=worker.worker_id,
                incarnation=link.incarnation,
                attempt=progress.attempt,
                booking=booking,
                next_index=[head.first_index] * progress.logical.num_choices,
                source=source,
                first_index=head.first_index,
            )
        )
        if progress.marks.sent is None:
            progress.marks.sent = now
        return True

    def _cancel(self, progress: Progress, leg: Leg, reason: str) -> None:
        link = self._cluster.link(leg.worker_id)
        if link is not None and link.incarnation == leg.incarnation:
            link.cancel(progress.number, leg.attempt, reason)

    def _close(self, leg: Leg) -> None:
        leg.is_open = False
        self._cluster.bookings.release(leg.booking)

    # -- frames (LinkEvents) -----------------------------------------------------------------

    def on_frame(self, link: WorkerLink, frame: worker_pb2.WorkerFrame) -> None:
        """Apply one frame of a worker."""
        worker_id = link.info.worker_id
        for tokens in frame.tokens:
            last = tokens.first_index + len(tokens.token_ids) // 4 - 1
            if last >= 0:
                link.ack(tokens.request, tokens.choice, last)
            self._apply(worker_id, tokens.request, tokens.attempt, partial(self._tokens, tokens))
        for ready in frame.tickets:
            self._apply(worker_id, ready.request, ready.attempt, partial(self._ticket, ready))
        for refusal in frame.refusals:
            self._apply(
                worker_id, refusal.request, refusal.attempt, partial(self._refusal, refusal)
            )
        for done in frame.done:
            self._apply(worker_id, done.request, done.attempt, partial(self._done, done))

    def _apply(
        self,
        worker_id: WorkerId,
        number: int,
        attempt: int,
        handle: Callable[[OpenRequest, Leg], None],
    ) -> None:
        """Handle a message for the open leg it belongs to; late and fenced ones have none."""
        request = self._open.get(number)
        leg = request.progress.open_leg(worker_id, attempt) if request is not None else None
        if request is None or leg is None:
            return
        try:
            handle(request, leg)
        except IsthmusError as error:
            self.fail(request, error)
        except Exception:
            log.exception("router.request_fault", request_id=request.progress.call.request_id)
            self.fail(request, RequestError("internal", "the router failed to go on"))

    def _tokens(self, message: worker_pb2.Tokens, request: OpenRequest, leg: Leg) -> None:
        progress, tokens = request.progress, read_tokens(message)
        now = self._clock.now()
        if leg.source is not None and leg.source.generated and not leg.has_tokens:
            self._moved(progress, leg, now)
        progress.marks.newest_token = now
        leg.note_tokens(tokens.choice, tokens.first_index + len(tokens.token_ids))
        if leg.kind == CONTINUE and progress.marks.decode_token is None:
            progress.marks.decode_token = now
        outputs = progress.logical.take_tokens(tokens)
        if outputs and progress.marks.first_token is None:
            progress.marks.first_token = now
        self._deliver(request, outputs)

    def _ticket(self, message: worker_pb2.TicketReady, request: OpenRequest, leg: Leg) -> None:
        if message.generated:
            self._migrate(message, request, leg)
            return
        if leg.kind != PREFILL or leg.ticket:
            return  # a resume sends it again
        leg.ticket = message.ticket
        if not self._continue(request, leg) and not self._stay(request, leg):
            raise RequestError("no_workers", "no decode worker can take the request over")

    def _migrate(self, message: worker_pb2.TicketReady, request: OpenRequest, leg: Leg) -> None:
        """A decode worker has stopped this request and offers its KV to another."""
        if leg.generated:
            return  # a resume sends it again
        leg.ticket, leg.generated = message.ticket, message.generated
        request.progress.attempt += 1
        if not self._continue(request, leg) and not self._start_over(request, leg):
            raise RequestError("no_workers", "no other worker can take the request over")

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
                self._cancel(request.progress, leg, "another choice failed")
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
        self._close(leg)
        self._end_if_over(request)

    def _choice_done(self, message: worker_pb2.Done, request: OpenRequest, leg: Leg) -> None:
        logical = request.progress.logical
        outputs = logical.end_choice(message.choice, _FINISH[message.reason])
        if message.all_choices:
            self._cluster.record(leg.worker_id, Outcome.SUCCESS)
            self._close(leg)
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
        if request.is_settled:
            return
        try:
            # Its figures are filled in when it is given to the client.
            request.buffer.put([RequestEnd(0, 0, 0)])
        except RequestError as error:
            self.fail(request, error)
            return
        self.settle(request, "complete")

    # -- failures ----------------------------------------------------------------------------

    def _leg_failed(
        self, request: OpenRequest, leg: Leg, code: str, cause: common_pb2.Error
    ) -> None:
        """One leg is lost: go on without it, try elsewhere, or end the request."""
        progress = request.progress
        leg.has_failed = True
        self._close(leg)
        self._cluster.record(leg.worker_id, outcome_of(code))
        if leg.kind == CONTINUE and not leg.has_tokens:
            self._hooks.handoff_failed(code)
        if leg.kind == PREFILL and self._outlives_prefill(progress):
            leg.has_failed = False
            self._end_if_over(request)
            return
        error = RequestError(
            code,
            cause.message or ERROR_TABLE[code].meaning,
            retry_after_ms=cause.retry_after_ms or None,
        )
        if not self._may_retry(progress, leg, code):
            self.fail(request, error)
            return
        progress.num_retries += 1
        progress.failed.add(leg.worker_id)
        self._hooks.retried(progress.call, code)
        # A retry saved the request, but not the time: an operator should know of the worker.
        log.warning(
            "router.retry",
            request_id=progress.call.request_id,
            worker=leg.worker_id,
            kind=leg.kind,
            code=code,
        )
        if not self._try_again(request, leg, code):
            self.fail(request, error)

    def _outlives_prefill(self, progress: Progress) -> bool:
        """Decode goes on without its source once every first token is here."""
        receiver = progress.newest(CONTINUE)
        return receiver is not None and progress.logical.has_first_tokens

    def _may_retry(self, progress: Progress, leg: Leg, code: str) -> bool:
        """Say whether a leg's work may be done again without the client noticing."""
        if not ERROR_TABLE[code].retryable or progress.num_retries >= self._config.max_retries:
            return False
        # The tokens of a finished prefill, or of a worker it migrated from, are no obstacle.
        begins_later = leg.kind == CONTINUE or leg.first_index > 0
        is_clean = not leg.has_tokens if begins_later else not progress.logical.has_output
        return (is_clean or leg.is_given_up) and self._budget.take()

    def _try_again(self, request: OpenRequest, failed: Leg, code: str) -> bool:
        progress, source = request.progress, failed.source
        if source is not None and source.generated:
            progress.attempt += 1  # fences the failed one at the worker that offers
            may_pull = failed.kind == CONTINUE and not failed.is_given_up
            if may_pull and self._continue(request, source):
                return True
            return self._start_over(request, source)
        source = progress.newest(PREFILL)
        if failed.kind == CONTINUE and source is not None and not failed.is_given_up:
            progress.attempt += 1  # fences the failed one at the prefill worker
            return self._continue(request, source) or self._stay(request, source)
        for leg in progress.legs:
            if leg.is_open:
                # A receiver without its source.
                leg.has_failed = True
                self._cancel(progress, leg, code)
                self._close(leg)
        try:
            self.begin(request, frozenset(progress.failed))
        except RequestError:
            if code != "stale_incarnation":
                return False
            # The worker lives, only our idea of it was old: it may be asked again.
            return self._begin_anywhere(request)
        return True

    def _begin_anywhere(self, request: OpenRequest) -> bool:
        try:
            self.begin(request, frozenset())
        except RequestError:
            return False
        return True

    # -- Links (LinkEvents) ------------------------------------------------------------------

    def on_load(self, worker_id: WorkerId, reported_at: float) -> None:
        """Bookings that the report shows need not be counted twice."""
        self._cluster.bookings.load_reported(worker_id, reported_at)
        link = self._cluster.link(worker_id)
        if link is not None and link.state().is_draining:
            self._move_away(worker_id, link)

    def _move_away(self, worker_id: WorkerId, link: WorkerLink) -> None:
        """Ask a draining worker for what decodes there, as far as another can take it."""
        view, now = self._cluster.view(), self._clock.now()
        source = view.find(worker_id)
        if source is None:
            return
        for request in self._open.values():
            progress = request.progress
            leg = _movable_leg(progress, worker_id, link.incarnation)
            if leg is None or now - leg.migrate_asked_at < MIGRATE_RETRY_S:
                continue
            failed = frozenset(progress.failed)
            if choose_decode(progress.facts, source, view, self._config.policy, failed) is None:
                continue
            leg.migrate_asked_at = now
            link.migrate(progress.number, leg.attempt)

    def on_cut(self, worker_id: WorkerId, reason: str) -> None:
        """Count it; requests wait for a resume."""
        self._hooks.link_cut(worker_id, reason)

    def on_lost(
        self, worker_id: WorkerId, incarnation: Incarnation, requests: Sequence[int] | None
    ) -> None:
        """End or retry what was open at a worker that is gone."""
        wanted = None if requests is None else frozenset(requests)
        for request in list(self._open.values()):
            progress = request.progress
            if wanted is not None and progress.number not in wanted:
                continue
            for leg in list(progress.legs):
                is_theirs = leg.worker_id == worker_id and leg.incarnation == incarnation
                if leg.is_open and is_theirs and not request.is_settled:
                    self._apply(worker_id, progress.number, leg.attempt, self._lost)

    def _lost(self, request: OpenRequest, leg: Leg) -> None:
        cause = common_pb2.Error(message=f"worker {leg.worker_id} died or was cut off")
        self._leg_failed(request, leg, "worker_lost", cause)

    def resume_points(self, worker_id: WorkerId, incarnation: Incarnation) -> Sequence[ResumePoint]:
        """Return what is open at a worker and how far each choice has come."""
        return [
            ResumePoint(request.progress.number, leg.attempt, tuple(leg.next_index))
            for request in self._open.values()
            for leg in request.progress.legs
            if leg.is_open and leg.worker_id == worker_id and leg.incarnation == incarnation
        ]


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


def _uncached(decision: Decision) -> int:
    """Prompt tokens the chosen worker has to compute; unknown (0) in a decode worker's terms."""
    return decision.terms[0].uncached_tokens if decision.mode != LOCAL else 0
