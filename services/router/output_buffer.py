"""The bounded buffer between a request's workers and its client."""

from __future__ import annotations

import asyncio
from collections import deque

from services.common.errors import IsthmusError, RequestError
from services.router.api import ChoiceDelta, OutputSink, RouterOutput


class OutputBuffer:
    """Outputs of one request, in order, then an end or an error. Single consumer.

    A client that falls further behind than the bound is cut off: workers never wait for it.
    """

    def __init__(self, max_outputs: int, sink: OutputSink | None = None) -> None:
        """`sink` is offered every delta before which nothing waits."""
        self._max_outputs = max_outputs
        self._sink = sink
        self._items: deque[RouterOutput] = deque()
        self._error: IsthmusError | None = None
        self._ready = asyncio.Event()

    @property
    def error(self) -> IsthmusError | None:
        """What the request failed with."""
        return self._error

    def put(self, items: list[RouterOutput]) -> None:
        """Add outputs, or give them away at once.

        Raises:
            RequestError: slow_reader, when the client lags too far behind.
        """
        if self._sink is not None and not self._items:
            items = _not_taken(items, self._sink)
            if not items:
                return
        if len(self._items) + len(items) > self._max_outputs:
            raise RequestError(
                "slow_reader", f"more than {self._max_outputs} outputs wait for the client"
            )
        self._items.extend(items)
        self._ready.set()

    def fail(self, error: IsthmusError) -> None:
        """End with an error; outputs already here are delivered first. The first error stays."""
        if self._error is None:
            self._error = error
            self._ready.set()

    def drop(self) -> None:
        """Forget what was not delivered."""
        self._items.clear()

    async def get(self) -> RouterOutput:
        """Return the next output, or raise the error once nothing is left."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        return self._items.popleft()


def _not_taken(items: list[RouterOutput], sink: OutputSink) -> list[RouterOutput]:
    """Offer outputs in order; return them from the first on that the sink does not take."""
    for index, item in enumerate(items):
        if not (isinstance(item, ChoiceDelta) and sink.push(item)):
            return items[index:]
    return []
