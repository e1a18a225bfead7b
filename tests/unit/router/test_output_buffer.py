from __future__ import annotations

import asyncio

import pytest

from services.common.errors import RequestError
from services.router.api import ChoiceDelta
from services.router.output_buffer import OutputBuffer


def chunk(index: int) -> ChoiceDelta:
    """Build a chunk."""
    return ChoiceDelta(0, index, (1,), "x")


async def test_delivers_in_order_then_the_error() -> None:
    buffer = OutputBuffer(4)
    buffer.put([chunk(0), chunk(1)])
    buffer.fail(RequestError("worker_lost", "first"))
    buffer.fail(RequestError("internal", "second"))
    assert [await buffer.get(), await buffer.get()] == [chunk(0), chunk(1)]
    with pytest.raises(RequestError, match="first"):
        await buffer.get()


async def test_waits_for_output() -> None:
    buffer = OutputBuffer(4)
    waiting = asyncio.create_task(buffer.get())
    await asyncio.sleep(0)
    buffer.put([chunk(0)])
    assert await waiting == chunk(0)


async def test_bound_is_kept() -> None:
    """RB-127: memory of a client that does not read is bounded."""
    buffer = OutputBuffer(2)
    buffer.put([chunk(0), chunk(1)])
    with pytest.raises(RequestError) as caught:
        buffer.put([chunk(2)])
    assert caught.value.spec.code == "slow_reader"
