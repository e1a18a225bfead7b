"""Bare servers as yardsticks for a router: the same bytes to as many clients, and nothing else.

    python -P -m services.bench.router_reference grpc|sse NUM_FRAMES

`grpc` answers the router's own method with prepared messages; `sse` writes prepared events from a
plain asyncio protocol. Writes its port, runs until its input closes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import cast

import grpc
import grpc.aio
import uvloop

from services.pb import inference_pb2

HOST = "127.0.0.1"
_SERVICE, _METHOD = "isthmus.v1.Inference", "Generate"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",'
    b'"created":1800000000,"model":"scripted","system_fingerprint":"fp_000000000000",'
    b'"choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":null}]}\n\n'
)
_CHUNK = b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT)
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


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


async def _serve(kind: str, num_frames: int) -> None:
    loop = asyncio.get_running_loop()
    if kind == "grpc":
        echo, port = await serve_grpc(num_frames)
    else:
        server = await loop.create_server(lambda: _Events(num_frames), HOST, 0)
        port = server.sockets[0].getsockname()[1]
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)
    if kind == "grpc":
        await echo.stop(0)


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], int(sys.argv[2])))
