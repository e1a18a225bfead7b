"""One run, several readers."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from services.common.errors import RequestError
from services.gateway.shared_run import SharedRun
from services.router.api import ChoiceDelta, RequestEnd, RouterOutput, WriteOutputs
from tests.support.outputs import collect, outputs_of

OUTPUTS: list[RouterOutput] = [ChoiceDelta(0, i, (i,), str(i)) for i in range(3)]
OUTPUTS.append(RequestEnd(1, 0, 3))


class Source:
    def __init__(self, error: Exception | None = None) -> None:
        self.gate = asyncio.Event()
        self.error = error
        self.is_closed = False

    async def run(self, write: WriteOutputs) -> None:
        try:
            await write(OUTPUTS[:1])
            await self.gate.wait()
            await write(OUTPUTS[1:])
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


async def test_early_and_late_readers_get_everything_once() -> None:
    done: list[SharedRun] = []
    source = Source()
    run = SharedRun(source.run, done.append, 0.0)
    readers = [asyncio.create_task(collect(run.read)) for _ in range(3)]
    await asyncio.sleep(0)
    source.gate.set()
    assert [await reader for reader in readers] == [OUTPUTS] * 3
    assert await collect(run.read) == OUTPUTS
    assert done == [run]


async def test_every_reader_gets_the_error_after_the_outputs() -> None:
    source = Source(RequestError("worker_lost", "died", param="p", retry_after_ms=5))
    source.gate.set()
    run = SharedRun(source.run, lambda _: None, 0.0)
    for _ in range(2):
        seen = []
        with pytest.raises(RequestError) as caught:  # noqa: PT012 - the outputs come first
            async for output in outputs_of(run.read):
                seen.append(output)  # noqa: PERF401 - the outputs before the error count
        assert seen == OUTPUTS
        error = caught.value
        assert (error.spec.code, error.param, error.retry_after_ms) == ("worker_lost", "p", 5)
        assert error is not source.error


async def test_run_without_readers_is_cancelled_after_the_grace() -> None:
    done = asyncio.Event()
    source = Source()
    run = SharedRun(source.run, lambda _: done.set(), 0.01)
    async with contextlib.aclosing(outputs_of(run.read)) as reader:
        assert await anext(reader) == OUTPUTS[0]
    await asyncio.wait_for(done.wait(), 5)
    assert source.is_closed
    assert run.error is not None
    assert run.error.spec.code == "cancelled"


async def test_reader_that_comes_back_in_time_keeps_it_running() -> None:
    source = Source()
    run = SharedRun(source.run, lambda _: None, 5.0)
    async with contextlib.aclosing(outputs_of(run.read)) as reader:
        await anext(reader)
    source.gate.set()
    assert await collect(run.read) == OUTPUTS


async def test_run_closed_before_its_first_step_still_ends() -> None:
    done: list[SharedRun] = []
    run = SharedRun(Source().run, done.append, 1.0)
    await run.close()
    await asyncio.sleep(0)
    assert done == [run]
    assert run.is_done
