"""Every request has one root span that ends, whatever happens to the request (RB-126)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.common.clock import ManualClock, SystemClock
from services.common.config import TelemetrySettings
from services.common.errors import RequestError
from services.common.ids import RequestId
from services.common.sampling import SamplingParams
from services.gateway.observed_router import ObservedRouter
from services.gateway.trace_ids import TraceIds
from services.router.api import (
    ChoiceDelta,
    ChoiceEnd,
    GenerateCall,
    RequestEnd,
    RequestTiming,
    RouterOutput,
    ServedModel,
    WriteOutputs,
)
from services.telemetry.metrics import Metrics
from services.telemetry.tracing import Tracing, setup_tracing
from tests.support.outputs import outputs_of


class Scripted:
    """A router that plays outputs, then raises if told to."""

    def __init__(self, outputs: list[RouterOutput], error: RequestError | None = None) -> None:
        self.outputs = outputs
        self.error = error
        self.was_closed = False
        self.traceparent = ""

    async def generate(self, call: GenerateCall, write: WriteOutputs) -> None:
        self.traceparent = call.traceparent
        try:
            for output in self.outputs:
                await write([output])
            if self.error is not None:
                raise self.error
        finally:
            self.was_closed = True

    def served_models(self) -> tuple[ServedModel, ...]:
        return ()

    def is_ready(self) -> tuple[bool, str]:
        return True, ""

    @property
    def is_degraded(self) -> tuple[bool, str]:
        return False, ""


CHUNKS: list[RouterOutput] = [ChoiceDelta(0, 0, (1,), "a"), ChoiceDelta(0, 1, (2, 3), "b")]
TIMING = RequestTiming(
    mode="REMOTE",
    reason="both_pools_live",
    plane="memfd",
    router_us=10,
    unattributed_us=5,
    e2e_us=100,
)
ENDING: list[RouterOutput] = [ChoiceEnd(0, "stop"), RequestEnd(1, 0, 3, TIMING)]


def make_call() -> GenerateCall:
    return GenerateCall(
        request_id=RequestId("r"),
        model="m",
        token_ids=np.array([1, 2], dtype=np.uint32),
        sampling=SamplingParams(),
        stop=(),
        deadline=SystemClock().now() + 10,
        received_at=SystemClock().now(),
    )


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return tmp_path / "spans.jsonl"


@pytest.fixture
def tracing(trace_file: Path) -> Tracing:
    return setup_tracing(
        TelemetrySettings(trace_file=str(trace_file)), service="router", instance="r0"
    )


def spans_of(tracing: Tracing, trace_file: Path) -> list[dict[str, object]]:
    tracing.shutdown()
    return [json.loads(line) for line in trace_file.read_text().splitlines()]


def observe(
    router: Scripted, tracing: Tracing, metrics: Metrics, trace_ids: TraceIds | None = None
) -> ObservedRouter:
    return ObservedRouter(router, tracing, metrics, SystemClock(), trace_ids or TraceIds())


def asked(router: ObservedRouter, call: GenerateCall) -> AsyncGenerator[RouterOutput, None]:
    return outputs_of(lambda write: router.generate(call, write))


async def test_finished_request_has_root_and_stages(tracing: Tracing, trace_file: Path) -> None:
    metrics = Metrics.enabled()
    router = Scripted([*CHUNKS, *ENDING])
    seen = [output async for output in asked(observe(router, tracing, metrics), make_call())]

    assert seen == [*CHUNKS, *ENDING]
    assert router.traceparent.startswith("00-")
    spans = {str(span["name"]): span["attributes"] for span in spans_of(tracing, trace_file)}
    assert spans == {
        "isthmus.request": {
            "request_id": "r", "mode": "REMOTE", "reason": "both_pools_live", "plane": "memfd",
            "prefill_worker": "", "decode_worker": "", "outcome": "ok", "unattributed_us": 5,
        },
        "isthmus.route": {"reason": "both_pools_live", "prompt_tokens": len(make_call().token_ids)},
        "isthmus.unattributed": {},
    }  # fmt: skip
    text = metrics.render().decode()
    assert 'isthmus_tpot_seconds_count{mode="REMOTE"} 1' in text
    metrics.shutdown()


@pytest.mark.parametrize("error", [None, RequestError("worker_lost", "gone")])
async def test_every_gap_is_counted_however_a_request_ends(
    tracing: Tracing, error: RequestError | None
) -> None:
    metrics, num_tokens = Metrics.enabled(), 101
    deltas: list[RouterOutput] = [ChoiceDelta(0, i, (7,), "x") for i in range(num_tokens)]
    router = Scripted([*deltas, *([] if error else ENDING)], error)
    with contextlib.suppress(RequestError):
        async for _ in asked(observe(router, tracing, metrics), make_call()):
            pass
    lines = metrics.render().decode().splitlines()
    assert f"isthmus_itl_seconds_count {num_tokens - 1:.1f}" in lines
    metrics.shutdown()


class Written(Scripted):
    """A router that writes tokens past its outputs, one each quarter of a second from 0 on."""

    async def generate(self, call: GenerateCall, write: WriteOutputs) -> None:
        assert call.sink is not None
        await write([ChoiceDelta(0, 0, (1,), "a")])
        for first, count in ((1, 1), (2, 31), (33, 32), (65, 3)):
            call.sink.note([(first + i) / 4 for i in range(count)])
        await write(ENDING)


class Nobody:
    """A sink that takes nothing."""

    def push(self, output: ChoiceDelta) -> bool:
        return False

    def writer(self) -> None:
        return None

    def note(self, times: Sequence[float]) -> None:
        pass


async def test_gaps_between_tokens_that_were_written_at_once_are_counted(tracing: Tracing) -> None:
    metrics = Metrics.enabled()
    router = ObservedRouter(Written([]), tracing, metrics, ManualClock(0.0), TraceIds())
    call = replace(make_call(), sink=Nobody())
    _ = [output async for output in asked(router, call)]

    values = dict(line.rsplit(" ", 1) for line in metrics.render().decode().splitlines())
    assert values["isthmus_itl_seconds_count"] == "67.0"
    assert values["isthmus_itl_seconds_sum"] == "16.75"
    assert values['isthmus_tpot_seconds_sum{mode="REMOTE"}'] == "0.25"
    metrics.shutdown()


async def test_targets_a_client_names_are_counted_as_met_or_missed(tracing: Tracing) -> None:
    metrics = Metrics.enabled()
    timing = replace(TIMING, ttft_us=50_000)
    router = Scripted([*CHUNKS, ChoiceEnd(0, "stop"), RequestEnd(1, 0, 3, timing)])
    for ttft_ms, tpot_ms in ((49, 0), (50, 60_000), (0, 0)):
        call = replace(make_call(), slo_ttft_ms=ttft_ms, slo_tpot_ms=tpot_ms)
        _ = [o async for o in asked(observe(router, tracing, metrics), call)]

    lines = metrics.render().decode().splitlines()
    assert sorted(line for line in lines if line.startswith("isthmus_slo")) == [
        'isthmus_slo_requests_total{outcome="met",slo="tpot"} 1.0',
        'isthmus_slo_requests_total{outcome="met",slo="ttft"} 1.0',
        'isthmus_slo_requests_total{outcome="missed",slo="ttft"} 1.0',
    ]
    metrics.shutdown()


async def test_failed_request_ends_its_span_with_the_code(
    tracing: Tracing, trace_file: Path
) -> None:
    """RB-126: every started span is ended; an error's message, which may quote, stays out."""
    router = Scripted(CHUNKS, RequestError("worker_lost", "gone"))
    with pytest.raises(RequestError, match="gone"):
        _ = [o async for o in asked(observe(router, tracing, Metrics.disabled()), make_call())]

    [span] = spans_of(tracing, trace_file)
    assert span["status"] == "error"
    assert span["attributes"] == {"request_id": "r", "outcome": "worker_lost"}


