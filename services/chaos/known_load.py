"""Clients whose every answer is known beforehand, and what they found wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import numpy as np

from services.bench.result import BenchFailed
from services.chaos.client import Heard, StreamBroken, call
from services.chaos.scripted_model import ScriptedReference, make_scripted_model
from services.common.model_manifest import ModelManifest, read_manifest
from services.common.sampling import SamplingParams
from services.pb import inference_pb2, inference_pb2_grpc

Body = inference_pb2.GenerateRequest
Answer = dict[int, list[int]]
Ask = Callable[[Body, float, str, Heard], Awaitable[None]]  # body, time limit, mode, what is heard

GRACE_S = 2.0  # past its deadline a request counts as hung
_CANCELLED_SHARE = 0.15
_REMOTE_SHARE = 0.6
_PAUSE_AFTER_ERROR_S = 0.25
_MAX_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Lengths and number of the requests."""

    prompt_lengths: Sequence[int] = (1, 15, 16, 17, 40, 150, 400, 900, 1500)
    output_lengths: Sequence[int] = (1, 2, 8, 20, 60)
    num_bodies: int = 40
    timeout_s: float = 15.0


def make_bodies(seed: int, shape: LoadShape, vocab_size: int) -> list[Body]:
    """Requests of a fixed length over prompt lengths, choices, sampling and penalties.

    Half of them share the start of their prompt with another, so that prefixes are had.
    """
    rng = random.Random(f"{seed}/bodies")
    long = [rng.randrange(3, min(vocab_size, 20_000)) for _ in range(max(shape.prompt_lengths))]
    return [_body(rng, shape, long) for _ in range(shape.num_bodies)]


def _body(rng: random.Random, shape: LoadShape, shared: Sequence[int]) -> Body:
    prompt = list(shared[: rng.choice(shape.prompt_lengths)])
    if rng.random() < 0.5:
        rng.shuffle(prompt)
    body = Body(
        max_tokens=rng.choice(shape.output_lengths),
        n=rng.choice((1, 1, 1, 2)),
        return_token_ids=True,
        ignore_eos=True,
        timeout_ms=round(shape.timeout_s * 1000),
        token_ids=np.asarray(prompt, dtype="<u4").tobytes(),
    )
    body.sampling.temperature = rng.choice((0.0, 0.0, 0.8, 1.2))
    body.sampling.seed = rng.randrange(1 << 40)
    if rng.random() < 0.3:
        body.sampling.repetition_penalty = 1.25
    return body


def computed_answers(bodies: Sequence[Body], manifest: ModelManifest) -> list[Answer]:
    """What scripted workers must say."""
    reference = ScriptedReference(manifest)
    return [
        dict(enumerate(reference.answer(np.frombuffer(b.token_ids, "<u4").tolist(), _params(b))))
        for b in bodies
    ]


async def known_requests(
    folder: Path, seed: int, shape: LoadShape
) -> tuple[Path, list[Body], list[Answer]]:
    """Make a scripted model in a folder, requests to it, and what its workers must say."""
    model_dir = make_scripted_model(folder / "model")
    manifest = read_manifest(model_dir)
    bodies = make_bodies(seed, shape, manifest.vocab_size)
    return model_dir, bodies, await asyncio.to_thread(computed_answers, bodies, manifest)


def _params(body: Body) -> SamplingParams:
    wire = body.sampling
    penalty = wire.repetition_penalty if wire.HasField("repetition_penalty") else 1.0
    return SamplingParams(
        temperature=wire.temperature,
        repetition_penalty=penalty,
        seed=wire.seed,
        ignore_eos=True,
        max_tokens=body.max_tokens,
        n=body.n,
    )


async def asked_answers(address: str, bodies: Sequence[Body], timeout_s: float) -> list[Answer]:
    """What one worker alone says, asked before anything is broken; none may fail."""
    answers = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for body in bodies:
            patient = Body()
            patient.CopyFrom(body)
            patient.timeout_ms = round(timeout_s * 1000)
            heard = await call(stub, patient, timeout_s=timeout_s, mode="LOCAL")
            if heard.code:
                raise BenchFailed(f"the reference worker answered {heard.code}")
            answers.append(heard.token_ids)
    return answers


