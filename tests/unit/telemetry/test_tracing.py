from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from services.common.config import TelemetrySettings
from services.telemetry import catalog
from services.telemetry.span_queue import BoundedSpanProcessor
from services.telemetry.tracing import Tracing, setup_tracing


def make_tracing(tmp_path: Path, **changes: Any) -> tuple[Tracing, Path]:
    path = tmp_path / "trace.jsonl"
    settings = TelemetrySettings(trace_file=str(path), **changes)
    return setup_tracing(settings, service="router", instance="r1"), path


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_child_in_another_process_joins_by_traceparent(tmp_path: Path) -> None:
    tracing, path = make_tracing(tmp_path)
    parent = tracing.start(catalog.SPAN_REQUEST, mode="REMOTE")
    sent = parent.traceparent
    parent.end()
    tracing.record(catalog.SPAN_PREFILL_CHUNK, parent=sent, start_ns=1_000, end_ns=5_000, tokens=3)
    tracing.shutdown()
    request, chunk = read(path)
    assert chunk["trace_id"] == request["trace_id"]
    assert chunk["parent_id"] == request["span_id"]
    assert (chunk["start_ns"], chunk["end_ns"]) == (1_000, 5_000)
    assert chunk["attributes"] == {"tokens": 3}
    assert request["status"] == "ok"


def test_end_twice_exports_once(tmp_path: Path) -> None:
    tracing, path = make_tracing(tmp_path)
    span = tracing.start(catalog.SPAN_HANDOFF)
    span.end(error_code="worker_lost")
    span.end()
    tracing.shutdown()
    assert [record["status"] for record in read(path)] == ["error"]


def test_attributes_must_be_those_of_the_catalogue(tmp_path: Path) -> None:
    tracing, _ = make_tracing(tmp_path)
    with pytest.raises(ValueError, match="no attribute prompt"):
        tracing.start(catalog.SPAN_ROUTE, prompt="x")
    tracing.shutdown()


@pytest.mark.parametrize(
    "traceparent",
    ["", "00-xyz", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "x" * 10_000, "00-" + "a" * 32],
)
def test_malformed_parent_starts_a_new_trace(tmp_path: Path, traceparent: str) -> None:
    tracing, path = make_tracing(tmp_path)
    tracing.start(catalog.SPAN_ROUTE, parent=traceparent).end()
    tracing.shutdown()
    (span,) = read(path)
    assert span["parent_id"] is None


def test_unsampled_parent_is_respected(tmp_path: Path) -> None:
    tracing, path = make_tracing(tmp_path)
    parent = f"00-{'a' * 32}-{'b' * 16}-00"
    tracing.start(catalog.SPAN_ROUTE, parent=parent).end()
    tracing.shutdown()
    assert not path.exists()


def test_disabled_tracing_hands_out_working_spans() -> None:
    tracing = setup_tracing(TelemetrySettings(), service="router", instance="r1")
    span = tracing.start(catalog.SPAN_REQUEST, mode="LOCAL")
    span.set(outcome="ok")
    span.end()
    assert span.traceparent == ""
    assert not tracing.is_enabled
    tracing.shutdown()


def test_trace_file_is_bounded(tmp_path: Path) -> None:
    tracing, path = make_tracing(tmp_path, trace_file_max_bytes=20_000)
    for _ in range(6):
        for _ in range(20):
            tracing.start(catalog.SPAN_ROUTE).end()
        tracing._backend.provider.force_flush()  # type: ignore[union-attr]  # it is on
    tracing.shutdown()
    assert path.stat().st_size <= 20_000
    assert path.with_name("trace.jsonl.1").stat().st_size <= 20_000
    assert read(path)


def test_wall_time_of_a_monotonic_instant(tmp_path: Path) -> None:
    tracing = Tracing.disabled()
    assert abs(tracing.wall_ns(time.monotonic()) - time.time_ns()) < 50_000_000


class StuckExporter(SpanExporter):
    """Takes batches and hangs, like a collector behind a black hole."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.num_exported = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.release.wait(30)
        self.num_exported += len(spans)
        return SpanExportResult.SUCCESS


def test_dead_collector_never_blocks_a_request_and_losses_are_counted() -> None:
    """RB-125: ending a span stays cheap, the queue is bounded, lost spans are counted."""
    exporter = StuckExporter()
    queue = BoundedSpanProcessor(exporter, max_waiting=100)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    tracer = provider.get_tracer("t")
    started = time.perf_counter()
    for _ in range(1_000):
        tracer.start_span("s").end()
    assert time.perf_counter() - started < 1.0
    assert queue.num_dropped == 900
    exporter.release.set()
    provider.shutdown()
    assert exporter.num_exported == 100


def test_shutdown_with_a_dead_collector_is_bounded(tmp_path: Path) -> None:
    """RB-125: shutdown gives up on the exporter after its limit."""
    tracing, _ = make_tracing(tmp_path)
    exporter = StuckExporter()
    assert tracing._backend is not None
    tracing._backend.provider.add_span_processor(BoundedSpanProcessor(exporter))
    tracing.start(catalog.SPAN_ROUTE).end()
    started = time.perf_counter()
    tracing.shutdown(timeout_s=0.3)
    assert time.perf_counter() - started < 2.0
    exporter.release.set()