async def test_client_that_leaves_closes_the_inner_router_and_the_span(
    tracing: Tracing, trace_file: Path
) -> None:
    router = Scripted([*CHUNKS, *ENDING])
    outputs = asked(observe(router, tracing, Metrics.disabled()), make_call())
    await anext(outputs)
    await outputs.aclose()

    assert router.was_closed
    [span] = spans_of(tracing, trace_file)
    assert span["attributes"] == {"request_id": "r", "outcome": "cancelled"}


@pytest.mark.parametrize("error", [None, RequestError("worker_lost", "gone")])
@pytest.mark.parametrize("num_taken", [1, 2])
async def test_no_span_stays_open_wherever_the_client_leaves(
    tracing: Tracing, trace_file: Path, num_taken: int, error: RequestError | None
) -> None:
    """RB-126: whatever would have come after it."""
    router = Scripted([*CHUNKS, *ENDING], error)
    outputs = asked(observe(router, tracing, Metrics.disabled()), make_call())
    for _ in range(num_taken):
        await anext(outputs)
    await outputs.aclose()

    assert router.was_closed
    [span] = spans_of(tracing, trace_file)
    assert span["attributes"] == {"request_id": "r", "outcome": "cancelled"}


async def test_trace_of_a_request_is_known_until_it_is_logged(
    tracing: Tracing, trace_file: Path
) -> None:
    trace_ids = TraceIds()
    router = Scripted([*CHUNKS, *ENDING])
    observed = observe(router, tracing, Metrics.disabled(), trace_ids)
    _ = [output async for output in asked(observed, make_call())]

    trace_id = trace_ids.take("r")
    assert trace_id == router.traceparent.split("-")[1]
    assert {span["trace_id"] for span in spans_of(tracing, trace_file)} == {trace_id}
    assert trace_ids.take("r") == ""
