"""The router as the front doors see it: a request in, its outputs out, questions answered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from services.common.clock import Clock
from services.common.errors import IsthmusError, RequestError
from services.common.ids import BlockHash
from services.common.model_manifest import ModelManifest
from services.kv.hashing import HashScope, chain_hashes
from services.registry.brief import Hold
from services.registry.reader import RegistryReader
from services.router.api import (
    ChoiceDelta,
    GenerateCall,
    RequestEnd,
    RouterOutput,
    ServedModel,
    WriteOutputs,
)
from services.router.cluster_watch import ClusterWatch
from services.router.conductor import Conductor
from services.router.config import RouterConfig
from services.router.gate import Gate
from services.router.hint_check import check_progress
from services.router.hooks import RequestSummary, RouterHooks
from services.router.legs import Progress
from services.router.open_request import OpenRequest
from services.router.output_buffer import OutputBuffer
from services.router.output_lengths import OutputLengths
from services.router.policy import MODES, RETRY_AFTER_MS, RequestFacts, choose
from services.router.reports import (
    RUNNING,
    Latencies,
    RecentRequests,
    RequestReport,
    RunningRequest,
    Totals,
    report_of,
    running_request,
)
from services.router.request import LogicalRequest, TokenText
from services.router.route_desk import BUSY_GATHER_S, GATHER_S
from services.router.signals import RouterSignals, Waits
from services.router.timing import Marks
from services.router.view import ClusterView, WorkerView
from services.runtime.loop_lag import LoopLag
from services.telemetry.logs import get_logger

log = get_logger(__name__)

_WARN_EVERY_S = 60.0
_MODELS_FOR_S = 0.1  # what the pools of all workers hold changes with the workers


class Router:
    """Implements RouterPort over a cluster of workers. Belongs to one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        manifest: ModelManifest,
        text: TokenText,
        reader: RegistryReader,
        clock: Clock,
        hooks: RouterHooks | None = None,
        recent: RecentRequests | None = None,
    ) -> None:
        """Prepare; routers for several models in one process share what is `recent`."""
        _check_mode(config.force_mode)
        self._config = config
        self._manifest = manifest
        self._text = text
        self._clock = clock
        self._hooks = hooks or RouterHooks()
        self._cluster = ClusterWatch(config, manifest, reader, clock, self._hooks)
        self._conductor = Conductor(config, self._cluster, clock, self._hooks)
        self._recent = RecentRequests(config.max_reports) if recent is None else recent
        self._lengths = OutputLengths(config.policy.expected_output_tokens)
        self._lag = LoopLag(clock)
        self.signals = RouterSignals(clock.now())
        self._gate = Gate(
            config.admission,
            config.policy,
            self._cluster,
            clock,
            self._hooks,
            config.wait_s,
            self._lag.value_s,
        )
        self._models: tuple[ServedModel, ...] = ()
        self._models_until = float("-inf")
        self._last_number = 0
        self._warned_at = float("-inf")
        self._is_draining = False

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find the workers and connect to them; one that does not answer is waited for a second."""
        await self._cluster.start(self._conductor)
        self._lag.start()
        self._hooks.watch(
            lambda: self._conductor.num_open,
            self._cluster.view,
            lambda: bool(self._cluster.degraded),
        )
        self._hooks.watch_admission(
            lambda: self._gate.num_queued, lambda: self._gate.ttft_ratio, self._lag.value_s
        )

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let open ones end within `drain_s`, then end the rest."""
        self._is_draining = True
        if drain_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._conductor.wait_idle(), drain_s)
        self._gate.close()
        if self._conductor.num_open:
            self._conductor.fail_all(RequestError("draining", "the router is shutting down"))
            await asyncio.sleep(0.02)  # let the Links write the cancels
        self._lag.stop()
        await self._cluster.stop()

    def hold(self, hold: Hold | None) -> None:
        """Let requests wait where no worker is at all; None = refuse them."""
        self._gate.hold = hold

    # -- questions ---------------------------------------------------------------------------

    @property
    def config(self) -> RouterConfig:
        """Settings this router runs with."""
        return self._config

    @property
    def num_open(self) -> int:
        """Requests accepted and not ended."""
        return self._conductor.num_open

    @property
    def is_degraded(self) -> tuple[bool, str]:
        """Whether the router decides without the store, and why."""
        return bool(self._cluster.degraded), self._cluster.degraded

    def view(self) -> ClusterView:
        """Return the workers as this router sees them."""
        return self._cluster.view()

    def running(self) -> tuple[RunningRequest, ...]:
        """Describe the requests that are open."""
        return tuple(map(running_request, self._conductor.progresses()))

    def explain(self, request_id: str) -> RequestReport | None:
        """Tell why a request runs or ran where it did; None for one not known (any more)."""
        for progress in self._conductor.progresses():
            if progress.call.request_id == request_id:
                return report_of(progress, RUNNING)
        return self._recent.find(request_id)

    def newest_reports(self, count: int) -> tuple[RequestReport, ...]:
        """Return what is remembered of the last requests that ended, newest first."""
        return self._recent.newest(count)

    def totals(self, running: Iterable[RunningRequest]) -> Totals:
        """Return sums over all requests so far, with tokens of those that are `running`."""
        return self._recent.totals(running)

    def latencies(self) -> Latencies:
        """Return how quick the last requests were."""
        return self._recent.latencies(self._clock.now())

    def waits(self) -> Waits:
        """Say what waits now, for the autoscaler."""
        now, longest_s = self._clock.now(), 0.0
        for progress in self._conductor.progresses():
            if progress.marks.first_frame is None:
                longest_s = max(longest_s, now - progress.call.received_at)
        queued = self._gate.queued_tokens()
        return Waits(self.num_open, self._gate.num_held, queued, longest_s)

    def kill(self, request_id: str) -> bool:
        """End a request on an operator's word; False when none of that id is open."""
        return self._conductor.end(
            request_id, RequestError("killed", "an operator ended the request")
        )

    def served_models(self) -> tuple[ServedModel, ...]:
        """Return the one model of this cluster; asked for several times a request."""
        now = self._clock.now()
        if now >= self._models_until:
            self._models, self._models_until = self._look_at_models(), now + _MODELS_FOR_S
        return self._models

    def _look_at_models(self) -> tuple[ServedModel, ...]:
        view = self._cluster.view()
        sizes = [_pool_tokens(w) for role in ("prefill", "decode") for w in view.usable(role)]
        manifest = self._manifest
        return (
            ServedModel(
                name=manifest.name,
                context_length=manifest.context_length,
                vocab_size=manifest.vocab_size,
                weights_digest=manifest.weights_digest,
                eos_token_ids=manifest.eos_token_ids,
                max_pool_tokens=max(sizes, default=0),
            ),
        )

    def is_ready(self) -> tuple[bool, str]:
        """Say whether a request would find workers now, and why not."""
        if self._is_draining:
            return False, "the router is shutting down"
        facts = RequestFacts("readiness", 1, 1, force_mode=self._config.force_mode)
        try:
            choose(facts, self._cluster.view(), {}, self._config.policy)
        except RequestError as error:
            # One that is not sent requests could not hold any, and none would start a worker.
            return self._gate.hold is not None, error.message
        return True, ""

    # -- requests ----------------------------------------------------------------------------

    async def generate(self, call: GenerateCall, write: WriteOutputs) -> None:
        """Run a request and write its outputs; being cancelled ends it. Raises IsthmusError."""
        request: OpenRequest | None = None
        end: RequestEnd | None = None
        error: IsthmusError | None = None
        self.signals.arrived(len(call.token_ids), self._clock.now())
        try:
            request = self._admit(call)
            await self._route(request)
            while end is None:
                outputs = await request.buffer.take()
                self._note_first(request.progress, outputs)
                if isinstance(outputs[-1], RequestEnd):
                    outputs[-1] = end = self._final(request.progress)
                    # Noted while this is on its way to the client.
                    asyncio.get_running_loop().call_soon(self._ended, call, request, end, error)
                await write(outputs)
        except IsthmusError as failure:
            error = failure
            raise
        finally:
            if end is None:
                self._ended(call, request, end, error)

    def _ended(
        self,
        call: GenerateCall,
        request: OpenRequest | None,
        end: RequestEnd | None,
        error: IsthmusError | None,
    ) -> None:
        if request is not None:
            self._conductor.settle(request, "complete" if end else "the client went away")
            self._gate.ended(request.progress)
        summary = _summary(call, request, end, error)
        self._recent.add(_report(summary, request, self._clock.now()))
        self._hooks.ended(summary)

    def _admit(self, call: GenerateCall) -> OpenRequest:
        _check_mode(call.force_mode)
        if self._is_draining:
            raise RequestError("draining", "the router is shutting down")
        # What waits in the gate has bounds there, where a flood makes room for other tenants.
        num_under_way = self._conductor.num_open - self._gate.num_queued
        if num_under_way >= self._config.max_open_requests:
            raise RequestError(
                "overloaded",
                f"{self._config.max_open_requests} requests are under way in this router",
                retry_after_ms=RETRY_AFTER_MS,
            )
        if call.deadline <= self._clock.now():
            raise RequestError("deadline_exceeded", "the deadline passed before the work began")
        self._conductor.check(call)
        scope = HashScope(self._manifest.weights_digest, "", call.namespace)
        hashes = chain_hashes(scope, call.token_ids)
        self._last_number += 1
        progress = Progress(
            number=self._last_number,
            call=call,
            facts=facts_of(
                call, hashes, self._config, self._lengths.expected(call.sampling.max_tokens)
            ),
            hashes=hashes,
            logical=LogicalRequest(call, self._text, self._manifest.eos_token_ids),
            marks=Marks(received=call.received_at),
        )
        # n choices share the buffer, so each brings its own room.
        n = call.sampling.n
        room, room_bytes = (
            self._config.max_buffered_outputs * n,
            self._config.max_buffered_bytes * n,
        )
        request = OpenRequest(progress, OutputBuffer(room, call.sink, room_bytes))
        self._conductor.add(request)
        return request

    async def _route(self, request: OpenRequest) -> None:
        """Look up, decide and send the first work item."""
        progress, desk = request.progress, self._cluster.desk
        progress.route_began = self._clock.now()
        request.when_settled = partial(self._gate.leave, progress)
        # What this router knows of prefixes is enough to guess at; the store reserves, so it is
        # asked for those only that start now.
        known = partial(desk.local_depth, progress.hashes)
        await self._gate.enter(progress, known)
        if request.is_settled:
            return  # an operator ended it, its deadline passed, or the router stops
        gather_s = BUSY_GATHER_S if self._gate.num_queued else GATHER_S
        route = await desk.route(progress.facts, progress.hashes, progress.number, gather_s)
        if request.is_settled:
            desk.ended(progress.number)
            return
        if route is None:
            progress.depth = known()
        else:
            progress.decided, progress.depth = route.decision, route.depth
        self._conductor.begin(request)
        self._gate.sent(progress)
        if progress.legs:
            desk.sent(progress.hashes, progress.legs[0].worker_id)

    def _note_first(self, progress: Progress, outputs: Sequence[RouterOutput]) -> None:
        if progress.marks.first_frame is not None:
            return
        if any(isinstance(output, ChoiceDelta) for output in outputs):
            now = progress.marks.first_frame = self._clock.now()
            self._gate.first_token(progress)
            waited_s = now - progress.call.received_at
            self.signals.first_token(progress.first_worker, waited_s)

    def _final(self, progress: Progress) -> RequestEnd:
        """Fill in the figures of a request at the moment its last frame is written."""
        check = check_progress(progress)
        if check is not None and check.error_tokens > 0:
            self._note_missed_hint(progress, progress.cached_tokens + check.error_tokens)
        timing = progress.timing(self._clock.now())
        self._cluster.note_handoff(timing)
        facts, num_output = progress.facts, progress.logical.completion_tokens
        self._lengths.note(facts.max_tokens, num_output // facts.n, self._clock.now())
        self.signals.ended(facts.num_tokens, progress.cached_tokens)
        return RequestEnd(
            prompt_tokens=progress.facts.num_tokens,
            cached_tokens=progress.cached_tokens,
            completion_tokens=progress.logical.completion_tokens,
            timing=timing,
        )

    def _note_missed_hint(self, progress: Progress, expected: int) -> None:
        """Say, once a minute, that hints promised what a worker did not have.

        Routing by prefix that fails silently looks like plain load balancing.
        """
        now = self._clock.now()
        if now - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = now
            log.warning(
                "router.hint_missed",
                expected_tokens=expected,
                cached_tokens=progress.cached_tokens,
                request_id=progress.call.request_id,
            )


def _summary(
    call: GenerateCall,
    request: OpenRequest | None,
    end: RequestEnd | None,
    error: IsthmusError | None,
) -> RequestSummary:
    if request is None:
        return RequestSummary(call, None, end, error)
    return RequestSummary(call, request.progress.decision, end, error)


def _report(summary: RequestSummary, request: OpenRequest | None, now: float) -> RequestReport:
    call, error = summary.call, summary.error
    message = error.message if error is not None else ""
    if request is None:
        return RequestReport(
            call.request_id, call.tenant, call.model, call.received_at, summary.outcome, message,
            prompt_tokens=len(call.token_ids), ended_at=now,
        )  # fmt: skip
    timing = summary.end.timing if summary.end is not None else None
    return report_of(
        request.progress, summary.outcome, message=message, timing=timing, ended_at=now
    )


def facts_of(
    call: GenerateCall,
    hashes: Sequence[BlockHash],
    config: RouterConfig,
    expected_output: int | None = None,
) -> RequestFacts:
    """Return what the policy needs to know of a request."""
    return RequestFacts(
        request_id=call.request_id,
        num_tokens=len(call.token_ids),
        max_tokens=call.sampling.max_tokens,
        n=call.sampling.n,
        prefix_root=_tie_root(call, hashes),
        force_mode=call.force_mode or config.force_mode,
        max_tbt_s=call.slo_tpot_ms / 1000 or config.admission.slo_tpot_s,
        expected_output=expected_output,
    )


def _tie_root(call: GenerateCall, hashes: Sequence[BlockHash]) -> bytes:
    """Return what tells near-equal workers apart: the session, else how the prompt begins."""
    if call.session:
        return f"{call.namespace}/{call.session}".encode()
    return hashes[0] if hashes else b""


def _pool_tokens(worker: WorkerView) -> int:
    """Return the longest request a worker could hold."""
    pool = worker.load.kv_total * worker.info.block_size
    return min(pool, worker.info.max_model_len) if pool else worker.info.max_model_len


def _check_mode(mode: str | None) -> None:
    if mode is not None and mode not in MODES:
        raise RequestError(
            "invalid_argument", f"the mode must be one of {', '.join(MODES)}", param="force_mode"
        )
