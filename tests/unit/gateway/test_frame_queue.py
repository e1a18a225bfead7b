"""The task that writes frames: all of them, in order, within its bound, and never too late."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.frame_queue import MAX_FRAMES, FrameQueue
from services.pb import inference_pb2


class Call:
    """A call whose writes end when the test says so."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.may_write = asyncio.Semaphore(0)
        self.fault: Exception | None = None

    async def write(self, frame: inference_pb2.GenerateFrame) -> None:
        await self.may_write.acquire()
        if self.fault is not None:
            raise self.fault
        self.written.append(frame.text)


def frame(text: str) -> inference_pb2.GenerateFrame:
    return inference_pb2.GenerateFrame(text=text)


async def turns(count: int = 5) -> None:
    """Let tasks run that have something to do."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_frames_are_written_in_order_and_drained_says_when() -> None:
    call = Call()
    queue = FrameQueue(call.write)
    assert all(queue.put(frame(text)) for text in "abc")
    waiting = asyncio.create_task(queue.drained())
    for _ in range(2):
        call.may_write.release()
    await turns()
    assert (call.written, waiting.done()) == (["a", "b"], False)
    call.may_write.release()
    await waiting
    assert call.written == ["a", "b", "c"]
    queue.close()


async def test_the_last_frame_can_be_had_back_until_it_is_being_written() -> None:
    call = Call()
    queue = FrameQueue(call.write)
    queue.put(frame("a"))
    queue.put(frame("b"))
    await turns()
    last = queue.take_back()
    assert last is not None
    assert last.text == "b"
    assert queue.take_back() is None  # a write of the first has begun
    call.may_write.release()
    await queue.drained()
    assert call.written == ["a"]
    queue.close()


async def test_drained_ends_though_all_was_taken_back() -> None:
    call = Call()
    queue = FrameQueue(call.write)
    queue.put(frame("a"))
    assert queue.take_back() is not None
    await queue.drained()
    queue.close()


async def test_no_more_frames_wait_than_its_bound() -> None:
    call = Call()
    queue = FrameQueue(call.write)
    assert all(queue.put(frame("x")) for _ in range(MAX_FRAMES))
    assert not queue.put(frame("y"))
    call.may_write.release()
    await turns()
    assert queue.put(frame("y"))
    queue.close()


async def test_a_call_that_is_gone_takes_nothing_and_keeps_nobody_waiting() -> None:
    call = Call()
    queue = FrameQueue(call.write)
    call.fault = ValueError("gone")
    queue.put(frame("a"))
    call.may_write.release()
    await queue.drained()
    await turns()
    assert not queue.put(frame("b"))
    queue.close()


async def test_nothing_is_written_once_it_is_closed() -> None:
    call = Call()
    queue = FrameQueue(call.write)
    queue.close()  # before anything was
    queue.put(frame("a"))
    queue.close()
    call.may_write.release()
    await turns()
    assert call.written == []


@pytest.mark.parametrize("num_frames", [0, 1])
async def test_drained_does_not_wait_for_a_queue_that_is_empty(num_frames: int) -> None:
    call = Call()
    queue = FrameQueue(call.write)
    for _ in range(num_frames):
        queue.put(frame("a"))
        call.may_write.release()
    await queue.drained()
    assert len(call.written) == num_frames
    queue.close()
