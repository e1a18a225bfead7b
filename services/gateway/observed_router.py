"""A RouterPort that traces and times what passes through another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import sub

from services.common.clock import Clock
from services.common.errors import IsthmusError
from services.gateway.trace_ids import TraceIds
from services.router.api import (
    ChoiceDelta,
    GenerateCall,
    RequestEnd,
    RequestTiming,
    RouterOutput,
    RouterPort,
    ServedModel,
    WriteOutputs,
)
from services.router.output_sink import TappedSink
from services.telemetry import catalog
from services.telemetry.metrics import Metrics
from services.telemetry.tracing import Span, Tracing

NoteGaps = Callable[[str, Sequence[float]], None]  # of a model
_GAPS_AT_ONCE = 32  # of a request's gaps between tokens: the metrics are that much behind


class ObservedRouter:
    """Opens the request's root span, from which workers' spans hang, and always closes it."""

    def __init__(
        self,
        inner: RouterPort,
        tracing: Tracing,
        metrics: Metrics,
        clock: Clock,
        trace_ids: TraceIds,
        note_gaps: NoteGaps | None = None,
    ) -> None:
        self._inner = inner
        self._note_gaps = note_gaps
        self._trace_ids = trace_ids
        self._tracing = tracing
        self._metrics = metrics
        self._clock = clock

    def served_models(self) -> tuple[ServedModel, ...]:
        """Models of this cluster."""
        return self._inner.served_models()

    def is_ready(self) -> tuple[bool, str]:
        """Whether requests would be served now, and why not."""
        return self._inner.is_ready()

    @property
    def is_degraded(self) -> tuple[bool, str]:
        """Whether requests are routed without the store, and why."""
        return self._inner.is_degraded

    async def generate(self, call: GenerateCall, write: WriteOutputs) -> None:
        """Run a request and write its outputs; being cancelled ends it. Raises IsthmusError."""
        started_ns = self._tracing.wall_ns(call.received_at)
        span = self._tracing.start(
            catalog.SPAN_REQUEST,
            parent=call.traceparent,
            start_ns=started_ns,
            request_id=call.request_id,
        )
        self._trace_ids.put(call.request_id, span.trace_id)
        outcome = "cancelled"
        gaps = _Gaps(self._metrics, self._clock, call.model, self._note_gaps)

        async def note_and_write(outputs: Sequence[RouterOutput]) -> None:
            nonlocal outcome
            for output in outputs:
                if isinstance(output, ChoiceDelta):
                    gaps.note(output)
                elif isinstance(output, RequestEnd):
                    outcome = "ok"
                    self._ended(span, call, output.timing, gaps, started_ns)
            await write(outputs)

        try:
            if call.sink is not None:
                call = replace(call, sink=TappedSink(call.sink, gaps))
            if span.traceparent:
                call = replace(call, traceparent=span.traceparent)
            await self._inner.generate(call, note_and_write)
        except IsthmusError as error:
            outcome = error.spec.code
            raise
        finally:
            gaps.flush()
            # After a close with figures this does nothing; else it is the only end there is.
            if outcome != "ok":
                span.set(outcome=outcome)
            span.end(error_code="" if outcome == "ok" else outcome)

    def _ended(
        self, span: Span, call: GenerateCall, timing: RequestTiming, gaps: _Gaps, started_ns: int
    ) -> None:
        tpot_s = gaps.end(timing.mode)
        self._count_slo("ttft", call.slo_ttft_ms, timing.ttft_us / 1e6)
        self._count_slo("tpot", call.slo_tpot_ms, tpot_s)
        self._close(span, call, timing, started_ns)

    def _count_slo(self, slo: str, target_ms: int, value_s: float | None) -> None:
        """Count a request whose client named a target, unless nothing was there to measure."""
        if target_ms and value_s is not None:
            outcome = "met" if value_s * 1000 <= target_ms else "missed"
            self._metrics.add(catalog.SLO_REQUESTS, slo=slo, outcome=outcome)

    def _close(
        self, span: Span, call: GenerateCall, timing: RequestTiming, started_ns: int
    ) -> None:
        """Put the figures on the root span and record the router's own stages."""
        routed_ns = started_ns + (timing.router_us + timing.queue_us) * 1000
        end_ns = started_ns + timing.e2e_us * 1000
        self._tracing.record(
            catalog.SPAN_ROUTE,
            parent=span.traceparent,
            start_ns=started_ns,
            end_ns=routed_ns,
            reason=timing.reason,
            prompt_tokens=len(call.token_ids),
        )
        self._tracing.record(
            catalog.SPAN_UNATTRIBUTED,
            parent=span.traceparent,
            start_ns=end_ns - timing.unattributed_us * 1000,
            end_ns=end_ns,
        )
        span.set(
            mode=timing.mode,
            reason=timing.reason,
            plane=timing.plane,
            prefill_worker=timing.prefill_worker,
            decode_worker=timing.decode_worker,
            outcome="ok",
            unattributed_us=timing.unattributed_us,
        )
        span.end(end_ns=end_ns)


class _Gaps:
    """Times between the frames of one request."""

    def __init__(
        self, metrics: Metrics, clock: Clock, model: str, note_gaps: NoteGaps | None
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._note_gaps = note_gaps
        self._gaps_s: list[float] = []  # not in the metrics yet
        self._clock = clock
        self._first: float | None = None
        self._last = 0.0
        self._num_after_first = 0

    def note(self, output: ChoiceDelta) -> None:
        """Tokens were handed to the client."""
        num_tokens = len(output.token_ids)
        if not num_tokens:
            return
        self._note(self._clock.now(), num_tokens)

    def note_written(self, times: Sequence[float]) -> None:
        """Tokens were written to the client, one at each of these times."""
        if self._first is None:
            self._note(times[0], 1)
            times = times[1:]
        self._gaps_s += map(sub, times, (self._last, *times))
        self._num_after_first += len(times)
        self._last = times[-1] if times else self._last
        if len(self._gaps_s) >= _GAPS_AT_ONCE:
            self.flush()

    def _note(self, now: float, num_tokens: int) -> None:
        if self._first is None:
            self._first = now
        else:
            self._gaps_s.append((now - self._last) / num_tokens)
            self._num_after_first += num_tokens
            if len(self._gaps_s) >= _GAPS_AT_ONCE:
                self.flush()
        self._last = now

    def flush(self) -> None:
        """Put what was noted into the metrics."""
        self._metrics.observe_all(catalog.ITL, self._gaps_s)
        if self._note_gaps is not None:
            self._note_gaps(self._model, self._gaps_s)
        self._gaps_s.clear()

    def end(self, mode: str) -> float | None:
        """The request ended well; return its TPOT in seconds, if it has one."""
        if self._first is None or not self._num_after_first:
            return None
        tpot = (self._last - self._first) / self._num_after_first
        self._metrics.observe(catalog.TPOT, tpot, mode=mode)
        return tpot