@dataclass(slots=True)
class Findings:
    """What the clients saw."""

    num_answered: int = 0
    num_cancelled: int = 0
    num_wrong: int = 0
    num_broken: int = 0
    num_hung: int = 0
    num_migrations: int = 0
    slowest_s: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    planes: set[str] = field(default_factory=set)  # over which KV came
    failed: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_EXAMPLES))  # the last
    examples: list[str] = field(default_factory=list)  # of what was wrong, a few

    def judge(self, body: Body, wrong: str, heard: Heard, *, was_cancelled: bool) -> None:
        """Take one call to its end: right, or right up to its end, and in time.

        Args:
            wrong: what was, "" if all was right.
        """
        self.slowest_s = max(self.slowest_s, heard.took_s)
        is_answered = not was_cancelled and not heard.code
        if wrong:
            self.num_wrong += 1
            self.note(f"{_name(body)}: wrong {wrong}")
        # A router that keeps deadlines ends every call itself, with a code, and in time.
        if heard.took_s > body.timeout_ms / 1000 + GRACE_S / 2:
            self.num_hung += 1
            self.note(f"{_name(body)}: {heard.took_s:.1f} s, {heard.code or 'answered'}")
        self.num_answered += is_answered
        self.num_migrations += heard.migrations
        self.num_cancelled += was_cancelled
        if heard.plane:
            self.planes.add(heard.plane)
        if heard.code:
            self.codes[heard.code] += 1
            self.failed.append(
                f"{_name(body)}: {heard.code} after {heard.took_s:.1f} s, "
                f"{sum(map(len, heard.token_ids.values()))} tokens by {heard.newest_s:.1f} s"
            )

    def note(self, what: str) -> None:
        """Keep an example."""
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(what)


def wrong_tokens(expected: Answer, heard: Answer, *, is_whole: bool) -> str:
    """Say so where they are; of what is not whole all must be how it begins."""
    begins = all(ids == expected.get(choice, [])[: len(ids)] for choice, ids in heard.items())
    is_right = heard == expected if is_whole else begins
    return "" if is_right else "tokens"


def _name(body: Body) -> str:
    return f"prompt of {len(body.token_ids) // 4}, {body.max_tokens} x {body.n} tokens"


class KnownLoad:
    """Clients in a closed loop; `pause` lets running requests end and holds further ones back."""

    def __init__(
        self, address: str, bodies: Sequence[Body], answers: Sequence[Answer], seed: int
    ) -> None:
        self.findings = Findings()
        self._address = address
        self._bodies = bodies
        self._answers = answers
        self._rng = random.Random(f"{seed}/load")
        self._may_send = asyncio.Event()
        self._is_over = False
        self._num_running = 0

    def resume(self) -> None:
        """Send from now on."""
        self._may_send.set()

    async def pause(self) -> None:
        """Send no more, and wait for the end of every running request."""
        self._may_send.clear()
        while self._num_running:  # noqa: ASYNC110 - every request ends by its deadline
            await asyncio.sleep(0.01)

    def stop(self) -> None:
        """Let the clients end."""
        self._is_over = True
        self._may_send.set()

    async def client(self) -> None:
        """One client, until `stop`."""
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def ask(body: Body, limit_s: float, mode: str, heard: Heard) -> None:
                await call(stub, body, timeout_s=limit_s, mode=mode, heard=heard)

            await self.ask_on(ask)

    async def ask_on(self, ask: Ask) -> None:
        """Ask one question after the other, until `stop`."""
        while True:
            await self._may_send.wait()
            if self._is_over:
                return
            self._num_running += 1
            try:
                await self._one(ask)
            finally:
                self._num_running -= 1

    def _wrong(self, index: int, heard: Heard, *, is_whole: bool) -> str:
        """Say what is wrong with what was heard of a request, "" if nothing is."""
        return wrong_tokens(self._answers[index], heard.token_ids, is_whole=is_whole)

    async def _one(self, ask: Ask) -> None:
        rng, findings = self._rng, self.findings
        index = rng.randrange(len(self._bodies))
        body = self._bodies[index]
        limit_s = body.timeout_ms / 1000 + GRACE_S
        mode = "REMOTE" if rng.random() < _REMOTE_SHARE else ""
        patience_s = rng.expovariate(1 / 0.1) if rng.random() < _CANCELLED_SHARE else limit_s * 2
        heard = Heard()
        task = asyncio.ensure_future(ask(body, limit_s, mode, heard))
        await asyncio.wait([task], timeout=patience_s)
        was_cancelled = task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not was_cancelled:
                raise
        except StreamBroken as error:
            findings.num_broken += 1
            findings.note(f"{_name(body)}: {error}")
        is_whole = not was_cancelled and not heard.code
        wrong = self._wrong(index, heard, is_whole=is_whole)
        findings.judge(body, wrong, heard, was_cancelled=was_cancelled)
        if heard.code:
            await asyncio.sleep(_PAUSE_AFTER_ERROR_S)  # a refused client does not hammer
