"""Kills, freezes and stops: nothing else suffers, nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from services.bench.local_cluster import LocalCluster as Cluster
from services.pb import inference_pb2, inference_pb2_grpc
from tests.support.generate import collect, generate, request
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.slow]

WORKER_LEASE_MS = 2_000  # the default of lease.worker_lease_ms
LONG = 1800  # tokens: seconds of decoding, to be cut in the middle


@pytest.fixture(scope="module")
def running(toy_dir: Path) -> Iterator[Cluster]:
    with Cluster(toy_dir, prefill=1, decode=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    """Whole again, whatever the test before did to it."""
    wait_for(lambda: _is_whole(running), 30, "every worker is live and registered")
    return running


def _is_whole(cluster: Cluster) -> bool:
    workers = cluster.cluster_status().workers
    fresh = [w for w in workers if w.state == "live" and w.lease_age_ms < WORKER_LEASE_MS]
    return len(workers) == len(fresh) == 3


class Stream(threading.Thread):
    """One long request on a thread of its own."""

    def __init__(self, address: str, tokens: list[int]) -> None:
        super().__init__(daemon=True)
        self.address = address
        self.tokens = tokens
        self.first = threading.Event()
        self.error: grpc.RpcError | None = None
        self.token_ids: list[int] = []
        self.num_migrations = 0
        self.start()

    def run(self) -> None:
        body = request(self.tokens, max_tokens=LONG, ignore_eos=True)
        with grpc.insecure_channel(self.address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(body, timeout=120)
            try:
                answer = collect(self._noting_first(call))
                assert answer.timing is not None
                self.token_ids = answer.token_ids[0]
                self.num_migrations = answer.timing.migrations
            except grpc.RpcError as error:
                self.error = error

    def _noting_first(
        self, frames: Iterable[inference_pb2.GenerateFrame]
    ) -> Iterator[inference_pb2.GenerateFrame]:
        for index, frame in enumerate(frames):
            if index == 3:
                self.first.set()
            yield frame


def test_killed_decode_worker_costs_no_stream_and_no_token(cluster: Cluster) -> None:
    """G6: every stream goes on, with the tokens of a run without a fault; the worker comes back."""
    streams = [Stream(cluster.grpc, [5 + i, 6, 7]) for i in range(8)]
    for stream in streams:
        assert stream.first.wait(30)
    victim = max(
        (w for w in cluster.worker_statuses() if w.role.decode > w.role.prefill),
        key=lambda w: w.requests_open,
    )
    assert victim.requests_open > 0

    os.kill(victim.pid, signal.SIGKILL)
    for stream in streams:
        stream.join(120)
        assert not stream.is_alive()
    assert [stream.error for stream in streams] == [None] * 8
    moved = [stream for stream in streams if stream.num_migrations]
    assert 0 < len(moved) < len(streams)
    for stream in streams:
        body = request(stream.tokens, max_tokens=LONG, ignore_eos=True)
        assert generate(cluster.grpc, body, mode="STAY").token_ids[0] == stream.token_ids

    def is_back() -> bool:
        workers = {w.worker_id: w for w in cluster.cluster_status().workers}
        back = workers.get(victim.worker_id)
        return back is not None and back.state == "live" and back.incarnation != victim.incarnation

    wait_for(is_back, 20, "the killed worker is live again")
    for index in range(8):
        generate(cluster.grpc, request([9, index + 3], max_tokens=4))
    wait_for(
        lambda: any(
            w.worker_id == victim.worker_id and w.steps > 0 for w in cluster.worker_statuses()
        ),
        10,
        "the restarted worker is used",
    )
    cluster.assert_no_blocks_in_use()


def test_frozen_worker_is_out_of_rotation_within_three_seconds(cluster: Cluster) -> None:
    victim = next(w for w in cluster.worker_statuses() if w.role.decode > w.role.prefill)
    process = psutil.Process(victim.pid)
    process.suspend()
    try:

        def is_out() -> bool:
            view = {w.worker_id: w for w in cluster.cluster_status().workers}
            return victim.worker_id not in view or view[victim.worker_id].state != "live"

        wait_for(is_out, 3.5, "the frozen worker is not live any more")
        for index in range(6):
            answer = generate(cluster.grpc, request([4, index + 3], max_tokens=4), timeout_s=10)
            assert answer.timing is not None
            assert answer.timing.decode_worker != victim.worker_id
    finally:
        process.resume()


def test_cancelled_stream_frees_its_blocks_on_both_sides(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(10):
            call = stub.Generate(
                request([3, 4, 5] * 20, max_tokens=LONG, ignore_eos=True),
                timeout=30,
            )
            next(iter(call))
            call.cancel()
    cluster.assert_no_blocks_in_use()


def test_deadline_ends_the_request_everywhere(cluster: Cluster) -> None:
    """RB-091: the server enforces the deadline itself."""
    body = request([3, 4, 5], max_tokens=2000, ignore_eos=True)
    body.timeout_ms = 300
    with pytest.raises(grpc.RpcError) as caught:
        generate(cluster.grpc, body, timeout_s=30)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    cluster.assert_no_blocks_in_use()


def test_stop_leaves_no_process_and_no_file(toy_dir: Path) -> None:
    with Cluster(toy_dir, prefill=1, decode=1) as stopped:
        generate(stopped.grpc, request([3, 4, 5], max_tokens=4))
        pids = stopped.pids()
        runtime_dir = stopped.runtime_dir()
        assert len(pids) >= 4
        assert runtime_dir.exists()
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    assert not runtime_dir.exists()
    assert stopped.returncode == 0


def test_store_death_fails_no_request(cluster: Cluster) -> None:
    """RB-097: the store is killed, requests go on, and the one that replaces it is used."""
    for index in range(4):
        generate(cluster.grpc, request([5, index + 3], max_tokens=2))
    killed = cluster.pid_of("store")
    os.kill(killed, signal.SIGKILL)
    for index in range(20):
        generate(cluster.grpc, request([6, index + 3], max_tokens=2), timeout_s=10)
        time.sleep(0.1)
    wait_for(lambda: cluster.pid_of("store") != killed, 15, "there is a new store")
    wait_for(lambda: not cluster.cluster_status().degraded, 15, "the store is used again")
    wait_for(lambda: _is_whole(cluster), 15, "every worker is registered in it")
