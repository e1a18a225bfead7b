"""uvicorn's HTTP protocol with bounds on the request head: size, and time to send it."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.errors import RequestError
from services.gateway.config import GatewayConfig
from services.gateway.errors import openai_error
from services.gateway.openai_output import dump

CONNECTION_KEY = "isthmus.connection"  # in the scope: the protocol, with flow and transport

_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class BoundedProtocol(HttpToolsProtocol):
    """Refuses connections over the limit, and heads that are too large, too slow or broken."""

    max_head_bytes = 32 << 10
    head_timeout_s = 30.0
    max_connections = 10_000
    max_age_s = 1800.0
    chance = random.Random()

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # uvicorn's own arguments
        super().__init__(*args, **kwargs)
        self._old_at = 0.0
        self._head_bytes = 0
        self._is_in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's type
        """Start the clock on the first head."""
        super().connection_made(transport)
        # Apart, so that not all clients of a router that has just started come anew at once.
        self._old_at = self.loop.time() + self.max_age_s * self.chance.uniform(0.9, 1.1)
        self._start_timer()
        if len(self.connections) > self.max_connections:
            error = RequestError("overloaded", f"more than {self.max_connections} connections")
            self._refuse(b"429 Too Many Requests", error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, then look whether a head is still open and how large it is."""
        if not self._head_bytes:
            data = _stay_with_http_1(data)
        self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > self.max_head_bytes:
            message = f"the request head is larger than {self.max_head_bytes} bytes"
            self._refuse(
                b"431 Request Header Fields Too Large", RequestError("body_too_large", message)
            )

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP."""
        self._refuse(b"400 Bad Request", RequestError("invalid_argument", "not an HTTP request"))

    def on_message_begin(self) -> None:
        """A new head begins."""
        self._is_in_head = True
        if self._head_timer is None:
            self._start_timer()
        super().on_message_begin()
        # uvicorn's own type of scope knows no other keys.
        cast("dict[str, object]", self.scope)[CONNECTION_KEY] = self

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if self.loop.time() > self._old_at:
            # The answer says so, and the client's next connection may find a newer router.
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """The next bytes belong to another head."""
        self._head_bytes = 0
        super().on_message_complete()

    def _refuse(self, status: bytes, error: RequestError) -> None:
        if not self.transport.is_closing():
            self.transport.write(_response(status, dump(openai_error(error))))
            self.transport.close()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


def _stay_with_http_1(data: bytes) -> bytes:
    """Hide an offer of another protocol, which a server may ignore.

    Java's client makes one with every request, and the parser would take the body for the start
    of that protocol.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return (
        _UPGRADE.sub(b"\r\nx-not-upgraded:", head) + end + rest if _UPGRADE.search(head) else data
    )


def bounded_protocol(config: GatewayConfig) -> type[asyncio.Protocol]:
    """Make the protocol class for these bounds."""

    class Bounded(BoundedProtocol):
        max_head_bytes = config.max_http_head_bytes
        head_timeout_s = config.http_head_timeout_s
        max_connections = config.max_http_connections
        max_age_s = config.max_connection_age_s

    return Bounded


def _response(status: bytes, body: bytes) -> bytes:
    head = (
        b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body))
    )
    return head + body
