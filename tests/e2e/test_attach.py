"""Decode reads prefill's pool in place: real processes, the single worker's tokens, no leak."""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from services.bench.local_cluster import LocalCluster as Cluster
from services.pb import inference_pb2, inference_pb2_grpc, worker_pb2
from tests.support.generate import Answer, collect, generate, request
from tests.support.waiting import wait_for

pytestmark = pytest.mark.e2e

PLANES = "attach,memfd,zmq"
LENGTHS = (1, 15, 16, 17, 100, 160)
SHORT, LONG = 8, 60  # tokens: never moved, all moved


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 250, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def single(toy_dir: Path) -> Iterator[Cluster]:
    with Cluster(toy_dir, prefill=0, decode=1) as running:
        yield running


@pytest.fixture(scope="module")
def expected(single: Cluster) -> dict[int, list[list[int]]]:
    """What one worker answers."""
    return {
        count: [
            generate(single.grpc, request(p, max_tokens=count, ignore_eos=True)).token_ids[0]
            for p in prompts()
        ]
        for count in (SHORT, LONG)
    }


@pytest.fixture(scope="module")
def cluster(toy_dir: Path) -> Iterator[Cluster]:
    with Cluster(
        toy_dir, prefill=1, decode=1, settings={"ISTHMUS_TRANSFER__PLANES": PLANES}
    ) as running:
        yield running


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_tokens_are_the_single_workers(
    cluster: Cluster, expected: dict[int, list[list[int]]], count: int
) -> None:
    answers = [
        generate(cluster.grpc, request(p, max_tokens=count, ignore_eos=True), mode="REMOTE")
        for p in prompts()
    ]
    assert [answer.token_ids[0] for answer in answers] == expected[count]
    in_place = [answer.timing.handoff_blocks_attached for answer in answers if answer.timing]
    assert max(in_place) > 0, "what was read in place is not in the answers"
    statuses = cluster.worker_statuses()
    assert {"attach"} in [set(status.planes.values()) for status in statuses]
    cluster.assert_no_blocks_in_use()


# ---- faults -----------------------------------------------------------------------------------

HELD = {  # nothing moves by itself
    "ISTHMUS_TRANSFER__PLANES": PLANES,
    "ISTHMUS_TRANSFER__ATTACH_MOVE_AFTER_TOKENS": "100000",
    "ISTHMUS_TRANSFER__LEASE_MS": "2000",
    "ISTHMUS_WORKER__DRAIN_S": "8",
}
STREAMED = 1500  # tokens: seconds of decoding, to be disturbed in the middle


def streamed_body(index: int) -> inference_pb2.GenerateRequest:
    prompt = np.random.default_rng(index).integers(3, 250, 100).tolist()
    return request(prompt, max_tokens=STREAMED, ignore_eos=True)


class Stream(threading.Thread):
    """One request on a thread of its own; `under_way` once decode has given a few tokens."""

    def __init__(self, address: str, index: int) -> None:
        super().__init__(daemon=True)
        self._address, self._index = address, index
        self.under_way = threading.Event()
        self.answer: Answer | None = None
        self.start()

    def run(self) -> None:
        metadata = (("x-isthmus-force-mode", "REMOTE"),)
        with grpc.insecure_channel(self._address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                streamed_body(self._index), timeout=120, metadata=metadata
            )
            self.answer = collect(self._noting(call))

    def _noting(
        self, frames: Iterable[inference_pb2.GenerateFrame]
    ) -> Iterator[inference_pb2.GenerateFrame]:
        for number, frame in enumerate(frames):
            if number == 4:
                self.under_way.set()
            yield frame


@pytest.fixture(scope="module")
def alone(single: Cluster) -> list[list[int]]:
    return [generate(single.grpc, streamed_body(i)).token_ids[0] for i in range(3)]


@pytest.fixture
def held(toy_dir: Path) -> Iterator[Cluster]:
    with Cluster(toy_dir, prefill=1, decode=1, settings=HELD) as running:
        yield running


