"""The one log line of a request: what leads from it to the trace, the workers and the client."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from io import StringIO

import pytest

from services.gateway.hooks import RequestRecord, client_id_of
from services.gateway.telemetry_hooks import TelemetryHooks
from services.gateway.trace_ids import TraceIds
from services.router.api import RequestEnd, RequestTiming
from services.telemetry.logs import JsonFormatter
from services.telemetry.metrics import Metrics
from services.telemetry.redact import Redactor

DONE = RequestRecord(
    door="http",
    route="/v1/completions",
    code="ok",
    duration_s=0.25,
    request_id="req-1",
    ttft_s=0.1,
    end=RequestEnd(12, 4, 7, RequestTiming(mode="REMOTE", prefill_worker="p0", decode_worker="d0")),
    client_request_id="mine-1",
)


@pytest.fixture
def out() -> Iterator[StringIO]:
    """What the module logs from info level on, as the JSON formatter writes it."""
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(Redactor(), {}))
    logger = logging.getLogger("services.gateway.telemetry_hooks")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(before)


def lines_of(out: StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_line_of_a_finished_request_says_where_it_ran_and_which_trace_it_has(
    out: StringIO,
) -> None:
    trace_ids = TraceIds()
    trace_ids.put("req-1", "ab" * 16)
    TelemetryHooks(Metrics.disabled(), trace_ids).request_finished(DONE)

    [line] = lines_of(out)
    expected = {
        "event": "gateway.request", "code": "ok", "request_id": "req-1", "trace_id": "ab" * 16,
        "client_request_id": "mine-1", "mode": "REMOTE", "prefill_worker": "p0",
        "decode_worker": "d0", "prompt_tokens": 12, "cached_tokens": 4, "num_output_tokens": 7,
        "duration_ms": 250.0, "ttft_ms": 100.0,
    }  # fmt: skip
    assert {key: line.get(key) for key in expected} == expected


def test_line_of_a_refused_request_has_only_what_is_known(out: StringIO) -> None:
    refused = RequestRecord(
        door="grpc", route="Generate", code="overloaded", duration_s=0.001, request_id="req-2"
    )
    TelemetryHooks(Metrics.disabled(), TraceIds()).request_finished(refused)

    [line] = lines_of(out)
    assert not line.keys() & {"trace_id", "mode", "client_request_id", "prompt_tokens"}


def test_probes_are_worth_a_line_only_when_they_fail(out: StringIO) -> None:
    hooks = TelemetryHooks(Metrics.disabled(), TraceIds())
    for route in ("/health", "/ready", "/metrics"):
        hooks.request_finished(RequestRecord("http", route, "ok", 0.001))
    hooks.request_finished(RequestRecord("http", "/metrics", "unauthenticated", 0.001))
    assert [(line["route"], line["code"]) for line in lines_of(out)] == [
        ("/metrics", "unauthenticated")
    ]


def test_id_of_a_client_cannot_forge_a_line_or_fill_the_log() -> None:
    assert client_id_of("abc-1.2:3/x+y=z@h") == "abc-1.2:3/x+y=z@h"
    assert client_id_of('a b\n{"event"}\u00e9') == "a_b___event___"
    assert len(client_id_of("x" * 10_000)) == 128


def test_traces_nobody_takes_are_forgotten_oldest_first() -> None:
    trace_ids = TraceIds(max_ids=2)
    for number in range(3):
        trace_ids.put(f"r{number}", f"t{number}")
    assert [trace_ids.take(f"r{number}") for number in range(3)] == ["", "t1", "t2"]
