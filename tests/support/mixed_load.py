"""Requests of every shape, their right answers, and clients that check what they get."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import grpc.aio

from services.bench.local_cluster import LocalCluster
from services.chaos.client import Heard, call
from services.pb import inference_pb2, inference_pb2_grpc
from tests.support.generate import request

Body = inference_pb2.GenerateRequest

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 150, 400, 1200)
OUTPUT_LENGTHS = (1, 2, 3, 8, 20, 60, 100)
STOPS = ("e", "th", "in", " a", "on the")
VOCAB = 300  # of the toy model


def mixed_bodies(seed: int, count: int) -> list[Body]:
    """Requests over prompt lengths, choices, sampling, penalties, stops and logprobs."""
    rng = random.Random(seed)
    return [_body(rng) for _ in range(count)]


def _body(rng: random.Random) -> Body:
    prompt = [rng.randrange(3, VOCAB) for _ in range(rng.choice(PROMPT_LENGTHS))]
    max_tokens = rng.choice(OUTPUT_LENGTHS)
    body = request(prompt, max_tokens=max_tokens, n=rng.choice((1, 1, 1, 2, 4)))
    body.sampling.seed = rng.randrange(1 << 40)
    body.ignore_eos = rng.random() < 0.4
    if rng.random() < 0.5:
        body.sampling.temperature = rng.choice((0.7, 1.0, 1.5))
        body.sampling.top_p = rng.choice((0.8, 1.0))
        body.sampling.top_k = rng.choice((0, 20))
    if rng.random() < 0.3:
        body.sampling.repetition_penalty = 1.25
        body.sampling.frequency_penalty = 0.5
    if rng.random() < 0.3:
        body.sampling.logprobs = True
        body.top_logprobs = rng.choice((0, 3))
    if rng.random() < 0.2:
        body.min_tokens = min(max_tokens, 5)
    if rng.random() < 0.3:
        body.stop.extend(rng.sample(STOPS, 2))
    return body


class MixedLoad:
    """Clients in a closed loop that compare every answer with the single worker's."""

    def __init__(self, bodies: Sequence[Body], expected: Sequence[Heard], seed: int) -> None:
        self._bodies = bodies
        self._expected = expected
        self._rng = random.Random(seed)
        self._is_over = False
        self.codes: dict[str, int] = {}
        self.num_answered = 0
        self.slowest_s = 0.0

    async def run(
        self, cluster: LocalCluster, *, clients: int, timeout_s: float, modes: Sequence[str]
    ) -> None:
        """Send until `stop`; raises AssertionError at the first wrong answer."""
        await asyncio.gather(*(self._client(cluster, timeout_s, modes) for _ in range(clients)))

    def stop(self) -> None:
        """Let running requests end and send no more."""
        self._is_over = True

    async def _client(self, cluster: LocalCluster, timeout_s: float, modes: Sequence[str]) -> None:
        while not self._is_over:
            index = self._rng.randrange(len(self._bodies))
            async with grpc.aio.insecure_channel(cluster.grpc) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                mode = self._rng.choice(list(modes))
                heard = await call(stub, self._bodies[index], timeout_s=timeout_s, mode=mode)
            self.slowest_s = max(self.slowest_s, heard.took_s)
            if heard.code:
                self.codes[heard.code] = self.codes.get(heard.code, 0) + 1
                await asyncio.sleep(0.05)  # a client that is refused does not hammer
                continue
            self.num_answered += 1
            assert heard.answer == self._expected[index].answer, f"body {index}, mode {mode!r}"


async def answers(address: str, bodies: Sequence[Body], mode: str = "") -> list[Heard]:
    """Answer every body, a few at a time; none may fail."""
    limit = asyncio.Semaphore(6)

    async def one(stub: inference_pb2_grpc.InferenceAsyncStub, body: Body) -> Heard:
        async with limit:
            return await call(stub, body, timeout_s=60.0, mode=mode)

    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        heard = await asyncio.gather(*(one(stub, body) for body in bodies))
    assert [h.code for h in heard] == [""] * len(bodies)
    return list(heard)
