"""Real engine and transfer threads on pools that are much too small, over a slow link."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from services.common.sampling import SamplingParams
from services.transfer.config import TransferConfig
from tests.support.cluster import eventually
from tests.support.engine_rig import prompt_of
from tests.support.fake_model import reference_tokens
from tests.support.tiny_workers import Heard, TinyWorker
from tests.support.transfer_ends import CALM, with_planes

pytestmark = pytest.mark.integration

ENDS_WITHIN_S = 60.0
MAX_ROUNDS = 8
PAUSE_S = 0.012  # for each block
PAUSE_BEFORE_REST_S = 5.0  # on top of a lease, for a busy machine


def _after_a_pause(call: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(PAUSE_S)
        return call(*args, **kwargs)

    return slow


def slow_reader(monkeypatch: pytest.MonkeyPatch, decode: TinyWorker) -> None:
    """Copy one block at a time, with a pause before each."""
    intake = decode.sink._intake
    monkeypatch.setattr(intake, "_pulls_a_step", 1)
    for name in ("pull", "receive"):
        slow = _after_a_pause(getattr(intake._writer, name))
        monkeypatch.setattr(intake._writer, name, slow)


def slow_sender(monkeypatch: pytest.MonkeyPatch, prefill: TinyWorker) -> None:
    """Take a while over every announcement and every DATA message."""
    for name in ("_sealed", "_send_data"):
        slow = _after_a_pause(getattr(prefill.source, name))
        monkeypatch.setattr(prefill.source, name, slow)


async def _answer(
    workers: tuple[TinyWorker, TinyWorker],
    request: int,
    prompt: npt.NDArray[np.uint32],
    max_tokens: int,
    patience_s: float,
    priority: int,
) -> tuple[str, list[int]]:
    """Hand a request off as a router does; give up after a while. Return its end and tokens."""
    prefill, decode = workers
    first = prefill.send(request, prompt, max_tokens, "prefill", priority=priority)
    legs = [first]
    try:
        async with asyncio.timeout(patience_s):
            either: set[asyncio.Future[Any]] = {first.ticket, first.end}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if first.ticket.done():
                ticket = first.ticket.result()
                legs.append(
                    decode.send(request, prompt, max_tokens, "continue", ticket, priority=priority)
                )
                await asyncio.shield(legs[-1].end)
            end = await asyncio.shield(first.end)
    except TimeoutError:
        prefill.cancel(request)
        decode.cancel(request)
        end = "cancelled"
    code = end or (legs[-1].end.result() if legs[-1].end.done() else "cancelled")
    return code, _tokens(legs)


def _tokens(legs: list[Heard]) -> list[int]:
    tokens: dict[int, int] = {}
    for heard in legs:
        for index, token in heard.tokens.get(0, {}).items():
            assert tokens.setdefault(index, token) == token, "two workers disagree"
    assert sorted(tokens) == list(range(len(tokens)))
    return [tokens[index] for index in range(len(tokens))]


async def _crowd(worker: TinyWorker, base: int, rng: random.Random, count: int) -> None:
    """Local requests in between: they evict, share prefixes and, of higher priority, preempt."""
    for number in range(count):
        prompt, max_tokens = (
            prompt_of(rng.randrange(20, 90), rng.randrange(6)),
            rng.randrange(1, 30),
        )
        heard = worker.send(base + number, prompt, max_tokens, priority=rng.randrange(3))
        await asyncio.sleep(rng.random() * 0.03)
        if number % 3 == 0:
            assert await heard.end == ""
            expected = reference_tokens(prompt, _greedy(max_tokens))
            assert _tokens([heard]) == expected


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


async def _load(
    workers: tuple[TinyWorker, TinyWorker], number: int, num_requests: int
) -> list[str]:
    """Send handoffs and local requests at once; every answer must be the single worker's."""
    prefill, decode = workers
    asks = []
    rng, base = random.Random(number), 10_000 * number
    for request in range(base + 1, base + num_requests + 1):
        prompt = prompt_of(100, rng.randrange(4))[: rng.randrange(30, 101)]
        max_tokens = rng.randrange(2, 40)
        patience_s = rng.choice([0.02, 0.2, ENDS_WITHIN_S, ENDS_WITHIN_S, ENDS_WITHIN_S])
        answer = _answer(workers, request, prompt, max_tokens, patience_s, rng.randrange(2))
        asks.append((prompt, max_tokens, asyncio.ensure_future(answer)))
    crowds = [_crowd(worker, base + 1000, random.Random(number), 24) for worker in workers]
    async with asyncio.timeout(ENDS_WITHIN_S):
        await asyncio.gather(*crowds, *(ask for _, _, ask in asks))
    codes = []
    for prompt, max_tokens, ask in asks:
        code, tokens = ask.result()
        expected = reference_tokens(prompt, _greedy(max_tokens))
        assert tokens == (expected if not code else expected[: len(tokens)])
        codes.append(code)
    await eventually(
        lambda: prefill.is_at_rest() and decode.is_at_rest(), CALM.lease_s + PAUSE_BEFORE_REST_S
    )
    return codes


@pytest.mark.parametrize("plane", ["memfd", "zmq"])
@pytest.mark.parametrize("slow_side", ["reader", "sender"])
async def test_tiny_pools_over_a_slow_link(
    plane: str, slow_side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RB-001, RB-010, RB-013, RB-014, RB-085: right answers, and every block comes back."""
    config: TransferConfig = with_planes(CALM, plane)
    prefill = TinyWorker("prefill-0", 13, config, tmp_path / "p")
    decode = TinyWorker("decode-0", 12, config, tmp_path / "d")
    if slow_side == "reader":
        slow_reader(monkeypatch, decode)
    else:
        slow_sender(monkeypatch, prefill)
    try:
        prefill.start()
        decode.start()
        codes: list[str] = []
        for number in range(MAX_ROUNDS):
            codes += await _load((prefill, decode), number, 30)
            if _was_pressed(prefill, decode):
                break
    finally:
        await asyncio.to_thread(decode.stop)
        await asyncio.to_thread(prefill.stop)
    for worker in (prefill, decode):
        worker.assert_at_rest()
    assert set(codes) <= {"", "cancelled"}
    assert codes.count("") >= 15
    # The pressure was there: else all this proves nothing.
    assert prefill.source.counters.released.get("done", 0) >= 10
    assert _was_pressed(prefill, decode)


def _was_pressed(prefill: TinyWorker, decode: TinyWorker) -> bool:
    """Tell whether somebody was preempted and blocks were unpinned under a transfer."""
    preemptions = prefill.scheduler.stats.preemptions + decode.scheduler.stats.preemptions
    return preemptions > 0 and prefill.source.counters.unpinned > 0
