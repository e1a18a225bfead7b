"""A request's outputs one by one, for tests that look at each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from services.router.api import RouterOutput, WriteOutputs
from services.router.output_buffer import OutputBuffer


async def outputs_of(
    run: Callable[[WriteOutputs], Awaitable[None]],
) -> AsyncGenerator[RouterOutput, None]:
    """Give what `run` writes; it goes on when the next is asked for, and ends with who asks.

    Raises:
        BaseException: whatever `run` ended with, after its outputs.
    """
    written: asyncio.Queue[Sequence[RouterOutput]] = asyncio.Queue()

    async def write(outputs: Sequence[RouterOutput]) -> None:
        written.put_nowait(outputs)
        await written.join()

    task = asyncio.ensure_future(run(write))
    try:
        while not (task.done() and written.empty()):
            getter = asyncio.create_task(written.get())
            await asyncio.wait((getter, task), return_when=asyncio.FIRST_COMPLETED)
            if not getter.done():
                getter.cancel()
                continue
            for output in getter.result():
                yield output
            written.task_done()
        task.result()
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def collect(run: Callable[[WriteOutputs], Awaitable[None]]) -> list[RouterOutput]:
    """Return all that `run` writes."""
    outputs: list[RouterOutput] = []

    async def write(more: Sequence[RouterOutput]) -> None:
        outputs.extend(more)
        await asyncio.sleep(0)  # as a connection does

    await run(write)
    return outputs


async def take(buffer: OutputBuffer, count: int) -> list[RouterOutput]:
    """Take that many outputs that are there."""
    outputs: list[RouterOutput] = []
    while len(outputs) < count:
        outputs += await buffer.take()
    return outputs
