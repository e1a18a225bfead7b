"""The clients of `isthmus bench router` count what a server really sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from services.bench.result import BenchFailed
from services.bench.router import bare_server, measure
from services.bench.router_load import LoadOrder
from services.bench.router_reference import Kind

pytestmark = pytest.mark.integration

ORDER = LoadOrder(
    door="grpc",
    address="",
    prompt="ids",
    prompt_tokens=20,
    max_tokens=7,
    clients=3,
    requests=10,
    vocab_size=95,
    seed=1,
)


@pytest.mark.parametrize(("kind", "door"), [("grpc", "grpc"), ("sse", "sse"), ("starlette", "sse")])
@pytest.mark.parametrize("prompt", ["ids", "text"])
def test_every_frame_of_every_request_is_counted(
    kind: Kind, door: Literal["grpc", "sse"], prompt: Literal["ids", "text"]
) -> None:
    with bare_server(kind, num_frames=7) as server:
        order = replace(ORDER, door=door, prompt=prompt, address=server.grpc)
        measured = measure(order, server.pid)
    assert measured.report.requests == 10
    assert measured.report.frames == 70
    assert len(measured.report.total_ms) == 10


def test_a_server_that_is_gone_is_a_failure_and_no_figure() -> None:
    with bare_server("grpc", num_frames=1) as server, bare_server("grpc", num_frames=1) as other:
        address = server.grpc
        gone = replace(ORDER, address=address.replace(address.split(":")[1], "1"))
        with pytest.raises(BenchFailed, match="a request failed"):
            measure(gone, other.pid)
