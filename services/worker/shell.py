"""The glue of one worker process: Links on one side, engine and transfer threads on the other.

Threads and owners: sessions and the table of work items belong to the event loop; blocks to the
engine thread; transfers to theirs. Engine events that concern a transfer are handed on where
they arrive (the transfer ends take thread-safe, non-blocking commands); what a router must see
crosses to the loop in one batch a step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from services.common.clock import Clock
from services.common.errors import RequestError
from services.common.sampling import SamplingParams
from services.decode.admission import AdmissionLimits, FailureLadder, admit
from services.engine.api import (
    AttachReleased,
    BlocksReserved,
    BlocksSealed,
    CacheDelta,
    CancelReceive,
    CancelSource,
    ChoiceDone,
    Engine,
    EngineEvent,
    EngineRequest,
    MigrateRefused,
    OfferReady,
    PrefillFinished,
    ReceiveWanted,
    Refused,
    RequestKey,
    TokensOut,
    UnpinWanted,
    WorkKind,
)
from services.kv.hashing import HashScope, chain_hashes
from services.pb import common_pb2, worker_pb2
from services.telemetry.logs import get_logger
from services.transfer.api import (
    Offer,
    Sink,
    SinkEvent,
    SinkMoveWanted,
    SinkReady,
    Source,
    SourceEvent,
    SourceUnpinned,
)
from services.worker import convert
from services.worker.intake import Intake, WorkerIdentity, WorkItem
from services.worker.session import DoneOut, Outgoing, RouterSession, TicketOut
from services.worker.trace import WorkTracer

_WARM_UP_KEY = RequestKey("warm-up")
_WARM_UP_TOKENS = 96

log = get_logger(__name__)

Event = TypeVar("Event")
OutEvent = TokensOut | TicketOut | ChoiceDone | Refused


@dataclass(slots=True)
class RoleState:
    """The worker's role weights and drain state; written by the loop only."""

    prefill: float
    decode: float
    state: common_pb2.WorkerState.ValueType = common_pb2.WORKER_STATE_LIVE
    weights: common_pb2.RoleWeights = field(init=False)

    def __post_init__(self) -> None:
        """Build the wire form once."""
        self.weights = common_pb2.RoleWeights(prefill=self.prefill, decode=self.decode)


