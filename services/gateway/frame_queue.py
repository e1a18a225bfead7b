"""Frames of one answer that a task of their own writes: who has a new one need not wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from services.pb import inference_pb2

MAX_FRAMES = 64  # beyond, the client lags, and the router's buffer bounds what waits for it


class FrameQueue:
    """Writes frames one after another. Belongs to one call, and ends with it."""

    def __init__(self, write: Callable[[inference_pb2.GenerateFrame], Awaitable[None]]) -> None:
        self._write = write
        self._frames: deque[inference_pb2.GenerateFrame] = deque()
        self._ready = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._task: asyncio.Task[None] | None = None  # made for the first frame

    def put(self, frame: inference_pb2.GenerateFrame) -> bool:
        """Have a frame written; False when too many wait, or the call is gone."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="frames")
        elif len(self._frames) >= MAX_FRAMES or self._task.done():
            return False
        self._frames.append(frame)
        self._drained.clear()
        self._ready.set()
        return True

    def take_back(self) -> inference_pb2.GenerateFrame | None:
        """Give back the last frame if nobody has begun to write it, so that more can be added."""
        return self._frames.pop() if self._frames else None

    async def drained(self) -> None:
        """Wait until nothing is being written; the caller bounds the wait."""
        await self._drained.wait()

    def close(self) -> None:
        """Write nothing more."""
        task = self._task
        if task is None:
            return
        if not task.done():
            task.cancel()
        elif not task.cancelled():
            task.exception()  # seen: where there is one the call is gone

    async def _run(self) -> None:
        try:
            while True:
                while self._frames:
                    await self._write(self._frames.popleft())
                self._drained.set()
                self._ready.clear()
                await self._ready.wait()
        finally:
            self._drained.set()
