"""The bounded buffer between a request's workers and its client."""

from __future__ import annotations

import asyncio
from collections import deque

from services.common.errors import IsthmusError, RequestError
from services.router.api import ChoiceDelta, OutputSink, RouterOutput, TextWriter

JOIN_AFTER = 64  # outputs that wait: the client is late anyway, so further ones share a frame
JOINED_TOKENS = 64  # in such a frame
TAKE_AT_MOST = 16  # outputs in the hands of who writes them, beyond the bounds of the buffer
JOIN_BACK = 16  # outputs looked at for the newest of a choice: as many as choices

_OUTPUT_BYTES = 360  # of an output's objects, without what is in them
_TOKEN_BYTES = 56
_LOGPROB_BYTES = 400
_TOP_BYTES = 360  # of each alternative


def size_of(output: RouterOutput) -> int:
    """Estimate the memory of an output that waits; never less than it takes."""
    if not isinstance(output, ChoiceDelta):
        return _OUTPUT_BYTES
    size = _OUTPUT_BYTES + _TOKEN_BYTES * len(output.token_ids) + 4 * len(output.text)
    for entry in output.logprobs:
        size += _LOGPROB_BYTES + _TOP_BYTES * len(entry.top)
    return size


class OutputBuffer:
    """Outputs of one request, in order, then an end or an error. Single consumer.

    A client that falls further behind than the bounds is cut off: workers never wait for it.
    """

    def __init__(
        self, max_outputs: int, sink: OutputSink | None = None, max_bytes: int = 256 << 10
    ) -> None:
        """`sink` is offered every delta before which nothing waits."""
        self._max_outputs = max_outputs
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self.sink = sink
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
        if self.sink is not None and not self._items:
            items = _not_taken(items, self.sink)
            if not items:
                return
        if len(self._items) >= JOIN_AFTER:
            items = self._joined(items)
        if len(self._items) + len(items) > self._max_outputs:
            raise RequestError(
                "slow_reader", f"more than {self._max_outputs} outputs wait for the client"
            )
        size_bytes = self._size_bytes + sum(size_of(item) for item in items)
        if size_bytes > self._max_bytes and self._items:
            raise RequestError(
                "slow_reader", f"more than {self._max_bytes} bytes wait for the client"
            )
        self._size_bytes = size_bytes
        self._items.extend(items)
        self._ready.set()

    def writer(self) -> TextWriter | None:
        """Give the sink's writer if nothing waits that it could overtake."""
        return None if self.sink is None or self._items else self.sink.writer()

    def _joined(self, items: list[RouterOutput]) -> list[RouterOutput]:
        """Put what goes into the last outputs of the same choices; return the others in order."""
        left: list[RouterOutput] = []
        overtaken: set[int] = set()  # choices whose outputs may not go before one that is left
        for item in items:
            if not isinstance(item, ChoiceDelta):
                left.append(item)
            elif item.choice in overtaken or not self._join_one(item):
                overtaken.add(item.choice)
                left.append(item)
        return left

    def _join_one(self, item: ChoiceDelta) -> bool:
        """Join an output with the newest of its choice, near the end; choices take turns there."""
        for back in range(1, min(len(self._items), JOIN_BACK) + 1):
            last = self._items[-back]
            if not isinstance(last, ChoiceDelta) or last.choice != item.choice:
                continue
            joined = _join(last, item)
            if joined is None:
                return False
            self._size_bytes += size_of(joined) - size_of(last)
            self._items[-back] = joined
            return True
        return False

    def fail(self, error: IsthmusError) -> None:
        """End with an error; outputs already here are delivered first. The first error stays."""
        if self._error is None:
            self._error = error
            self._ready.set()

    def drop(self) -> None:
        """Forget what was not delivered."""
        self._items.clear()
        self._size_bytes = 0

    async def take(self) -> list[RouterOutput]:
        """Return the next outputs, or raise the error once nothing is left."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        count = min(len(self._items), TAKE_AT_MOST)
        taken = [self._items.popleft() for _ in range(count)]
        self._size_bytes -= sum(map(size_of, taken))
        return taken


def _not_taken(items: list[RouterOutput], sink: OutputSink) -> list[RouterOutput]:
    """Offer outputs in order; return them from the first on that the sink does not take."""
    for index, item in enumerate(items):
        if not (isinstance(item, ChoiceDelta) and sink.push(item)):
            return items[index:]
    return []


def _join(last: ChoiceDelta, more: ChoiceDelta) -> ChoiceDelta | None:
    """Return one output in place of two of the same choice; None where it must be two."""
    if last.logprobs or more.logprobs:
        return None
    token_ids = last.token_ids + more.token_ids
    if len(token_ids) > JOINED_TOKENS:
        return None
    return ChoiceDelta(last.choice, last.first_index, token_ids, last.text + more.text)