def event_count(cluster: Cluster, what: str) -> int:
    """Read a counter of the prefill worker's."""
    port = prefill_of(cluster).metrics_port
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    name = f'isthmus_attach_events_total{{what="{what}"}}'
    [line] = [line for line in text.splitlines() if line.startswith(name)]
    return int(float(line.split()[-1]))


def prefill_of(cluster: Cluster) -> worker_pb2.StatusResponse:
    [found] = [w for w in cluster.worker_statuses() if w.role.prefill > w.role.decode]
    return found


def begin(cluster: Cluster) -> list[Stream]:
    """Start streams that read prefill's pool in place."""
    streams = [Stream(cluster.grpc, index) for index in range(3)]
    for stream in streams:
        assert stream.under_way.wait(60)
    status = prefill_of(cluster)
    assert status.requests_open == 3, "the streams are not attached"
    assert status.blocks_in_use >= 18
    return streams


def num_pools_mapped(pid: int) -> int:
    """Pools a worker has mapped, its own among them."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return len({line.split()[4] for line in maps.splitlines() if "memfd:isthmus-kv" in line})


def finish(streams: list[Stream], expected: list[list[int]]) -> None:
    for stream in streams:
        stream.join(120)
        assert stream.answer is not None
    assert [s.answer.token_ids[0] for s in streams if s.answer] == expected


def test_a_killed_prefill_worker_costs_no_token(held: Cluster, alone: list[list[int]]) -> None:
    """RB-032: the mapping survives its owner; what was attached moves and the streams go on."""
    streams = begin(held)
    killed = prefill_of(held).pid
    os.kill(killed, signal.SIGKILL)
    finish(streams, alone)
    wait_for(lambda: held.pid_of("prefill") != killed, 30, "there is a new prefill worker")
    decode = held.pid_of("decode")
    wait_for(lambda: num_pools_mapped(decode) == 1, 30, "the pool of the one that is gone is too")
    held.assert_no_blocks_in_use()


def test_a_frozen_prefill_worker_costs_no_token(held: Cluster, alone: list[list[int]]) -> None:
    streams = begin(held)
    process = psutil.Process(prefill_of(held).pid)
    process.suspend()
    try:
        finish(streams, alone)
    finally:
        process.resume()
    held.assert_no_blocks_in_use(15.0)


def test_draining_the_prefill_worker_moves_what_is_attached(
    held: Cluster, alone: list[list[int]]
) -> None:
    """Its blocks come back while those who read them go on."""
    streams = begin(held)
    status = prefill_of(held)
    os.kill(status.pid, signal.SIGTERM)
    wait_for(lambda: status.worker_id not in held.blocks_in_use(), 10, "its blocks are back")
    assert any(stream.is_alive() for stream in streams), "it waited for its readers to end"
    wait_for(lambda: held.pid_of("prefill") != status.pid, 20, "there is a new one")
    finish(streams, alone)
    held.assert_no_blocks_in_use()


def test_cancelled_streams_leave_nothing_on_either_side(held: Cluster) -> None:
    with grpc.insecure_channel(held.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for index in range(12):
            call = stub.Generate(
                streamed_body(index), timeout=60, metadata=(("x-isthmus-force-mode", "REMOTE"),)
            )
            for number, _ in enumerate(call):
                if number == index:
                    break
            call.cancel()
    held.assert_no_blocks_in_use()


def test_prefill_short_of_memory_gets_its_blocks_back(
    toy_dir: Path, alone: list[list[int]]
) -> None:
    """A prompt that does not fit beside blocks that are read in place has them moved."""
    settings = HELD | {"ISTHMUS_WORKER__NUM_BLOCKS": "130", "ISTHMUS_WORKER__METRICS_PORT": "0"}
    with Cluster(toy_dir, prefill=1, decode=1, settings=settings) as cluster:
        stream = Stream(cluster.grpc, 0)
        assert stream.under_way.wait(60)
        assert prefill_of(cluster).blocks_in_use == 7
        prompt = np.random.default_rng(99).integers(3, 250, 1990).tolist()
        generate(cluster.grpc, request(prompt, max_tokens=1), mode="REMOTE", timeout_s=30)
        assert event_count(cluster, "asked_back") == 1
        finish([stream], alone[:1])
        cluster.assert_no_blocks_in_use()
