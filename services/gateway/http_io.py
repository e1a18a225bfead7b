"""Reading bodies within their limit, and running work no longer than its client stays."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn, Protocol

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Send

from services.common.errors import IsthmusError, RequestError
from services.gateway.errors import http_headers, openai_error
from services.gateway.input_bounds import check_body_size
from services.gateway.openai_output import dump
from services.gateway.wire_names import NO_BUFFERING

JSON_TYPE = "application/json"
CHUNK_END = b"\r\n"  # of a piece of a body whose length was not announced
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class ClientGone(Exception):
    """The client closed its connection."""


def check_body_headers(headers: Headers) -> None:
    """Refuse a body that says it is something else than JSON.

    A page in a browser may send text or a form to a port of its user's machine without being asked
    whether it may; JSON it may not.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind != JSON_TYPE:
        _refuse_header("content-type", f"must be {JSON_TYPE}")
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        _refuse_header("content-encoding", "is not supported: send the body as it is")


def _refuse_header(name: str, why: str) -> NoReturn:
    raise RequestError("invalid_argument", f"{name} {why}", param=name)


async def read_body(receive: Receive, headers: Headers, limit: int, timeout_s: float) -> bytes:
    """Read a whole body; stop at the limit, whatever content-length says."""
    declared = headers.get("content-length", "")
    if declared.isdigit():
        check_body_size(int(declared[:20]), limit)
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece: bytes = message.get("body", b"")
                size += len(piece)
                check_body_size(size, limit)
                pieces.append(piece)
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError:
        raise RequestError(
            "deadline_exceeded", f"the body did not arrive within {timeout_s:g} s"
        ) from None


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work`; cancel it when the client goes, and then raise ClientGone."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await _cancel(task)
            raise ClientGone
    finally:
        await _cancel(task)
        await _cancel(watcher)
    task.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[None]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))


class Flow(Protocol):
    """The server's flow control of one connection."""

    @property
    def write_paused(self) -> bool:
        """Whether the transport's buffer is full."""
        ...


class Connection(Protocol):
    """What the server has of one client."""

    @property
    def flow(self) -> Flow:
        """Its flow control."""
        ...

    @property
    def transport(self) -> asyncio.Transport:
        """Its transport."""
        ...


class Responder:
    """Writes one response: whole, or a started stream. Knows whether it has started."""

    def __init__(
        self,
        send: Send,
        extra_headers: Mapping[str, str],
        *,
        is_head: bool,
        connection: Connection | None = None,
    ) -> None:
        self.has_started = False
        self.connection = connection
        self._send = send
        self._extra = extra_headers
        self._is_head = is_head

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Send these too, with whatever answer comes."""
        self._extra = {**self._extra, **headers}

    async def whole(
        self,
        status: int,
        body: bytes,
        content_type: str = JSON_TYPE,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a complete response."""
        await self._start(
            status,
            {"content-type": content_type, "content-length": str(len(body)), **(headers or {})},
        )
        await self._send(_body(b"" if self._is_head else body, more=False))

    async def error(self, error: IsthmusError, headers: Mapping[str, str] | None = None) -> None:
        """Send an error object as a complete response."""
        await self.whole(
            error.spec.http_status,
            dump(openai_error(error)),
            headers={**http_headers(error), **(headers or {})},
        )

    async def start_events(self) -> None:
        """Begin a stream of server-sent events."""
        await self._start(
            200,
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                NO_BUFFERING.name: "no",
            },
        )

    async def events(self, data: bytes) -> None:
        """Send events of a started stream."""
        await self._send(_body(data, more=True))

    def transport_now(self) -> asyncio.Transport | None:
        """Give what a started stream's events may be written to as `chunk`; None = not now.

        Past the server, whose way there costs more than the rest of a token. A stream of events
        has no length, so the server has said that its body comes in chunks.
        """
        connection = self.connection
        if connection is None or connection.flow.write_paused:
            return None
        transport = connection.transport
        return None if transport.is_closing() else transport

    async def end_events(self, data: bytes = b"") -> None:
        """Send the last events and end the stream."""
        await self._send(_body(data, more=False))

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.has_started = True
        raw = [(k.encode(), v.encode("latin-1", "replace")) for k, v in headers.items()]
        raw += [(k.encode(), v.encode("latin-1", "replace")) for k, v in self._extra.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


def chunk(data: bytes) -> bytes:
    """Frame a piece of a body whose length was not announced."""
    return chunk_head(len(data)) + data + CHUNK_END


def chunk_head(size: int) -> bytes:
    """Write what stands before a piece of that many bytes."""
    return b"%x\r\n" % size


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def traceparent_of(value: str) -> str:
    """Give a W3C traceparent if it is one, else nothing."""
    return value if _TRACEPARENT.fullmatch(value) else ""
