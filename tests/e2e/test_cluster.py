"""A cluster of real processes on the toy model: planes, hints, front doors, routers that die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from openai import OpenAI

from services.bench.local_cluster import LocalCluster
from services.pb import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2_grpc
from tests.support.generate import generate, request

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = [5 + i % 200 for i in range(300)]


@pytest.fixture(scope="module")
def cluster(toy_dir: Path) -> Iterator[LocalCluster]:
    with LocalCluster(toy_dir, prefill=2, decode=1) as running:
        yield running


@pytest.fixture(scope="module")
def over_zmq(toy_dir: Path) -> Iterator[LocalCluster]:
    settings = {"ISTHMUS_TRANSFER__PLANES": "zmq"}
    with LocalCluster(toy_dir, prefill=1, decode=1, settings=settings) as running:
        yield running


def test_both_planes_carry_the_same_kv(cluster: LocalCluster, over_zmq: LocalCluster) -> None:
    """The plane in use is never a guess: it stands in the timing and in the worker's status."""
    for length in (5, 16, 300):
        body = request(PROMPT[:length], max_tokens=20)
        same_host = generate(cluster.grpc, body, mode="REMOTE")
        any_host = generate(over_zmq.grpc, body, mode="REMOTE")
        assert any_host.token_ids == same_host.token_ids
        assert same_host.timing is not None
        assert any_host.timing is not None
        assert same_host.timing.plane == common_pb2.PLANE_MEMFD
        assert any_host.timing.plane == common_pb2.PLANE_ZMQ
    [decode] = [w for w in over_zmq.worker_statuses() if w.planes]
    assert dict(decode.planes) == {"prefill-0": "zmq"}
    over_zmq.assert_no_blocks_in_use()
    cluster.assert_no_blocks_in_use()


def test_shared_prefix_goes_where_its_blocks_are(cluster: LocalCluster) -> None:
    prefix = [7 + i % 150 for i in range(256)]
    first = generate(cluster.grpc, request([*prefix, 9], max_tokens=2), mode="REMOTE")
    time.sleep(0.3)  # hints are published within 10 ms, on a busy machine a little later
    for index in range(6):
        answer = generate(cluster.grpc, request([*prefix, 20 + index], max_tokens=2), mode="REMOTE")
        assert answer.timing is not None
        assert first.timing is not None
        assert answer.timing.prefill_worker == first.timing.prefill_worker
        assert answer.usage is not None
        assert answer.usage.cached_tokens == 256


def test_official_client_streams_and_does_not(cluster: LocalCluster) -> None:
    client = OpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    parts: list[str] = []
    usage = None
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        parts.extend(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert "".join(parts) == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == whole.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    client.close()


def test_unseeded_requests_differ(cluster: LocalCluster) -> None:
    """RB-076: without a seed each request draws its own."""
    body = request(PROMPT[:20], max_tokens=16, temperature=1.0)
    answers = {tuple(generate(cluster.grpc, body).token_ids[0]) for _ in range(5)}
    assert len(answers) > 1


def test_small_pools_preempt_and_still_give_the_same_tokens(
    toy_dir: Path, cluster: LocalCluster
) -> None:
    """RB-014, RB-017, RB-019: pools of few requests neither deadlock nor change an answer."""
    prompts = [[5 + i, *PROMPT[:90]] for i in range(12)]
    bodies = [request(p, max_tokens=60, ignore_eos=True) for p in prompts]
    expected = [generate(cluster.grpc, body).token_ids for body in bodies]
    settings = {"ISTHMUS_MODEL__MAX_MODEL_LEN": "256"}
    flags = ("--num-blocks", "24")
    answers: dict[int, dict[int, list[int]]] = {}
    with LocalCluster(toy_dir, prefill=1, decode=1, flags=flags, settings=settings) as small:
        address = small.grpc

        def ask(index: int) -> None:
            answers[index] = generate(address, bodies[index]).token_ids

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        small.assert_no_blocks_in_use()
    assert [answers.get(i) for i in range(len(bodies))] == expected


def test_explained_stages_add_up_to_the_ttft_the_client_was_told(cluster: LocalCluster) -> None:
    """On real workers, in every mode, with what each candidate would have cost."""
    with grpc.insecure_channel(cluster.grpc) as channel:
        doors = inference_pb2_grpc.InferenceStub(channel)
        admin = admin_pb2_grpc.AdminStub(channel)
        for mode in ("REMOTE", "LOCAL", "STAY"):
            body = request([3 + len(mode), *PROMPT], max_tokens=5)
            frames = list(
                doors.Generate(body, timeout=60, metadata=(("x-isthmus-force-mode", mode),))
            )
            ask = admin_pb2.ExplainRequestRequest(request_id=frames[0].request_id)
            report = admin.ExplainRequest(ask, timeout=10)
            told = frames[-1].timing
            stages = {stage.name: stage.us for stage in report.ttft_stages}
            assert abs(sum(stages.values()) - told.ttft_us) <= 0.01 * told.ttft_us
            assert stages["prefill"] == told.prefill_us > 0
            assert sum(stage.us for stage in report.stages) == told.e2e_us
            assert report.choices[0].mode == mode
            assert report.choices[0].candidates[0].cost_s > 0


def test_request_that_can_never_fit_is_refused_with_the_limit(cluster: LocalCluster) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(cluster.grpc, request([5] * 3000, max_tokens=2))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "2048" in (caught.value.details() or "")


def test_router_killed_under_load_leaves_no_work_on_the_workers(toy_dir: Path) -> None:
    """Workers free orphans within the resume grace; the new router serves at once."""
    with LocalCluster(toy_dir, prefill=1, decode=1) as cluster:
        address = cluster.grpc
        channel = grpc.insecure_channel(address)
        stub = inference_pb2_grpc.InferenceStub(channel)
        body = request(PROMPT[:40], max_tokens=1500, ignore_eos=True)
        calls = [stub.Generate(body, timeout=30) for _ in range(4)]
        for call in calls:
            next(iter(call))
        os.kill(cluster.pid_of("router"), signal.SIGKILL)
        channel.close()
        cluster.assert_no_blocks_in_use(within_s=8.0)

        end = time.monotonic() + 15
        while True:
            try:
                answer = generate(cluster.grpc, request(PROMPT[:40], max_tokens=4), timeout_s=5)
                break
            except grpc.RpcError:
                assert time.monotonic() < end, "the router did not come back"
                time.sleep(0.2)
        assert len(answer.token_ids[0]) == 4
