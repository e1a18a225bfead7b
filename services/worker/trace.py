"""Spans and metrics of work items, made from the stage times the engine and transfers report.

Stages are recorded when they are over: nothing stays open for a request that never ends.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from services.common.clock import Clock
from services.engine.api import (
    ChoiceDone,
    Refused,
    RequestKey,
    StageTimes,
    WorkKind,
)
from services.telemetry import catalog
from services.telemetry.metrics import Metrics
from services.telemetry.tracing import Tracing
from services.transfer.api import ReceiveEnd, SinkReady, SourceReleased, TransferStats


@dataclass(slots=True)
class _Open:
    traceparent: str
    kind: WorkKind
    started: float  # monotonic
    stats: TransferStats | None = None


class WorkTracer:
    """Remembers open work items; any thread may call it."""

    def __init__(self, tracing: Tracing, metrics: Metrics, clock: Clock) -> None:
        self._tracing = tracing
        self._metrics = metrics
        self._clock = clock
        self._open: dict[RequestKey, _Open] = {}
        self._lock = threading.Lock()

    def begin(self, key: RequestKey, traceparent: str, kind: WorkKind) -> None:
        """A work item was taken."""
        with self._lock:
            self._open[key] = _Open(traceparent, kind, self._clock.now())

    def ended(self, event: ChoiceDone | Refused) -> None:
        """A work item is over: record its stages."""
        with self._lock:
            work = self._open.pop(event.key, None)
        if work is None:
            return
        outcome = event.code if isinstance(event, Refused) else event.error_code or "ok"
        self._metrics.add(catalog.WORK_ITEMS, kind=work.kind.value, outcome=outcome)
        if isinstance(event, ChoiceDone) and self._tracing.is_enabled:
            self._record_stages(work, event)

    def _record_stages(self, work: _Open, event: ChoiceDone) -> None:
        """Lay the stages end to end from the moment the work item came in."""
        times: StageTimes = event.times
        cursor = self._tracing.wall_ns(work.started)
        if work.kind is WorkKind.CONTINUE:
            stats = work.stats or TransferStats(plane="", peer="")
            cursor = self._stage(
                catalog.SPAN_HANDOFF,
                work,
                cursor,
                times.handoff_us,
                plane=stats.plane,
                blocks=stats.blocks_moved,
                bytes=stats.size_bytes,
                deduped=stats.blocks_deduped,
                single_shot=stats.single_shot,
            )
            cursor = self._stage(catalog.SPAN_QUEUE_DECODE, work, cursor, times.queue_us)
        else:
            cursor = self._stage(catalog.SPAN_QUEUE_PREFILL, work, cursor, times.queue_us)
            self._record_chunks(work, cursor, times)
            cursor = self._stage(
                catalog.SPAN_PREFILL,
                work,
                cursor,
                times.prefill_us,
                chunks=times.prefill_chunks,
                cached_tokens=event.cached_tokens,
                computed_tokens=event.computed_tokens,
            )
        if times.decode_us:
            self._stage(catalog.SPAN_DECODE, work, cursor, times.decode_us)

    def _record_chunks(self, work: _Open, cursor: int, times: StageTimes) -> None:
        """Each chunk begins where the one before it ended."""
        done_us = times.queue_us
        for num_tokens, end_us in times.chunks:
            duration_us = max(end_us - done_us, 0)
            cursor = self._stage(
                catalog.SPAN_PREFILL_CHUNK, work, cursor, duration_us, tokens=num_tokens
            )
            done_us += duration_us

    def _stage(
        self,
        spec: catalog.Span,
        work: _Open,
        start_ns: int,
        duration_us: int,
        **attributes: str | int,
    ) -> int:
        end_ns = start_ns + duration_us * 1000
        self._tracing.record(
            spec, parent=work.traceparent, start_ns=start_ns, end_ns=end_ns, **attributes
        )
        return end_ns

    def sink_ended(self, event: ReceiveEnd) -> None:
        """A receive ended, well or not."""
        with self._lock:
            work = self._open.get(RequestKey(event.key))
            if work is not None:
                work.stats = event.stats
        outcome = "ok" if isinstance(event, SinkReady) else event.code
        self._transfer("receive", event.stats, outcome)
        if isinstance(event, SinkReady):
            plane = event.stats.plane
            self._metrics.add(catalog.TRANSFER_BYTES, event.stats.size_bytes, plane=plane)
            self._metrics.observe(catalog.TRANSFER_TIME, event.stats.pull_us / 1e6, plane=plane)

    def source_released(self, event: SourceReleased) -> None:
        """The sender let go of a request's blocks."""
        self._transfer("send", event.stats, event.outcome)

    def _transfer(self, side: str, stats: TransferStats, outcome: str) -> None:
        self._metrics.add(
            catalog.TRANSFERS, side=side, plane=stats.plane or "none", outcome=outcome
        )
