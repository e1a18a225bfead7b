"""Clients of two routers, by every door: who loses a router asks the other one, once, by its key.

Every answer is held against one to the same request from a cluster that nobody disturbed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise

import grpc.aio

from services.bench.result import BenchFailed
from services.chaos.client import Heard, call
from services.chaos.http_client import call_http
from services.chaos.known_load import Answer, Body, KnownLoad, wrong_tokens
from services.chaos.rig import CHANNEL_OPTIONS, RigRouter
from services.common.quantile import nearest_rank
from services.pb import inference_pb2_grpc
from services.router.request import TokenText

Send = Callable[[RigRouter], Awaitable[None]]

# What a client sees of a router that is gone or going; everything else is the cluster's fault.
ROUTER_GONE = frozenset({"unavailable", "draining"})
GRPC, EVENTS, WHOLE = "grpc", "events", "whole"  # doors, and how an answer comes through them
_DOORS, _DOOR_WEIGHTS = (GRPC, EVENTS, WHOLE), (6, 2, 2)
_STOP_SHARE, _LOGPROBS_SHARE = 0.3, 0.3
_TOP_LOGPROBS = 2
_ASKED_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Seen:
    """One answered request, as its client saw it."""

    asked_at: float  # time.monotonic()
    first_s: float | None  # until the first token, a lost router included; None: not streamed
    was_blind: bool
    was_sent_again: bool


def ttft_ms(seen: Sequence[Seen], share: float) -> float | None:
    """Nearest rank of the streamed answers' times to their first token; None if there are none."""
    firsts = [one.first_s * 1000 for one in seen if one.first_s is not None]
    return round(nearest_rank(firsts, share), 1) if firsts else None


def vary(bodies: Sequence[Body], answers: Sequence[Answer], text: TokenText, seed: int) -> None:
    """Give some requests a stop string that their answer holds, and some logprobs."""
    rng = random.Random(f"{seed}/vary")
    for body, answer in zip(bodies, answers, strict=True):
        if rng.random() < _LOGPROBS_SHARE:
            body.sampling.logprobs = True
            body.sampling.top_logprobs = rng.choice((0, _TOP_LOGPROBS))
        stop = _stop_in(answer[0], text, rng)
        if stop and rng.random() < _STOP_SHARE:
            body.stop.append(stop)


def _stop_in(token_ids: Sequence[int], text: TokenText, rng: random.Random) -> str:
    """Two printable tokens of an answer's later part, "" where there are none in a row."""
    raw = [text.token_bytes(token_id) for token_id in token_ids]
    pairs = [a + b for a, b in pairwise(raw)]
    printable = [p for p in pairs[len(pairs) // 3 :] if p.isascii() and p.decode().isprintable()]
    return rng.choice(printable).decode() if printable else ""


async def undisturbed_answers(
    address: str, bodies: Sequence[Body], answers: Sequence[Answer]
) -> list[Heard]:
    """What a cluster says that nobody disturbs; its tokens must be the computed ones."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        places = asyncio.Semaphore(_ASKED_AT_ONCE)

        async def ask(body: Body, answer: Answer) -> Heard:
            async with places:
                heard = await call(stub, body, timeout_s=body.timeout_ms / 1000)
            is_whole = not body.stop
            if heard.code or wrong_tokens(answer, heard.token_ids, is_whole=is_whole):
                raise BenchFailed(f"undisturbed, a request had {heard.code or 'wrong tokens'}")
            return heard

        return await asyncio.gather(*map(ask, bodies, answers))


def difference(expected: Heard, heard: Heard, *, is_whole: bool) -> str:
    """Name what differs from the undisturbed answer; of a part, from how that begins."""
    wrong = wrong_tokens(expected.token_ids, heard.token_ids, is_whole=is_whole and heard.has_ids)
    if wrong:
        return wrong
    for choice, text in heard.text.items():
        if not expected.text.get(choice, "").startswith(text):
            return "text"
    for choice, logprobs in heard.logprobs.items():
        if logprobs != expected.logprobs.get(choice, [])[: len(logprobs)]:
            return "logprobs"
    if not is_whole:
        return ""
    ends = {choice: (reason, "") for choice, (reason, _) in expected.ends.items()}
    whole = {
        "text": heard.text == expected.text,
        "ends": heard.ends == (expected.ends if heard.has_ids else ends),
        "logprobs": heard.logprobs == expected.logprobs,
        "usage": heard.usage == expected.usage,
    }
    return ",".join(name for name, is_equal in whole.items() if not is_equal)


class KeyedLoad(KnownLoad):
    """Clients that send a request once more, to the other router, when theirs is gone."""

    def __init__(
        self, bodies: Sequence[Body], answers: Sequence[Answer], undisturbed: Sequence[Heard],
        seed: int,
    ) -> None:  # fmt: skip
        super().__init__("", bodies, answers, seed)
        self.num_sent_again = 0
        self.num_second_tries = 0  # under way
        self.seen: list[Seen] = []
        self._undisturbed = undisturbed
        self._doors = random.Random(f"{seed}/doors")
        self._num_asked = 0

    async def client_of(self, routers: Sequence[RigRouter]) -> None:
        """One client, until `stop`; the first is its router."""
        async with AsyncExitStack() as stack:
            stubs = {}
            for router in routers:
                channel = grpc.aio.insecure_channel(router.grpc, options=CHANNEL_OPTIONS)
                await stack.enter_async_context(channel)
                stubs[router.name] = inference_pb2_grpc.InferenceStub(channel)

            async def ask(body: Body, limit_s: float, mode: str, heard: Heard) -> None:
                self._num_asked += 1
                keyed = Body()
                keyed.CopyFrom(body)
                keyed.idempotency_key = f"request-{self._num_asked}"
                door = self._doors.choices(_DOORS, _DOOR_WEIGHTS)[0]

                async def send(router: RigRouter) -> None:
                    if door == GRPC:
                        stub = stubs[router.name]
                        await call(stub, keyed, timeout_s=limit_s, mode=mode, heard=heard)
                        return
                    await call_http(
                        router.http, keyed, is_stream=door == EVENTS, timeout_s=limit_s,
                        mode=mode, heard=heard,
                    )  # fmt: skip

                await self._until_answered(routers, send, heard)

            await self.ask_on(ask)

    async def _until_answered(self, routers: Sequence[RigRouter], send: Send, heard: Heard) -> None:
        asked_at = time.monotonic()
        await send(routers[0])
        first_s, is_again = heard.first_s, heard.code in ROUTER_GONE
        if is_again:
            self.num_sent_again += 1
            heard.forget()
            lost_s = time.monotonic() - asked_at
            self.num_second_tries += 1
            try:
                await send(routers[1])
            finally:
                self.num_second_tries -= 1
            if first_s is None and heard.first_s is not None:
                first_s = lost_s + heard.first_s
        if not heard.code:
            self.seen.append(Seen(asked_at, first_s, heard.was_blind, is_again))

    def _wrong(self, index: int, heard: Heard, *, is_whole: bool) -> str:
        return difference(self._undisturbed[index], heard, is_whole=is_whole)
