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
from dataclasses import dataclass, field

import numpy as np

from services.common.clock import Clock
from services.common.errors import RequestError
from services.common.ids import BlockHash, Incarnation, WorkerId
from services.common.model_manifest import ModelManifest
from services.common.sampling import SamplingParams
from services.decode.admission import AdmissionLimits, FailureLadder, admit
from services.engine.api import (
    BlocksReserved,
    BlocksSealed,
    CacheDelta,
    CancelReceive,
    CancelSource,
    ChoiceDone,
    Engine,
    EngineEvent,
    EngineRequest,
    FirstToken,
    OfferReady,
    PrefillFinished,
    ReceiveWanted,
    Refused,
    RequestKey,
    TokenArray,
    TokenLogprobs,
    TokensOut,
    WorkKind,
)
from services.kv.hashing import HashScope, chain_hashes, pack_hashes
from services.pb import common_pb2, worker_pb2
from services.prefill.handoff import plan_prefill
from services.telemetry.logs import get_logger
from services.transfer.api import (
    FinalInfo,
    FirstTokenInfo,
    Offer,
    Sink,
    SinkEvent,
    SinkReady,
    Source,
    SourceEvent,
    TransferStats,
)
from services.worker import convert
from services.worker.session import DoneOut, Outgoing, RouterSession, TicketOut
from services.worker.trace import WorkTracer

_WARM_UP_KEY = RequestKey("warm-up")
_WARM_UP_TOKENS = 96
_PLANES = {"memfd": common_pb2.PLANE_MEMFD, "zmq": common_pb2.PLANE_ZMQ}

log = get_logger(__name__)


