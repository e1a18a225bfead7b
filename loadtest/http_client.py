"""HTTP/1.1 as a load test needs it: every byte is stamped when its loop turn reads it.

No redirects are followed and no proxies asked: either would hide who answered.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import httptools

MAX_KEPT_BYTES = 1 << 20  # of a body that is kept whole
_MAX_HEADER_BYTES = 64 << 10
_MAX_IDLE = 1_024

TakeBody: TypeAlias = Callable[[bytes], None]
"""Takes a piece of a streamed body in the moment it comes; must not wait or raise."""


class BadAnswer(Exception):
    """What came is no HTTP answer, or broke off."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Answer:
    """One answer; `body` stays empty where it was given to a taker piece by piece."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    is_stream: bool = False  # events of a request that went well
    may_go_on: bool = False  # the connection can be used again
    retries: int = 0

    @property
    def content_type(self) -> str:
        """The type without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class Connection(asyncio.Protocol):
    """One connection and the one exchange it has at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer = Answer()
        self._take: TakeBody | None = None
        self._ended: asyncio.Future[Answer] | None = None
        self._header_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether another exchange may begin."""
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, take: TakeBody) -> Answer:
        """Send a request and wait for the end of its answer.

        Args:
            take: given the body's pieces if it is a stream of events; another body is kept.

        Raises:
            BadAnswer: no whole answer came.
        """
        assert self._transport is not None
        assert self._ended is None
        self._answer, self._take, self._header_bytes = Answer(), take, 0
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._ended
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._ended = None

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse what came; a body's pieces go to their taker from here."""
        if self._parser is None or self._ended is None:
            self.close()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail_with(error.__context__ or error)  # a fault of ours, not of the server
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("not_http", "the answer is not HTTP/1.1")

    def connection_lost(self, error: Exception | None) -> None:
        """End an answer that has no length, and fail one that is not whole."""
        answer = self._answer
        if self._ended is not None and not self._ended.done():
            if not answer.status:
                self._fail("connection_closed", "the server closed the connection unanswered")
            elif "content-length" in answer.headers or "transfer-encoding" in answer.headers:
                self._fail("broken_stream", "the connection broke in the middle of an answer")
            else:
                self._ended.set_result(answer)

    # -- httptools -------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MAX_HEADER_BYTES:
            self._fail("not_http", "the headers of the answer are too long")
            return
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Decide what becomes of the body."""
        assert self._parser is not None
        answer = self._answer
        answer.status = self._parser.get_status_code()
        answer.is_stream = answer.status == 200 and answer.content_type == "text/event-stream"

    def on_body(self, body: bytes) -> None:
        """Give on a piece, or keep it."""
        answer = self._answer
        if answer.is_stream:
            assert self._take is not None
            self._take(body)
        elif len(answer.body) + len(body) <= MAX_KEPT_BYTES:
            answer.body += body
        else:
            self._fail("answer_too_large", "a body that is no stream is larger than 1 MiB")

    def on_message_complete(self) -> None:
        """Hand the answer over."""
        assert self._parser is not None
        if self._answer.status < 200:  # interim: the answer is still to come
            self._answer = Answer()
            return
        self._answer.may_go_on = self._parser.should_keep_alive()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(self._answer)

    def _fail(self, code: str, message: str) -> None:
        self._fail_with(BadAnswer(code, message))

    def _fail_with(self, error: BaseException) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
        self.close()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server is."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


class Pool:
    """Connections to one server: as many as there are exchanges, and idle ones used again."""

    def __init__(self, origin: Origin, connect_timeout_s: float) -> None:
        self._origin = origin
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[Connection] = deque()

    async def exchange(self, request: bytes, take: TakeBody) -> Answer:
        """Run one exchange; BadAnswer when no whole answer came.

        A server may close an idle connection in the instant it is used again: only then, when it
        has not answered at all, the request is sent once more.
        """
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._run(connection, request, take)
            except BadAnswer as error:
                if error.code != "connection_closed":
                    raise
        answer = await self._run(await self._connect(), request, take)
        answer.retries = int(connection is not None)
        return answer

    def close(self) -> None:
        """Drop idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _run(self, connection: Connection, request: bytes, take: TakeBody) -> Answer:
        answer = await connection.exchange(request, take)
        if answer.may_go_on and connection.is_open and len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()  # the last used: the least likely to be closed soon
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> Connection:
        origin, loop = self._origin, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    Connection,
                    origin.host,
                    origin.port,
                    ssl=origin.tls,
                    server_hostname=origin.host if origin.tls else None,
                )
        except TimeoutError:
            raise BadAnswer("connect_timeout", "no connection within the time") from None
        except ssl.SSLError as error:
            raise BadAnswer("tls_failed", f"TLS failed: {error.reason}") from None
        except OSError as error:
            raise BadAnswer("connect_failed", f"no connection: {error.strerror or error}") from None
        return connection
