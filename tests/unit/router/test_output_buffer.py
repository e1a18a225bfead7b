from __future__ import annotations

import asyncio
import itertools
import sys
from dataclasses import fields, is_dataclass

import pytest

from services.common.errors import RequestError
from services.router.api import ChoiceDelta, ChoiceEnd, RouterOutput, TextLogprob
from services.router.output_buffer import JOIN_AFTER, JOINED_TOKENS, OutputBuffer, size_of
from tests.support.outputs import take


def chunk(index: int) -> ChoiceDelta:
    """Build a chunk."""
    return ChoiceDelta(0, index, (1,), "x")


async def test_delivers_in_order_then_the_error() -> None:
    buffer = OutputBuffer(4)
    buffer.put([chunk(0), chunk(1)])
    buffer.fail(RequestError("worker_lost", "first"))
    buffer.fail(RequestError("internal", "second"))
    assert await buffer.take() == [chunk(0), chunk(1)]
    with pytest.raises(RequestError, match="first"):
        await buffer.take()


async def test_waits_for_output() -> None:
    buffer = OutputBuffer(4)
    waiting = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    buffer.put([chunk(0)])
    assert await waiting == [chunk(0)]


async def test_bound_is_kept() -> None:
    """RB-127: memory of a client that does not read is bounded."""
    buffer = OutputBuffer(2)
    buffer.put([chunk(0), chunk(1)])
    with pytest.raises(RequestError) as caught:
        buffer.put([chunk(2)])
    assert caught.value.spec.code == "slow_reader"


def deep_size(value: object) -> int:
    """Return the memory of a value and all that is in it."""
    if is_dataclass(value):
        inner = [getattr(value, f.name) for f in fields(value)]
    else:
        inner = list(value) if isinstance(value, tuple) else []
    # Small ints and one-letter texts are shared by all of Python; they are counted all the same.
    return sys.getsizeof(value) + 16 + sum(deep_size(part) for part in inner)


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("num_top", [None, 0, 20])
def test_sizes_are_no_less_than_the_memory(num_tokens: int, num_top: int | None) -> None:
    top = tuple((50_000 + i, "token", b"token", -1.5) for i in range(num_top or 0))
    logprobs = tuple(TextLogprob(60_000, "token", b"token", -0.5, top) for _ in range(num_tokens))
    output = ChoiceDelta(
        0, 70_000, tuple(range(40_000, 40_000 + num_tokens)), "token" * num_tokens,
        logprobs if num_top is not None else (),
    )  # fmt: skip
    assert deep_size(output) <= size_of(output) <= 3 * deep_size(output)


async def test_bytes_are_bounded_and_given_back() -> None:
    """RB-127: outputs with many alternatives are cut off long before two thousand of them."""
    top = tuple((i, "token", b"token", -1.5) for i in range(20))
    large: RouterOutput = ChoiceDelta(0, 0, (1,), "x", (TextLogprob(1, "x", b"x", -0.5, top),))
    buffer = OutputBuffer(2048)
    for _ in range(2):  # once it was read there is room again
        num_put = await filled(buffer, large)
        assert 20 <= num_put <= 60
        assert all(output is large for output in await take(buffer, num_put))


async def filled(buffer: OutputBuffer, output: RouterOutput) -> int:
    """Put an output until it is refused; return how often it was taken."""
    num_put = 0
    try:
        while True:
            buffer.put([output])
            num_put += 1
    except RequestError as error:
        assert error.spec.code == "slow_reader"  # noqa: PT017 - the loop ends by it
    return num_put


async def test_late_clients_get_joined_outputs_and_lose_nothing() -> None:
    """RB-127: at one token a second a client may lag by thousands within the same memory."""
    buffer = OutputBuffer(2048)
    for index in range(3000):
        buffer.put([chunk(index)])
    buffer.put([ChoiceEnd(0, "length")])
    taken = await take(buffer, JOIN_AFTER + 46)
    assert taken[: JOIN_AFTER - 1] == [chunk(i) for i in range(JOIN_AFTER - 1)]
    deltas = [output for output in taken if isinstance(output, ChoiceDelta)]
    assert [d.first_index for d in deltas] == list(
        itertools.accumulate((len(d.token_ids) for d in deltas[:-1]), initial=0)
    )
    assert "".join(d.text for d in deltas) == "x" * 3000
    assert max(len(d.token_ids) for d in deltas) == JOINED_TOKENS
    assert taken[-1] == ChoiceEnd(0, "length")


async def test_choices_that_take_turns_are_joined_each_with_its_own() -> None:
    """A router that stood still hears of all choices at once, more than it has room for apart."""
    buffer = OutputBuffer(2 * 2048, max_bytes=2 * (256 << 10))
    for index in range(3000):
        for choice in range(2):
            buffer.put([ChoiceDelta(choice, index, (index,), "x")])
    buffer.put([ChoiceEnd(0, "length"), ChoiceEnd(1, "length")])
    tokens: list[list[int]] = [[], []]
    ends: list[int] = []
    while len(ends) < 2:
        for output in await buffer.take():
            if isinstance(output, ChoiceDelta):
                assert output.choice not in ends
                assert output.first_index == len(tokens[output.choice])
                tokens[output.choice] += output.token_ids
            else:
                assert isinstance(output, ChoiceEnd)
                ends.append(output.choice)
    assert tokens == [list(range(3000))] * 2


async def test_an_output_too_large_to_join_is_not_overtaken() -> None:
    buffer = OutputBuffer(2048)
    buffer.put([chunk(index) for index in range(JOIN_AFTER)])
    large = ChoiceDelta(0, JOIN_AFTER, (1,) * JOINED_TOKENS, "x" * JOINED_TOKENS)
    buffer.put([large, chunk(JOIN_AFTER + JOINED_TOKENS)])
    taken = await take(buffer, JOIN_AFTER + 2)
    assert taken[-2:] == [large, chunk(JOIN_AFTER + JOINED_TOKENS)]


async def test_logprobs_are_never_joined() -> None:
    buffer = OutputBuffer(2048)
    entry = TextLogprob(1, "x", b"x", -0.5)
    outputs: list[RouterOutput] = [ChoiceDelta(0, i, (1,), "x", (entry,)) for i in range(100)]
    for output in outputs:
        buffer.put([output])
    assert await take(buffer, len(outputs)) == outputs