@dataclass(slots=True)
class WorkItem:
    """One open work item; written by the loop before the engine sees it."""

    key: RequestKey
    session: RouterSession
    request: int
    attempt: int
    request_id: str
    kind: WorkKind
    ticket: bytes
    block_hashes: tuple[BlockHash, ...]
    traceparent: str
    stats: TransferStats | None = None  # set by the transfer thread before `received`


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who this worker is."""

    worker_id: WorkerId
    incarnation: Incarnation
    manifest: ModelManifest
    kv_identity_fp: str


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
        self._ladder = FailureLadder(self._limits)
        self._ladder_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warm_up: asyncio.Future[None] | None = None
        self._works: dict[RequestKey, WorkItem] = {}
        self._unoffered: set[RequestKey] = set()  # engine thread only: offers that failed
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
        """Refuse new work from now on."""
        self.role.state = common_pb2.WORKER_STATE_DRAINING

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
        resume = {r.request: tuple(r.next_index) for r in attach.resume}
        result = session.attach(resume)
        self._outboxes[session.router_incarnation] = send
        for key in result.cancel:
            self.engine.cancel(key, "the router no longer wants it")
        if result.resend:
            send(result.resend)
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
        # Work first: a frame may hold work and its own cancel, when a client left at once. A
        # cancel names its attempt, so it never meets newer work of the same frame.
        for work in frame.work:
            self._take(session, work)
        for cancel in frame.cancel:
            self._cancel(session, cancel)

    def sweep(self) -> None:
        """Give up requests whose router did not come back; forget what is long over."""
        now = self._clock.now()
        for incarnation, session in list(self._sessions.items()):
            for key in session.sweep(now):
                self.engine.cancel(key, "the router did not come back")
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
            item, request = self._admit(session, key, work)
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

    def _admit(
        self, session: RouterSession, key: RequestKey, work: worker_pb2.Work
    ) -> tuple[WorkItem, EngineRequest]:
        self._check_fencing(session, work)
        verdict = admit(self.engine.load(), is_draining=self.is_draining, limits=self._limits)
        if not verdict.is_taken:
            raise RequestError(verdict.code, verdict.message)
        tokens = convert.token_array(work.token_ids, self.identity.manifest.vocab_size)
        hashes = self._verified_hashes(work, tokens)
        sampling = convert.sampling_params(work, self._limits.request)
        kind = self._work_kind(work)
        if kind is WorkKind.PREFILL:
            kind = plan_prefill(sampling).kind
        request = EngineRequest(
            key=key,
            request_id=work.request_id,
            kind=kind,
            token_ids=tokens,
            block_hashes=hashes,
            sampling=sampling,
            deadline=self._clock.now() + self._time_left_s(work),
            priority=work.priority,
            tenant=work.tenant,
        )
        item = WorkItem(
            key=key,
            session=session,
            request=work.request,
            attempt=work.attempt,
            request_id=work.request_id,
            kind=kind,
            ticket=work.continue_from.ticket,
            block_hashes=hashes,
            traceparent=work.traceparent,
        )
        return item, request

    def _time_left_s(self, work: worker_pb2.Work) -> float:
        return (work.deadline_ms or self._limits.request.default_timeout_ms) / 1000

    def _check_fencing(self, session: RouterSession, work: worker_pb2.Work) -> None:
        if work.expect_incarnation != self.identity.incarnation:
            raise RequestError("stale_incarnation", "the work is for an earlier life of the worker")
        gens = self.slot_gens()
        if work.slot_gen and gens and work.slot_gen not in gens:
            raise RequestError("stale_incarnation", "the worker's slot has changed hands")
        if session.is_fenced(work.request, work.attempt):
            raise RequestError("fenced", "an equal or higher attempt was already taken")

    def _verified_hashes(self, work: worker_pb2.Work, tokens: TokenArray) -> tuple[BlockHash, ...]:
        """Hash the prompt here: what the router sent is checked, never trusted."""
        scope = HashScope(self.identity.manifest.weights_digest, work.adapter_digest, work.tenant)
        hashes = chain_hashes(scope, tokens)
        if work.block_hashes and work.block_hashes != pack_hashes(hashes):
            raise RequestError("hash_mismatch", "block_hashes are not those of token_ids")
        return hashes

    def _work_kind(self, work: worker_pb2.Work) -> WorkKind:
        which = work.WhichOneof("kind")
        if which == "prefill":
            return WorkKind.PREFILL
        if which == "continue_from":
            return WorkKind.CONTINUE
        if which == "whole":
            return WorkKind.WHOLE
        raise RequestError("invalid_argument", "the work item names no kind", param="kind")

    # -- engine thread ---------------------------------------------------------------------

    def _on_engine_events(self, events: Sequence[EngineEvent]) -> None:
        outgoing: list[TokensOut | TicketOut | ChoiceDone | Refused] = []
        for event in events:
            if isinstance(event, (TokensOut, ChoiceDone, Refused)):
                outgoing.append(event)
            elif isinstance(event, OfferReady):
                ticket = self._offer(event)
                if ticket is not None:
                    outgoing.append(TicketOut(event.key, ticket))
            else:
                self._on_transfer_event(event)
        loop = self._loop
        if outgoing and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver, outgoing)

    def _on_transfer_event(
        self,
        event: BlocksSealed
        | PrefillFinished
        | CancelSource
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
                self.source.prefill_finished(key, _final_info(event))
        elif isinstance(event, CancelSource):
            if key in self._unoffered:
                self._unoffered.discard(key)
                self.engine.source_released(key)
            else:
                self.source.cancel(key, event.reason)
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
            event.key, work.ticket, work.attempt, event.have, work.block_hashes, work.traceparent
        )

    # -- transfer threads ------------------------------------------------------------------

    def _on_source_event(self, event: SourceEvent) -> None:
        self._tracer.source_released(event)
        self.engine.source_released(RequestKey(event.key))

    def _on_sink_event(self, event: SinkEvent) -> None:
        key = RequestKey(event.key)
        work = self._works.get(key)
        if work is not None:
            work.stats = event.stats
        self._tracer.sink_ended(event)
        if isinstance(event, SinkReady):
            first = tuple(_first_token(info) for info in event.final.first)
            self.engine.received(key, first, event.final.prefill_us)
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
        self.engine.receive_failed(key, event.code, event.message, recompute=step.recompute)

    # -- event loop ------------------------------------------------------------------------

    def _deliver(self, outgoing: Sequence[TokensOut | TicketOut | ChoiceDone | Refused]) -> None:
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
                self.engine.cancel(event.key, "the router lags too far behind")
            batches.setdefault(work.session.router_incarnation, []).append(item)
            if isinstance(event, Refused) or (isinstance(event, ChoiceDone) and event.all_choices):
                self._ended(event)
        for incarnation, items in batches.items():
            send = self._outboxes.get(incarnation)
            if send is not None:
                send(items)

    def _ended(self, item: ChoiceDone | Refused) -> None:
        self._tracer.ended(item)
        work = self._works.pop(item.key, None)
        if work is None:
            return
        code = item.code if isinstance(item, Refused) else item.error_code
        log.info(
            "worker.work_ended",
            request_id=work.request_id,
            attempt=work.attempt,
            kind=work.kind.value,
            code=code or "",
        )

    # -- wire ------------------------------------------------------------------------------

    def encode(self, items: Sequence[Outgoing], frame: worker_pb2.WorkerFrame) -> None:
        """Add outputs to a frame."""
        for item in items:
            request, attempt = _request_of(item.key)
            if isinstance(item, TokensOut):
                frame.tokens.append(convert.wire_tokens(item, request, attempt))
            elif isinstance(item, TicketOut):
                frame.tickets.append(
                    worker_pb2.TicketReady(request=request, attempt=attempt, ticket=item.ticket)
                )
            elif isinstance(item, Refused):
                frame.refusals.append(convert.wire_refusal(item, request, attempt))
            else:
                timing = self._timing(item)
                frame.done.append(convert.wire_done(item.done, request, attempt, timing))

    def _timing(self, item: DoneOut) -> common_pb2.Timing:
        timing = common_pb2.Timing()
        if not item.is_receiver:
            timing.prefill_worker = self.identity.worker_id
            return timing
        timing.decode_worker = self.identity.worker_id
        if item.stats is not None:
            timing.plane = _PLANES.get(item.stats.plane, common_pb2.PLANE_UNSPECIFIED)
            timing.handoff_bytes = item.stats.size_bytes
            timing.handoff_blocks = item.stats.blocks_moved
            timing.handoff_blocks_deduped = item.stats.blocks_deduped
        return timing

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
    return DoneOut(event.key, event, work.kind is WorkKind.CONTINUE, work.stats)


def _request_of(key: RequestKey) -> tuple[int, int]:
    """Router's request number and attempt, from a key of `_take`."""
    _, request, attempt = key.split("/")
    return int(request), int(attempt)


def _final_info(event: PrefillFinished) -> FinalInfo:
    first = tuple(
        FirstTokenInfo(
            f.choice,
            f.token_id,
            f.logprobs.logprob if f.logprobs else None,
            f.logprobs.top if f.logprobs else (),
        )
        for f in event.first
    )
    return FinalInfo(
        first, event.num_tokens, event.tail_block, event.tail_valid_tokens, event.prefill_us
    )


def _first_token(info: FirstTokenInfo) -> FirstToken:
    logprobs = (
        None if info.logprob is None else TokenLogprobs(info.token_id, info.logprob, info.top)
    )
    return FirstToken(info.choice, info.token_id, logprobs)
