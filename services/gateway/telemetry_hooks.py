"""The front doors' counters, written to the catalogue's metrics."""

from __future__ import annotations

from services.common.errors import ERROR_TABLE
from services.gateway.hooks import RequestRecord
from services.gateway.trace_ids import TraceIds
from services.telemetry import catalog
from services.telemetry.logs import get_logger
from services.telemetry.metrics import CONTENT_TYPE, Metrics

log = get_logger(__name__)


class TelemetryHooks:
    """Implements GatewayHooks."""

    def __init__(self, metrics: Metrics, trace_ids: TraceIds) -> None:
        self._metrics = metrics
        self._trace_ids = trace_ids

    def request_finished(self, record: RequestRecord) -> None:
        """Count by door and status; log every request once, without its text."""
        spec = ERROR_TABLE.get(record.code)
        if record.door == "http":
            status = str(spec.http_status) if spec else "200"
            self._metrics.add(catalog.HTTP_REQUESTS, route=record.route, status=status)
        else:
            status = spec.grpc_status if spec else "OK"
            self._metrics.add(catalog.GRPC_REQUESTS, method=record.route, status=status)
        if record.code == "unauthenticated":
            self._metrics.add(catalog.AUTH_FAILURES)
        trace_id = self._trace_ids.take(record.request_id)
        if not log.tells_info:
            return
        # Scrapes and probes come every few seconds; what goes wrong with one is still told.
        write = log.debug if record.is_probe else log.info
        write(
            "gateway.request",
            door=record.door,
            route=record.route,
            code=record.code,
            duration_ms=round(record.duration_s * 1000, 1),
            request_id=record.request_id,
            ttft_ms=None if record.ttft_s is None else round(record.ttft_s * 1000, 1),
            **_facts_of(record, trace_id),
        )

    def render_metrics(self) -> tuple[str, bytes]:
        """Give the content type and body of /metrics."""
        return CONTENT_TYPE, self._metrics.render()


def _facts_of(record: RequestRecord, trace_id: str) -> dict[str, object]:
    """What leads from a log line to the trace, the workers and the client; only what is known."""
    facts: dict[str, object] = {
        "trace_id": trace_id,
        "client_request_id": record.client_request_id,
    }
    end = record.end
    if end is not None:
        facts |= {
            "mode": end.timing.mode,
            "prefill_worker": end.timing.prefill_worker,
            "decode_worker": end.timing.decode_worker,
            "prompt_tokens": end.prompt_tokens,
            "cached_tokens": end.cached_tokens,
            "num_output_tokens": end.completion_tokens,
        }
    return {name: value for name, value in facts.items() if value != ""}
