"""One run of a request that several clients may read, each from its start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from services.common.errors import IsthmusError, RequestError
from services.router.api import RouterOutput, WriteOutputs

_READ_AT_ONCE = 16  # outputs


class SharedRun:
    """Keeps a request's outputs in a list its readers follow.

    Without a reader the run goes on for `orphan_grace_s`, so that a client whose connection
    broke can come back with the same key; then it is cancelled. The list is bounded by the
    request itself: at most n * max_tokens outputs and a few more.
    """

    def __init__(
        self,
        run: Callable[[WriteOutputs], Awaitable[None]],
        on_done: Callable[[SharedRun], None],
        orphan_grace_s: float,
    ) -> None:
        self.outputs: list[RouterOutput] = []
        self.error: IsthmusError | None = None
        self.is_done = False
        self._on_done = on_done
        self._grace_s = orphan_grace_s
        self._num_readers = 0
        self._changed = asyncio.Event()
        self._orphan_timer: asyncio.TimerHandle | None = None
        self._task = asyncio.get_running_loop().create_task(self._run(run))
        # A callback and not a `finally`: a task cancelled before its first step runs no code.
        self._task.add_done_callback(self._finish)

    async def read(self, write: WriteOutputs) -> None:
        """Write every output from the first on; raise the run's error where it ended."""
        self._num_readers += 1
        self._stop_timer()
        try:
            index = 0
            while True:
                while index < len(self.outputs):
                    outputs = self.outputs[index : index + _READ_AT_ONCE]
                    index += len(outputs)
                    await write(outputs)
                if self.is_done:
                    if self.error is not None:
                        raise _fresh(self.error)
                    return
                await self._changed.wait()
        finally:
            self._num_readers -= 1
            if not self._num_readers and not self.is_done:
                loop = asyncio.get_running_loop()
                self._orphan_timer = loop.call_later(self._grace_s, self._task.cancel)

    async def close(self) -> None:
        """Cancel the run if it still runs, and wait for its end."""
        self._stop_timer()
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self, run: Callable[[WriteOutputs], Awaitable[None]]) -> None:
        await run(self._keep)

    async def _keep(self, outputs: Sequence[RouterOutput]) -> None:
        self.outputs += outputs
        self._wake()

    def _finish(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self.error = RequestError("cancelled", "the request was cancelled")
        else:
            error = task.exception()
            if error is not None:
                # The front desk lets only IsthmusErrors out; anything else is still an end.
                internal = RequestError("internal", "internal error")
                self.error = error if isinstance(error, IsthmusError) else internal
        self.is_done = True
        self._stop_timer()
        self._wake()
        self._on_done(self)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _stop_timer(self) -> None:
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()
            self._orphan_timer = None


def _fresh(error: IsthmusError) -> IsthmusError:
    """Copy an error: one raised in several readers would gather their tracebacks."""
    return RequestError(
        error.spec.code, error.message, param=error.param, retry_after_ms=error.retry_after_ms
    )
