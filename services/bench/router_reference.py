"""Bare servers as yardsticks for a router: the same bytes to as many clients, and nothing else.

    python -P -m services.bench.router_reference grpc|sse|starlette NUM_FRAMES

`grpc` answers the router's own method with prepared messages; `sse` writes prepared events from a
plain asyncio protocol, `starlette` the same ones as an application of Starlette under uvicorn
does, which is what most servers of this kind are. Writes its port, runs until its input closes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from socket import socket
from typing import Literal, cast

import grpc
import grpc.aio
import uvicorn
import uvloop
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from services.pb import inference_pb2

HOST = "127.0.0.1"
Kind = Literal["grpc", "sse", "starlette"]
_SERVICE, _METHOD = "isthmus.v1.Inference", "Generate"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",'
    b'"created":1800000000,"model":"scripted","system_fingerprint":"fp_000000000000",'
    b'"choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":null}]}\n\n'
)
_CHUNK = b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT)
_LAST_EVENT = b"data: [DONE]\n\n"
_DONE = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_LAST_EVENT), _LAST_EVENT)


async def serve_grpc(num_frames: int) -> tuple[grpc.aio.Server, int]:
    """Start the echo; every request gets that many frames."""
    frame = inference_pb2.GenerateFrame(first_index=1, num_tokens=1, text="x").SerializeToString()

    async def generate(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        for _ in range(num_frames):
            yield frame

    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(generate)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),)
    )
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    return server, port


class _Events(asyncio.Protocol):
    """Answers every request with events, one each turn of the loop, as steps of a worker come."""

    def __init__(self, num_frames: int) -> None:
        self._num_frames = num_frames
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.rpartition(b"content-length: ")[2])
        if len(body) < length:
            return
        self._buffer = b""
        self._write(_HEAD)
        self._turn(self._num_frames + 1)  # the last one is the finish

    def _turn(self, left: int) -> None:
        if left == 0:
            self._write(_DONE)
            return
        self._write(_CHUNK)
        asyncio.get_running_loop().call_soon(self._turn, left - 1)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def starlette_app(num_frames: int) -> ASGIApp:
    """Answer every request with one streaming response, a chunk an event, one each turn."""

    async def events() -> AsyncIterator[bytes]:
        for _ in range(num_frames + 1):  # the last one is the finish
            yield _EVENT
            await asyncio.sleep(0)
        yield _LAST_EVENT

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        await StreamingResponse(events(), media_type="text/event-stream")(scope, receive, send)

    return app


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: it ends when its input does."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


async def _serve_starlette(num_frames: int) -> None:
    config = uvicorn.Config(
        starlette_app(num_frames), http="httptools", lifespan="off", log_level="warning"
    )
    server, listener = _Uvicorn(config), socket()
    listener.bind((HOST, 0))
    listener.listen()  # clients may come before the server has looked at it
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await _until_input_closes(listener.getsockname()[1])
    server.should_exit = True
    await serving


async def _serve_sse(num_frames: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Events(num_frames), HOST, 0)
    await _until_input_closes(server.sockets[0].getsockname()[1])


async def _serve_grpc(num_frames: int) -> None:
    echo, port = await serve_grpc(num_frames)
    await _until_input_closes(port)
    await echo.stop(0)


async def _until_input_closes(port: int) -> None:
    """Say where clients may come, and return when whoever started this needs it no more."""
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


_SERVE = {"grpc": _serve_grpc, "sse": _serve_sse, "starlette": _serve_starlette}


if __name__ == "__main__":
    uvloop.run(_SERVE[sys.argv[1]](int(sys.argv[2])))
