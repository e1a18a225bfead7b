"""A decode worker that is told to stop under load hands its open requests to the other one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

import grpc
import pytest

from services.bench.local_cluster import LocalCluster
from services.pb import inference_pb2, inference_pb2_grpc
from tests.support.generate import Answer, collect, generate, request

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.slow]

NUM_STREAMS = 6
NUM_TOKENS = 1500  # seconds of decoding, to be moved in the middle


def _body(index: int) -> inference_pb2.GenerateRequest:
    """Sampled with a seed and penalties: everything a move could get wrong shows in the tokens."""
    return request(
        [5 + index, *range(6, 40 + index)],
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        temperature=0.9,
        seed=index,
        presence_penalty=0.3,
        repetition_penalty=1.1,
    )


class _Stream(threading.Thread):
    """One request on a thread of its own; `under_way` once it has a few tokens."""

    def __init__(self, address: str, index: int) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._index = index
        self.under_way = threading.Event()
        self.answer: Answer | None = None
        self.error: grpc.RpcError | None = None
        self.start()

    def run(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                _body(self._index), timeout=120
            )
            try:
                self.answer = collect(self._noting(call))
            except grpc.RpcError as error:
                self.error = error

    def _noting(
        self, frames: Iterable[inference_pb2.GenerateFrame]
    ) -> Iterable[inference_pb2.GenerateFrame]:
        for number, frame in enumerate(frames):
            if number == 5:
                self.under_way.set()
            yield frame


def test_draining_a_decode_worker_under_load_fails_no_request(toy_dir: Path) -> None:
    """RB-105: every stream goes on, with the tokens of a single worker that was never stopped."""
    with LocalCluster(toy_dir, prefill=1, decode=2) as cluster:
        streams = [_Stream(cluster.grpc, index) for index in range(NUM_STREAMS)]
        for stream in streams:
            assert stream.under_way.wait(60)
        victim = max(
            (w for w in cluster.worker_statuses() if w.role.decode > w.role.prefill),
            key=lambda w: w.requests_open,
        )
        assert victim.requests_open > 0
        os.kill(victim.pid, signal.SIGTERM)
        answers = []
        for stream in streams:
            stream.join(120)
            assert stream.error is None
            assert stream.answer is not None
            answers.append(stream.answer)
        for index, answer in enumerate(answers):
            single = generate(cluster.grpc, _body(index), mode="STAY")
            assert answer.token_ids == single.token_ids
        timings = [answer.timing for answer in answers if answer.timing is not None]
        moved = [timing for timing in timings if timing.migrations]
        assert moved, "nothing was moved: the streams ended before the worker was told to stop"
        for timing in moved:
            assert timing.decode_worker != victim.worker_id
            assert 0 < timing.migration_gap_us < 5_000_000  # a busy machine; 0.1 to 0.5 s is usual
        cluster.assert_no_blocks_in_use()
