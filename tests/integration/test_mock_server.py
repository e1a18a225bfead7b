"""The mock over the wire: what clients count is what it says it sent, by both doors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from loadtest.launch import TargetSpec, make_target
from loadtest.mock.process import MockProcess
from loadtest.mock.settings import MockSettings
from loadtest.records import RequestRecord, Status
from loadtest.runner import RunClock, Runner
from loadtest.scenario import parse_scenario
from loadtest.schedule import make_schedule
from loadtest.target import TargetFacts
from services.pb import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.integration

_WAIT_S = 60.0


async def _run(url: str, num: int = 20, **spec: Any) -> tuple[TargetFacts, Sequence[RequestRecord]]:
    scenario = parse_scenario(
        {
            "name": "counted",
            "arrivals": {"kind": "offline", "sessions": num},
            "workload": {"kind": "fixed", "isl": 40, "osl": 9},
        },
        "test",
    )
    clock = RunClock()
    target = make_target(TargetSpec(url, **spec), scenario, clock)
    try:
        facts = await target.open()
        schedule = make_schedule(scenario, Path())
        async with asyncio.timeout(_WAIT_S):
            log = await Runner(schedule, target, facts, clock).run()
    finally:
        await target.close()
    return facts, log.records


@pytest.mark.parametrize(
    ("url", "spec"),
    [
        ("mock://grpc?tokens_per_chunk=3&itl_ms=1&service_ms=1&cached_share=0.5", {}),
        ("mock://http?tokens_per_chunk=3&itl_ms=1&service_ms=1&cached_share=0.5", {}),
        (
            "mock://http?tokens_per_chunk=3&itl_ms=1&service_ms=1&cached_share=0.5",
            {"api": "completions", "vocab_size": 1000},
        ),
    ],
)
async def test_counts_are_the_servers(url: str, spec: dict[str, Any]) -> None:
    facts, records = await _run(url, **spec)
    assert (facts.kind, facts.address, facts.model) == ("mock", url, "mock")
    assert len(records) == 20
    for record in records:
        assert record.status is Status.OK
        assert (record.osl, record.num_heard, record.isl, record.cached_tokens) == (9, 9, 40, 20)
        assert sum(chunk.num_tokens for chunk in record.chunks) == 9
        assert {chunk.num_tokens for chunk in record.chunks} <= {1, 2, 3}
        assert "prefill" in record.stages_ms


async def test_a_server_that_tells_no_counts_is_spread_over_its_events() -> None:
    facts, records = await _run(
        "mock://http?tokens_per_chunk=4&itl_ms=1&service_ms=1&tells_counts=false"
    )
    assert any("shared evenly" in note for note in facts.notes)
    assert [[chunk.num_tokens for chunk in record.chunks] for record in records] == [[3, 3, 3]] * 20


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_faults_are_told_apart(door: str) -> None:
    url = f"mock://{door}?error_share=0.5&reject_share=0.5&seed=1"
    _, records = await _run(url, num=40)
    seen = {(record.status, record.code) for record in records}
    assert seen == {(Status.ERROR, "internal"), (Status.REJECTED, "overloaded")}


async def test_other_clients_find_what_they_look_for() -> None:
    """Whole answers, HEAD /metrics, pipelined requests, bad ones, and none that break the next."""
    async with MockProcess(MockSettings(service_ms="1", itl_ms="1")) as mock:
        host, _, port = mock.address("http").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": "a b c", "max_tokens": 2}).encode()
        bad = b'{"prompt": 3}'
        post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
        head = b"HEAD /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
        get = b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n"
        writer.write(post % (len(body), body) + head + post % (len(bad), bad) + get)
        async with asyncio.timeout(_WAIT_S):
            statuses = []
            for is_head in (False, True, False, False):
                message = (await reader.readuntil(b"\r\n\r\n")).decode()
                statuses.append(int(message.split()[1]))
                length = int(message.partition("content-length: ")[2].split()[0])
                got = b"" if is_head else await reader.readexactly(length)
                if statuses == [200]:
                    answer = json.loads(got)
        writer.close()
        assert statuses == [200, 200, 400, 404]
        assert answer["choices"][0]["text"] == "word word "
        assert answer["usage"]["prompt_tokens"] == 3


async def test_an_answer_is_announced_before_its_first_token() -> None:
    """Else a gRPC client reads that token one wake-up later, and is blamed for it."""
    async with (
        MockProcess(MockSettings(service_ms="600000")) as mock,
        grpc.aio.insecure_channel(mock.address("grpc")) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(text="a", max_tokens=1)
        )
        async with asyncio.timeout(_WAIT_S):
            await call.initial_metadata()
        assert not call.done()
        call.cancel()
