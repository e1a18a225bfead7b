"""Work that nobody waits for any more delays nobody."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import pytest

from services.bench.local_cluster import LocalCluster
from services.chaos.scripted_model import make_scripted_model
from services.chaos.scripted_worker import SPEED_VARIABLE
from services.pb import inference_pb2_grpc
from tests.support.generate import request
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.slow]

LONG, SHORT = 4000, 20
PREFILL_TOK_S = 1000
LONG_S = LONG / PREFILL_TOK_S  # of a long prompt; ten of them take forty


async def ttft_s(address: str, prompt: Sequence[int]) -> float:
    """Time to the first token of a request of its own connection."""
    start = time.monotonic()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        body = request(prompt, max_tokens=4)
        metadata = (("x-isthmus-force-mode", "REMOTE"),)
        async for frame in stub.Generate(body, timeout=60.0, metadata=metadata):
            if frame.num_tokens:
                return time.monotonic() - start
    raise AssertionError("the stream ended without a token")


def is_at_work(cluster: LocalCluster) -> bool:
    """Say whether a worker has a request in hand."""
    return any(status.requests_open for status in cluster.worker_statuses())


async def ten_cancelled_then_one(cluster: LocalCluster) -> tuple[float, float]:
    """Return TTFT of a short request on an idle cluster and right after ten cancelled ones."""
    address = cluster.grpc
    idle = [await ttft_s(address, [7 + i] * SHORT) for i in range(3)]
    prompts = ([3 + i, *range(3, LONG + 2)] for i in range(10))
    long = [asyncio.create_task(ttft_s(address, [t % 200 + 3 for t in p])) for p in prompts]
    await asyncio.to_thread(wait_for, lambda: is_at_work(cluster), 30.0, "a prompt is computed")
    assert not any(task.done() for task in long), "a long prompt had its token before the cancel"
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    return statistics.median(idle), await ttft_s(address, [99] * SHORT)


def test_ten_cancelled_prefills_cost_the_next_request_less_than_one_of_them(tmp_path: Path) -> None:
    """Elsewhere the next request waits 11 to 55 s behind prefills nobody wants any more."""
    settings = {SPEED_VARIABLE: f"{PREFILL_TOK_S}:1"}
    model_dir = make_scripted_model(tmp_path / "model")
    with LocalCluster(
        model_dir, prefill=1, decode=1, flags=("--engine", "scripted"), settings=settings
    ) as cluster:
        idle_s, after_s = asyncio.run(ten_cancelled_then_one(cluster))
        assert after_s < idle_s + LONG_S
        cluster.assert_no_blocks_in_use()
