"""Outputs that go to a client without its task: all of them, once, in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from services.common.errors import RequestError
from services.router.api import ChoiceDelta, ChoiceEnd, TextWriter
from services.router.output_buffer import OutputBuffer
from services.router.output_sink import LiveSink, TappedSink


class Writer:
    """A door's writing end, which may lag."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.lags = False
        self.num_written = 0

    def write_now(self, output: ChoiceDelta) -> bool:
        if self.lags:
            return False
        self.written.append(output.first_index)
        return True

    def writer(self) -> TextWriter | None:
        return self.write_text if self.written else None

    def note_written(self, num_tokens: int) -> None:
        self.num_written += num_tokens

    def write_text(self, text: str) -> bool:
        if not self.lags:
            self.written.append(len(self.written))
        return not self.lags


class Heard:
    """What a tap was told."""

    def __init__(self) -> None:
        self.deltas: list[int] = []
        self.times: list[float] = []

    def note(self, output: ChoiceDelta) -> None:
        self.deltas.append(output.first_index)

    def note_written(self, times: Sequence[float]) -> None:
        self.times += times


def delta(index: int) -> ChoiceDelta:
    return ChoiceDelta(0, index, (7,), "x")


async def test_a_closed_sink_leaves_everything_to_the_task() -> None:
    writer = Writer()
    buffer = OutputBuffer(4, LiveSink(writer))
    buffer.put([delta(0)])
    assert await buffer.take() == [delta(0)]
    assert writer.written == []


async def test_an_open_sink_takes_deltas_and_never_an_end() -> None:
    writer = Writer()
    sink = LiveSink(writer)
    sink.is_open = True
    buffer = OutputBuffer(4, sink)
    end = ChoiceEnd(0, "stop")
    buffer.put([delta(0), delta(1), end])
    assert writer.written == [0, 1]
    assert await buffer.take() == [end]


async def test_nothing_overtakes_what_waits_in_the_buffer() -> None:
    writer = Writer()
    sink = LiveSink(writer)
    sink.is_open = True
    buffer = OutputBuffer(4, sink)
    writer.lags = True
    buffer.put([delta(0)])
    writer.lags = False
    buffer.put([delta(1)])
    assert writer.written == []
    assert await buffer.take() == [delta(0), delta(1)]
    buffer.put([delta(2)])
    assert writer.written == [2]


def test_a_client_that_lags_is_cut_off_as_without_a_sink() -> None:
    writer = Writer()
    sink = LiveSink(writer)
    sink.is_open = writer.lags = True
    buffer = OutputBuffer(2, sink)
    buffer.put([delta(0), delta(1)])
    with pytest.raises(RequestError, match="more than 2 outputs"):
        buffer.put([delta(2)])


def test_a_tap_hears_of_what_was_taken_only() -> None:
    writer, heard = Writer(), Heard()
    sink = LiveSink(writer)
    tapped = TappedSink(sink, heard)
    assert not tapped.push(delta(0))
    sink.is_open = True
    assert tapped.push(delta(1))
    assert heard.deltas == [1]


def test_what_is_written_past_a_sink_is_told_to_every_tap() -> None:
    writer, inner, outer = Writer(), Heard(), Heard()
    sink = TappedSink(TappedSink(LiveSink(writer), inner), outer)
    sink.note((0.5, 0.75))
    assert writer.num_written == 2
    assert inner.times == outer.times == [0.5, 0.75]


def test_a_sink_that_is_closed_or_that_something_waits_before_gives_no_writer() -> None:
    writer = Writer()
    sink = LiveSink(writer)
    buffer = OutputBuffer(4, sink)
    assert buffer.writer() is None
    sink.is_open = True
    assert buffer.writer() is None, "a first delta is not like the others"
    buffer.put([delta(0)])
    assert buffer.writer() is not None
    writer.lags = True
    buffer.put([delta(1)])
    writer.lags = False
    assert buffer.writer() is None


@pytest.mark.parametrize("seed", range(20))
async def test_task_and_sink_together_write_every_output_once_in_order(seed: int) -> None:
    rng, writer = random.Random(seed), Writer()
    sink = LiveSink(writer)
    buffer = OutputBuffer(1000, sink)
    count = 200

    async def serve() -> None:
        while True:
            outputs = await buffer.take()
            sink.is_open = False
            for output in outputs:
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)  # the connection makes the task wait
                if not isinstance(output, ChoiceDelta):
                    return
                first = output.first_index  # a late client gets several tokens in one output
                writer.written.extend(range(first, first + len(output.token_ids)))
            sink.is_open = True

    async def produce() -> None:
        index = 0
        while index < count:
            size = rng.randrange(1, 4)
            writer.lags = rng.random() < 0.3
            buffer.put([delta(i) for i in range(index, index + size)])
            index += size
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        buffer.put([ChoiceEnd(0, "stop")])

    async with asyncio.timeout(30):
        await asyncio.gather(serve(), produce())
    assert writer.written == list(range(len(writer.written)))
    assert len(writer.written) >= count
