"""Spans of the catalogue through OpenTelemetry; contexts travel as W3C traceparent strings."""

from __future__ import annotations

import importlib
import importlib.util
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.config import TelemetrySettings
from services.telemetry.catalog import Span as SpanSpec
from services.telemetry.logs import get_logger
from services.telemetry.redact import Redactor

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

log = get_logger(__name__)

AttributeValue = str | int | float | bool
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_OTLP_MODULE = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
_EXPORT_TIMEOUT_S = 2.0


class Span:
    """One open span; `end` is idempotent, so that every way out may call it."""

    __slots__ = ("_is_ended", "_span", "_spec")

    def __init__(self, span: OtelSpan | None, spec: SpanSpec) -> None:
        self._span = span
        self._spec = spec
        self._is_ended = False

    @property
    def traceparent(self) -> str:
        """Context to send with the work; empty when tracing is off."""
        if self._span is None:
            return ""
        context = self._span.get_span_context()
        flags = f"{int(context.trace_flags):02x}"
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags}"

    @property
    def trace_id(self) -> str:
        """Name of the trace this span belongs to; empty when nothing is recorded of it."""
        if self._span is None or not self._span.is_recording():
            return ""
        return f"{self._span.get_span_context().trace_id:032x}"

    def set(self, **attributes: AttributeValue) -> None:
        """Add attributes the catalogue lists for this span."""
        if self._span is not None:
            _check_attributes(self._spec, attributes)
            self._span.set_attributes(attributes)

    def end(self, *, error_code: str = "", end_ns: int | None = None) -> None:
        """Close the span with its status; later calls do nothing."""
        if self._is_ended or self._span is None:
            return
        self._is_ended = True
        from opentelemetry.trace import Status, StatusCode  # loaded already: the span exists

        # The code only: an error's message may name what a person wrote.
        status = Status(StatusCode.ERROR, error_code) if error_code else Status(StatusCode.OK)
        self._span.set_status(status)
        self._span.end(end_ns)


class Tracing:
    """Tracing of one process."""

    def __init__(self, backend: _Backend | None) -> None:
        self._backend = backend
        # Stages are measured on the monotonic clock; spans want wall time.
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()

    @classmethod
    def disabled(cls) -> Tracing:
        """Make tracing that goes nowhere."""
        return cls(None)

    @property
    def is_enabled(self) -> bool:
        """Whether spans are recorded at all."""
        return self._backend is not None

    def wall_ns(self, monotonic_s: float) -> int:
        """Wall-clock nanoseconds of a monotonic instant of this process."""
        return int(monotonic_s * 1e9) + self._wall_offset_ns

    def start(
        self, spec: SpanSpec, *, parent: str = "", start_ns: int | None = None,
        **attributes: AttributeValue,
    ) -> Span:  # fmt: skip
        """Open a span whose end is not in the same function; whoever holds it must end it."""
        if self._backend is None:
            return Span(None, spec)
        _check_attributes(spec, attributes)
        otel = self._backend.tracer.start_span(
            spec.name, context=extract(parent), attributes=attributes, start_time=start_ns
        )
        return Span(otel, spec)

    def record(
        self, spec: SpanSpec, *, parent: str, start_ns: int, end_ns: int,
        **attributes: AttributeValue,
    ) -> None:  # fmt: skip
        """Write a span of a stretch that is already over."""
        if self._backend is not None:
            self.start(spec, parent=parent, start_ns=start_ns, **attributes).end(end_ns=end_ns)

    @property
    def num_dropped(self) -> int:
        """Spans that found the queue full or whose export failed."""
        return 0 if self._backend is None else self._backend.num_dropped

    def shutdown(self, timeout_s: float = 3.0) -> None:
        """Export what is queued, for at most `timeout_s`: a dead collector must not hold us."""
        if self._backend is None:
            return
        worker = threading.Thread(
            target=self._backend.provider.shutdown, name="trace-shutdown", daemon=True
        )
        worker.start()
        worker.join(timeout_s)
        if worker.is_alive():
            log.warning("telemetry.flush_timed_out", timeout_s=timeout_s)


class _Backend:
    """OpenTelemetry objects of one process."""

    def __init__(
        self, exporters: list[SpanExporter], *, service: str, instance: str, sample_ratio: float
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        from services.telemetry.span_queue import BoundedSpanProcessor

        resource = Resource.create(
            {
                "service.name": f"isthmus-{service}",
                "service.instance.id": instance,
            }
        )
        self.provider: TracerProvider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=resource,
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_attributes=32, max_attribute_length=256),
        )
        self._queues = [BoundedSpanProcessor(exporter) for exporter in exporters]
        for queue in self._queues:
            self.provider.add_span_processor(queue)
        self.tracer: Tracer = self.provider.get_tracer("isthmus")

    @property
    def num_dropped(self) -> int:
        return sum(queue.num_dropped for queue in self._queues)


def setup_tracing(settings: TelemetrySettings, *, service: str, instance: str) -> Tracing:
    """Make tracing for this process; without a destination it is off and costs nothing.

    Args:
        settings: where spans go, and how many of them.
        service: "router" | "worker".
        instance: name of this process among its kind.
    """
    exporters: list[SpanExporter] = []
    if settings.trace_file:
        from services.telemetry.trace_file import JsonLinesExporter

        path = Path(settings.trace_file)
        exporters.append(JsonLinesExporter(path, settings.trace_file_max_bytes, Redactor()))
    if settings.otlp_endpoint:
        exporters.extend(_otlp_exporter(settings.otlp_endpoint))
    if not exporters:
        return Tracing.disabled()
    return Tracing(
        _Backend(exporters, service=service, instance=instance, sample_ratio=settings.sample_ratio)
    )


def _otlp_exporter(endpoint: str) -> list[SpanExporter]:
    """Make the OTLP exporter, which is a package of its own; say so when it is missing."""
    try:
        is_installed = importlib.util.find_spec(_OTLP_MODULE) is not None
    except ModuleNotFoundError:
        is_installed = False
    if not is_installed:
        log.warning("telemetry.otlp_missing", package="opentelemetry-exporter-otlp-proto-grpc")
        return []
    module = importlib.import_module(_OTLP_MODULE)
    exporter: SpanExporter = module.OTLPSpanExporter(
        endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_TIMEOUT_S
    )
    return [exporter]


def extract(traceparent: str) -> Context:
    """Read a peer's traceparent; anything malformed starts a new trace."""
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return Context()
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    if trace_id == 0 or span_id == 0:
        return Context()
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _check_attributes(spec: SpanSpec, attributes: Mapping[str, AttributeValue]) -> None:
    unknown = attributes.keys() - set(spec.attributes)
    if unknown:
        raise ValueError(f"span {spec.name} has no attribute {', '.join(sorted(unknown))}")
