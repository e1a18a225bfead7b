"""The bounded queue between requests and exporters: full means drop and count, never wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

MAX_WAITING_SPANS = 4_096
_BATCH_SPANS = 512
_DELAY_MS = 500.0


class BoundedSpanProcessor(BatchSpanProcessor):
    """A batch processor that counts what it could not take and what could not be exported."""

    def __init__(self, exporter: SpanExporter, max_waiting: int = MAX_WAITING_SPANS) -> None:
        self._lock = threading.Lock()
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._num_dropped = 0
        super().__init__(
            _CountedExporter(exporter, self),
            # Twice our own bound: the base class must never be the one that drops, it would
            # write a log line per span.
            max_queue_size=2 * max_waiting,
            schedule_delay_millis=_DELAY_MS,
            max_export_batch_size=min(_BATCH_SPANS, max_waiting),
        )

    @property
    def num_dropped(self) -> int:
        """Spans lost so far."""
        return self._num_dropped

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span, or drop it at once when too many wait."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._lock:
            if self._num_waiting >= self._max_waiting:
                self._num_dropped += 1
                return
            self._num_waiting += 1
        super().on_end(span)

    def exported(self, num_spans: int, is_ok: bool) -> None:
        """Book a batch that left the queue."""
        with self._lock:
            self._num_waiting -= num_spans
            if not is_ok:
                self._num_dropped += num_spans


class _CountedExporter(SpanExporter):
    """Tells the queue how every batch ended."""

    def __init__(self, inner: SpanExporter, queue: BoundedSpanProcessor) -> None:
        self._inner = inner
        self._queue = queue

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        is_ok = False
        try:
            result = self._inner.export(spans)
            is_ok = result is SpanExportResult.SUCCESS
            return result
        finally:
            self._queue.exported(len(spans), is_ok)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)
