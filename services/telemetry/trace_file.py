"""Spans as JSON lines in a file of bounded size, for machines that run no collector."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from services.telemetry.redact import Redactor


class JsonLinesExporter(SpanExporter):
    """Appends spans to `path`; at `max_bytes` the file becomes `path.1` and a new one begins.

    Used only behind the batch processor: `export` runs on its thread, never on a request's.
    Several processes may write one file: every batch is one append of whole lines.
    """

    def __init__(self, path: Path, max_bytes: int, redactor: Redactor) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._redactor = redactor
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write one batch."""
        text = "".join(json.dumps(self._record(span)) + "\n" for span in spans)
        raw = text.encode()
        try:
            self._rotate(len(raw))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(self._path, flags, 0o600)
            try:
                os.write(fd, raw)
            finally:
                os.close(fd)
        except OSError:
            return SpanExportResult.FAILURE  # the processor counts it; serving goes on
        return SpanExportResult.SUCCESS

    def _rotate(self, num_new_bytes: int) -> None:
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size > 0 and size + num_new_bytes > self._max_bytes:
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))

    def _record(self, span: ReadableSpan) -> dict[str, object]:
        context = span.get_span_context()
        assert context is not None  # an ended span has one
        return {
            "name": span.name,
            "trace_id": f"{context.trace_id:032x}",
            "span_id": f"{context.span_id:016x}",
            "parent_id": f"{span.parent.span_id:016x}" if span.parent is not None else None,
            "start_ns": span.start_time,
            "end_ns": span.end_time,
            "status": span.status.status_code.name.lower(),
            "attributes": self._redactor.fields(dict(span.attributes or {})),
            "resource": self._redactor.fields(dict(span.resource.attributes)),
        }

    def shutdown(self) -> None:
        """Nothing is held between batches."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Every batch is written when `export` returns."""
        return True
