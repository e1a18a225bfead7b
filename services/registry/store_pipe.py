"""One connection to the store for an event loop: calls go out as they come, answers come in order.

The redis package takes a connection of a pool, packs in Python and sets up its own time limits for
every call; a router makes two calls a request. Here a call is a write and a future.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import hiredis
from redis.connection import SSLConnection, parse_url
from redis.exceptions import ConnectionError as StoreConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from services.registry.scripts import Arg

CONNECT_TIMEOUT_S = 1.0
# A store that owes an answer for so long is frozen, or the connection leads nowhere any more.
SILENT_S = 0.5
MAX_UNANSWERED = 4096  # calls on their way; beyond, they would wait longer than anyone waits
_DEFAULT_PORT = 6379

_Packable = tuple[str | int | float | bytes | memoryview]  # hiredis means a tuple of any length
# Any: answers are whatever the store says; who asked checks them.
Answer = asyncio.Future[Any]


class StorePipe:
    """Connects when first needed, and again after a fault. The caller bounds each wait.

    A caller that goes away costs nothing: its answer is dropped when it comes.
    """

    def __init__(self, url: str, ca_file: str = "") -> None:
        """Prepare; nothing is connected yet. `url` may hold a password."""
        self._url = url
        self._ca_file = ca_file
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[_Wire] | None = None

    async def call(self, *words: Arg) -> object:
        """Send one command and return its answer. Raises RedisError, OSError."""
        wire = self._wire
        if wire is None or not wire.is_usable():
            wire = await self._connected()
        return await wire.ask(words)

    async def close(self) -> None:
        """End the connection; calls under way fail."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait((self._connecting,))
        if self._wire is not None:
            self._wire.abort()

    async def _connected(self) -> _Wire:
        """Wait for the attempt under way, whoever began it; one caller's end must not end it."""
        if self._connecting is None:
            if self._wire is not None:
                self._wire.abort()
            self._connecting = asyncio.create_task(self._connect(), name="store-connect")
            self._connecting.add_done_callback(self._attempted)
        return await asyncio.shield(self._connecting)

    def _attempted(self, attempt: asyncio.Task[_Wire]) -> None:
        self._connecting = None
        if not attempt.cancelled() and attempt.exception() is None:
            self._wire = attempt.result()

    async def _connect(self) -> _Wire:
        parse: Any = parse_url  # not typed in the redis package
        options: dict[str, Any] = parse(self._url)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            wire = await self._open(loop, options)
            try:
                if options.get("password"):
                    user = (options["username"],) if options.get("username") else ()
                    await wire.ask(("AUTH", *user, options["password"]))
                if options.get("db"):
                    await wire.ask(("SELECT", options["db"]))
            except BaseException:
                wire.abort()
                raise
        return wire

    async def _open(self, loop: asyncio.AbstractEventLoop, options: dict[str, Any]) -> _Wire:
        def make() -> _Wire:
            return _Wire(loop.time)

        if "path" in options:
            return (await loop.create_unix_connection(make, options["path"]))[1]
        host, port = options.get("host", "localhost"), options.get("port", _DEFAULT_PORT)
        tls: ssl.SSLContext | None = None
        if options.get("connection_class") is SSLConnection:
            tls = ssl.create_default_context(cafile=self._ca_file or None)
        return (await loop.create_connection(make, host, port, ssl=tls))[1]


class _Wire(asyncio.Protocol):
    """One connection: what was asked last is answered last."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader(protocolError=StoreConnectionError, replyError=_error_answer)
        self._unanswered: deque[Answer] = deque()
        self._waits_since = 0.0  # for the answer that is due next

    def is_usable(self) -> bool:
        """Say whether it is open and the store answers."""
        if self._transport is None or self._transport.is_closing():
            return False
        return not self._unanswered or self._now() - self._waits_since < SILENT_S

    def ask(self, words: tuple[Arg, ...]) -> Answer:
        """Send a command; the future gets the answer, or the error it is."""
        if self._transport is None or self._transport.is_closing():
            raise StoreConnectionError("the connection is closed")
        if len(self._unanswered) >= MAX_UNANSWERED:
            raise StoreConnectionError(f"{MAX_UNANSWERED} calls wait for their answers")
        if not self._unanswered:
            self._waits_since = self._now()
        answer: Answer = asyncio.get_running_loop().create_future()
        self._unanswered.append(answer)
        self._transport.write(hiredis.pack_command(cast("_Packable", words)))
        return answer

    def abort(self) -> None:
        """Close at once; who waits for an answer learns of it."""
        if self._transport is not None:
            self._transport.abort()
        self._fail(StoreConnectionError("the connection was closed"))

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; uvloop's transport is no subclass of asyncio's."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Give every complete answer to who waits for it."""
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:  # no answer of RESP2 is False
                self._give(reply)
        except RedisError as error:  # what came is not the protocol
            if self._transport is not None:
                self._transport.abort()
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell who waits."""
        self._fail(StoreConnectionError("the store closed the connection"))

    def _give(self, reply: object) -> None:
        if not self._unanswered:
            raise StoreConnectionError("an answer to nothing")
        answer = self._unanswered.popleft()
        self._waits_since = self._now()
        if answer.done():
            return  # its caller has gone
        if isinstance(reply, Exception):
            answer.set_exception(reply)
        else:
            answer.set_result(reply)

    def _fail(self, error: Exception) -> None:
        while self._unanswered:
            answer = self._unanswered.popleft()
            if not answer.done():
                answer.set_exception(error)


def _error_answer(message: str) -> Exception:
    if message.startswith("NOSCRIPT"):
        return NoScriptError(message)
    return ResponseError(message)