class WorkerShell:
    """Routes work items into the engine and its events to routers and transfers."""

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: Engine,
        source: Source,
        sink: Sink,
        clock: Clock,
        tracer: WorkTracer,
        limits: AdmissionLimits,
    ) -> None:
        self.identity = identity
        self.engine = engine
        self.source = source
        self.sink = sink
        self.role = RoleState(1.0, 1.0)
        # The slot generations that are ours: the current and the previous one, from the lease.
        self.slot_gens: Callable[[], tuple[int, ...]] = tuple
        self._clock = clock
        self._tracer = tracer
        self._limits = limits
        self._intake = Intake(identity, limits.request, lambda: self.slot_gens())
        self._ladder = FailureLadder(self._limits)
        self._ladder_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warm_up: asyncio.Future[None] | None = None
        self._works: dict[RequestKey, WorkItem] = {}
        self._unoffered: set[RequestKey] = set()  # engine thread only: offers that failed
        # Callers of `migrate` that wait for a ticket; the event loop's.
        self._migrations: dict[RequestKey, asyncio.Future[bytes]] = {}
        self._sessions: dict[int, RouterSession] = {}
        self._outboxes: dict[int, Callable[[Sequence[Outgoing]], None]] = {}

    # -- life ------------------------------------------------------------------------------

    def start(
        self, loop: asyncio.AbstractEventLoop, on_cache_delta: Callable[[CacheDelta], None]
    ) -> None:
        """Start the transfer ends, then the engine."""
        self._loop = loop
        self.source.start(self._on_source_event)
        self.sink.start(self._on_sink_event)
        self.engine.start(self._on_engine_events, on_cache_delta)

    def stop(self, timeout_s: float) -> None:
        """Stop in reverse order; blocks. Open work items end as cancelled."""
        self.engine.stop(timeout_s)
        self.sink.stop(timeout_s)
        self.source.stop(timeout_s)

    @property
    def is_draining(self) -> bool:
        """True once new work is refused."""
        return self.role.state == common_pb2.WORKER_STATE_DRAINING

    def begin_drain(self) -> None:
        """Refuse new work from now on, and ask for blocks that others read in our pool."""
        self.role.state = common_pb2.WORKER_STATE_DRAINING
        self.source.ask_back()

    def end_drain(self) -> None:
        """Take new work again."""
        self.role.state = common_pb2.WORKER_STATE_LIVE

    async def warm_up(self) -> None:
        """Run one short request through the engine: memory is touched, rates are known."""
        assert self._loop is not None
        self._warm_up = self._loop.create_future()
        manifest = self.identity.manifest
        token = next(t for t in range(manifest.vocab_size) if t not in manifest.eos_token_ids)
        tokens = np.full(_WARM_UP_TOKENS, token, dtype=np.uint32)
        # A tenant of its own: no client's prompt ever matches these blocks.
        scope = HashScope(manifest.weights_digest, "", _WARM_UP_KEY)
        request = EngineRequest(
            key=_WARM_UP_KEY,
            request_id=_WARM_UP_KEY,
            kind=WorkKind.WHOLE,
            token_ids=tokens,
            block_hashes=chain_hashes(scope, tokens),
            sampling=SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
            deadline=self._clock.now() + self._limits.request.default_timeout_ms / 1000,
            tenant=_WARM_UP_KEY,
        )
        self.engine.submit(request)
        await self._warm_up

    def _warmed_up(self, event: ChoiceDone | Refused) -> None:
        """End the warm-up; the worker does not start with an engine that cannot answer."""
        code = event.code if isinstance(event, Refused) else event.error_code
        if self._warm_up is None or self._warm_up.done():
            return
        if code is None:
            self._warm_up.set_result(None)
        else:
            self._warm_up.set_exception(RequestError(code, "the warm-up request failed"))

    def set_initial_role(self, prefill: float, decode: float) -> None:
        """Name the weights the engine was made with."""
        self.role = RoleState(prefill, decode)

    def set_role(self, prefill: float, decode: float) -> None:
        """Change the shares of the step budget."""
        state = self.role.state
        self.role = RoleState(prefill, decode, state)
        self.engine.set_role(prefill, decode)

    def num_open(self) -> int:
        """Work items not ended."""
        return len(self._works)

    # -- links (event loop) ----------------------------------------------------------------

    def attach(
        self,
        attach: worker_pb2.Attach,
        send: Callable[[Sequence[Outgoing]], None],
    ) -> tuple[RouterSession, tuple[int, ...]]:
        """Bind a Link to its router's session; returns the session and requests that are lost."""
        session = self._sessions.get(attach.router_incarnation)
        if session is None:
            session = RouterSession(attach.router_id, attach.router_incarnation)
            self._sessions[attach.router_incarnation] = session
        resume = {(r.request, r.attempt): tuple(r.next_index) for r in attach.resume}
        result = session.attach(resume)
        self._outboxes[session.router_incarnation] = send
        for key in result.cancel:
            self.engine.cancel(key, "the router no longer wants it")
        if result.resend:
            send(result.resend)
        self._resume_paused(session)
        log.info(
            "worker.link_attached",
            router=session.router_id,
            resumed=len(resume) - len(result.lost),
            lost=len(result.lost),
        )
        return session, result.lost

    def detach(self, session: RouterSession, send: Callable[[Sequence[Outgoing]], None]) -> None:
        """A Link ended; its requests wait for a resume unless a newer Link took over."""
        # Equality, not identity: every look-up of a bound method makes a new object.
        if self._outboxes.get(session.router_incarnation) == send:
            del self._outboxes[session.router_incarnation]
            session.detach(self._clock.now())
            log.info("worker.link_detached", router=session.router_id, open=len(session))

    def handle(self, session: RouterSession, frame: worker_pb2.RouterFrame) -> None:
        """Apply one router frame."""
        for ack in frame.ack:
            session.acknowledge(ack.request, ack.choice, ack.index)
        self._resume_paused(session)
        # Work first: a frame may hold work and its own cancel, when a client left at once. A
        # cancel names its attempt, so it never meets newer work of the same frame.
        for work in frame.work:
            self._take(session, work)
        for cancel in frame.cancel:
            self._cancel(session, cancel)
        for migrate in frame.migrate:
            entry = session.current(migrate.request)
            if entry is not None and entry.attempt == migrate.attempt and entry.ended_at is None:
                self.engine.migrate(entry.key)

    def _resume_paused(self, session: RouterSession) -> None:
        for key in session.take_resumable():
            self.engine.resume(key)

    async def migrate(self, router_incarnation: int, request: int, timeout_s: float) -> bytes:
        """Offer a running request's KV and return its ticket; its router hears of it too.

        Raises:
            RequestError: not_found, or invalid_argument when it cannot move now.
            TimeoutError: the engine did not answer in time.
        """
        session = self._sessions.get(router_incarnation)
        entry = session.current(request) if session is not None else None
        if entry is None or entry.ended_at is not None or entry.key not in self._works:
            raise RequestError("not_found", "no such request is open here", param="request")
        if entry.key in self._migrations:
            raise RequestError("duplicate_request", "its migration has begun", param="request")
        ticket = asyncio.get_running_loop().create_future()
        self._migrations[entry.key] = ticket
        try:
            self.engine.migrate(entry.key)
            return await asyncio.wait_for(ticket, timeout_s)
        finally:
            del self._migrations[entry.key]

    def _migrate_refused(self, event: MigrateRefused) -> None:
        work = self._works.get(event.key)
        log.info(
            "worker.migrate_refused",
            request_id=work.request_id if work else "",
            reason=event.reason,
        )
        self._end_migration(event.key, RequestError("invalid_argument", event.reason))

    def _end_migration(self, key: RequestKey, outcome: bytes | RequestError) -> None:
        """Answer the caller that waits for this request's migration, if one does."""
        waiting = self._migrations.get(key)
        if waiting is None or waiting.done():
            return
        if isinstance(outcome, RequestError):
            waiting.set_exception(outcome)
        else:
            waiting.set_result(outcome)

    def sweep(self) -> None:
        """Give up requests whose router did not come back; forget what is long over."""
        now = self._clock.now()
        for incarnation, session in list(self._sessions.items()):
            for key, reason in session.sweep(now):
                work = self._works.get(key)
                log.warning(
                    "worker.given_up",
                    request_id=work.request_id if work else "",
                    router=session.router_id,
                    reason=reason,
                )
                self.engine.cancel(key, reason)
            if session.is_idle():
                del self._sessions[incarnation]

    def _cancel(self, session: RouterSession, cancel: worker_pb2.Cancel) -> None:
        entry = session.current(cancel.request)
        # Also when it has ended here by being handed off: its blocks are still lent then, and
        # the engine ignores keys it no longer knows.
        if entry is not None and entry.attempt <= cancel.attempt:
            self.engine.cancel(entry.key, cancel.reason or "cancelled by the router")

    def _take(self, session: RouterSession, work: worker_pb2.Work) -> None:
        """Admit one work item or answer with a refusal."""
        key = RequestKey(f"{session.router_incarnation:x}/{work.request}/{work.attempt}")
        try:
            self._intake.check_fencing(session, work)
            self._check_room(is_return=self._is_return(session, work))
            item, request = self._intake.read(session, key, work, self._clock.now())
            if item.kind is WorkKind.CONTINUE:
                request = replace(request, kv_form=self.sink.form_of(item.ticket))
        except RequestError as error:
            refusal = Refused(key, error.spec.code, error.message)
            self._send_refusal(session, refusal, work)
            return
        fenced = session.admit(key, work.request, work.attempt)
        if fenced is not None:
            self.engine.cancel(fenced, "a higher attempt took over")
        self._works[key] = item
        self._tracer.begin(item.key, item.traceparent, item.kind)
        try:
            self.engine.submit(request)
        except RequestError as error:
            self._deliver((Refused(key, error.spec.code, error.message),))

    def _is_return(self, session: RouterSession, work: worker_pb2.Work) -> bool:
        """Say whether a request comes back that was offered to others here: it is no new work."""
        entry = session.current(work.request)
        return entry is not None and entry.ticket is not None and bool(work.generated)

    def _check_room(self, *, is_return: bool) -> None:
        is_draining = self.is_draining and not is_return
        verdict = admit(self.engine.load(), is_draining=is_draining, limits=self._limits)
        if not verdict.is_taken:
            raise RequestError(verdict.code, verdict.message)

    def _send_refusal(
        self, session: RouterSession, refusal: Refused, work: worker_pb2.Work
    ) -> None:
        log.info(
            "worker.work_refused",
            request_id=work.request_id,
            attempt=work.attempt,
            code=refusal.code,
        )
        send = self._outboxes.get(session.router_incarnation)
        if send is not None:
            send((refusal,))

    # -- engine thread ---------------------------------------------------------------------

    def _on_engine_events(self, events: Sequence[EngineEvent]) -> None:
        # A prompt's last blocks and its end come in one step: the transfer thread wakes once.
        with self.source.batch():
            outgoing = self._take_engine_events(events)
        if outgoing:
            self._on_loop(self._deliver, outgoing)

    def _take_engine_events(self, events: Sequence[EngineEvent]) -> list[OutEvent]:
        outgoing: list[OutEvent] = []
        for event in events:
            if isinstance(event, (TokensOut, ChoiceDone, Refused)):
                outgoing.append(event)
            elif isinstance(event, OfferReady):
                ticket = self._offer(event)
                if ticket is not None:
                    outgoing.append(TicketOut(event.key, ticket, event.generated))
            elif isinstance(event, MigrateRefused):
                self._on_loop(self._migrate_refused, event)
            elif isinstance(event, AttachReleased):
                self.sink.detach(event.key, is_intact=event.is_intact)
            else:
                self._on_transfer_event(event)
        return outgoing

    def _on_loop(self, call: Callable[[Event], None], event: Event) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(call, event)

    def _on_transfer_event(
        self,
        event: BlocksSealed
        | PrefillFinished
        | CancelSource
        | UnpinWanted
        | ReceiveWanted
        | BlocksReserved
        | CancelReceive,
    ) -> None:
        key = event.key
        if isinstance(event, BlocksSealed):
            if key not in self._unoffered:
                self.source.blocks_sealed(key, event.lo, event.block_ids)
        elif isinstance(event, PrefillFinished):
            if key not in self._unoffered:
                self.source.prefill_finished(key, convert.final_info(event))
        elif isinstance(event, CancelSource):
            if key in self._unoffered:
                self._unoffered.discard(key)
                self.engine.source_released(key)
            else:
                self.source.cancel(key, event.reason)
        elif isinstance(event, UnpinWanted):
            self.source.unpin(key)
        elif isinstance(event, ReceiveWanted):
            self._open(event)
        elif isinstance(event, BlocksReserved):
            self.sink.reserve(key, event.block_ids, event.tail_block)
        else:
            self.sink.cancel(key, event.reason)

    def _offer(self, event: OfferReady) -> bytes | None:
        """Open a transfer; when the source cannot take one, end the item instead of leaking it."""
        work = self._works.get(event.key)
        offer = Offer(
            key=event.key,
            request_id=event.request_id,
            num_tokens=event.num_tokens,
            block_hashes=event.block_hashes,
            tenant=event.tenant,
            traceparent=work.traceparent if work else "",
            is_exact=event.is_exact,
        )
        try:
            return self.source.offer(offer)
        except RequestError as error:
            log.warning("worker.offer_failed", request_id=event.request_id, error=error.message)
            self._unoffered.add(event.key)
            self.engine.cancel(event.key, "the KV could not be offered")
            return None

    def _open(self, event: ReceiveWanted) -> None:
        work = self._works.get(event.key)
        if work is None:
            self.engine.receive_failed(
                event.key, "internal", "the work item is unknown", recompute=False
            )
            return
        self.sink.open(
            event.key,
            work.ticket,
            work.attempt,
            event.have,
            event.block_hashes,
            work.traceparent,
            event.kv_form,
        )

    # -- transfer threads ------------------------------------------------------------------

    def _on_source_event(self, event: SourceEvent) -> None:
        key = RequestKey(event.key)
        if isinstance(event, SourceUnpinned):
            self.engine.source_unpinned(key, event.block_ids)
            return
        self._tracer.source_released(event)
        self.engine.source_released(key)

    def _on_sink_event(self, event: SinkEvent) -> None:
        key = RequestKey(event.key)
        work = self._works.get(key)
        if isinstance(event, SinkMoveWanted):
            log.info(
                "worker.move_attached",
                request_id=work.request_id if work else "",
                reason=event.reason,
            )
            self.engine.move_attached(key)
            return
        if work is not None:
            work.stats = event.stats
        self._tracer.sink_ended(event)
        if isinstance(event, SinkReady):
            first = tuple(convert.first_token(info) for info in event.final.first)
            self.engine.received(key, first, event.final.prefill_us, event.kv_form, event.attached)
            return
        with self._ladder_lock:
            step = self._ladder.next_step(can_recompute=event.can_recompute, now=self._clock.now())
        log.warning(
            "worker.receive_failed",
            request_id=work.request_id if work else "",
            code=event.code,
            message=event.message,
            next=step.reason,
        )
        if work is not None:
            work.was_recomputed = step.recompute
        self.engine.receive_failed(key, event.code, event.message, recompute=step.recompute)

    # -- event loop ------------------------------------------------------------------------

    def _deliver(self, outgoing: Sequence[OutEvent]) -> None:
        """Record outputs and send them on the Links of their routers."""
        now = self._clock.now()
        batches: dict[int, list[Outgoing]] = {}
        for event in outgoing:
            work = self._works.get(event.key)
            if work is None:
                if event.key == _WARM_UP_KEY and not isinstance(event, (TokensOut, TicketOut)):
                    self._warmed_up(event)
                continue
            item: Outgoing = event if not isinstance(event, ChoiceDone) else _done_out(work, event)
            if not work.session.record(item, now):
                self._pause(work, event.key)
            batches.setdefault(work.session.router_incarnation, []).append(item)
            if isinstance(event, TicketOut):
                self._end_migration(event.key, event.ticket)
            if isinstance(event, Refused) or (isinstance(event, ChoiceDone) and event.all_choices):
                self._ended(event)
        for incarnation, items in batches.items():
            send = self._outboxes.get(incarnation)
            if send is not None:
                send(items)

    def _pause(self, work: WorkItem, key: RequestKey) -> None:
        """A router that is slow for a moment must not cost its request, nor our memory."""
        log.info("worker.paused", request_id=work.request_id, router=work.session.router_id)
        self.engine.pause(key)

    def _ended(self, item: ChoiceDone | Refused) -> None:
        self._tracer.ended(item)
        work = self._works.pop(item.key, None)
        if work is None:
            return
        # A migration has given its ticket before it ends the work item.
        self._end_migration(item.key, RequestError("not_found", "the request has ended"))
        code = item.code if isinstance(item, Refused) else item.error_code
        log.info(
            "worker.work_ended",
            request_id=work.request_id,
            attempt=work.attempt,
            kind=work.kind.value,
            code=code or "",
        )

    # -- wire ------------------------------------------------------------------------------

    def load_message(self) -> worker_pb2.Load:
        """Latest load as a message."""
        return convert.wire_load(self.engine.load(), self.role.weights, self.role.state)

    def welcome(self, proto: int, lost: Sequence[int]) -> worker_pb2.Welcome:
        """First frame of a Link."""
        gens = self.slot_gens()
        return worker_pb2.Welcome(
            proto=proto,
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            slot_gen=gens[0] if gens else 0,
            model=self.identity.manifest.name,
            kv_identity_fp=self.identity.kv_identity_fp,
            weights_digest=self.identity.manifest.weights_digest,
            role=self.role.weights,
            lost=lost,
        )


def _done_out(work: WorkItem, event: ChoiceDone) -> DoneOut:
    return DoneOut(
        event.key, event, work.kind is WorkKind.CONTINUE, work.stats, work.was_recomputed
    )
