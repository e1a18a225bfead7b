"""Serves both doors of a mock until its input ends."""

from __future__ import annotations

import asyncio
import json
import sys

import grpc.aio

from loadtest.mock.http_door import HttpDoor
from loadtest.mock.inference_servicer import MockInference, NoteArrival
from loadtest.mock.lateness import Lateness
from loadtest.mock.settings import MockSettings
from loadtest.mock.timing import Desk
from services.pb import inference_pb2_grpc

HOST = "127.0.0.1"
_MAX_MESSAGE_BYTES = 16 << 20
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 10_000),
)


async def serve(settings: MockSettings) -> None:
    """Serve both doors until the parent closes our input."""
    loop = asyncio.get_running_loop()
    desk, lateness = Desk(settings), Lateness()
    door = HttpDoor(desk, settings, lateness)
    http = await loop.create_server(door.connection, HOST, 0, backlog=4_096)
    rpc = grpc.aio.server(interceptors=(NoteArrival(),), options=_OPTIONS)
    inference_pb2_grpc.add_InferenceServicer_to_server(MockInference(desk, settings, lateness), rpc)
    grpc_port = rpc.add_insecure_port(f"{HOST}:0")
    await rpc.start()
    ports = {"http": http.sockets[0].getsockname()[1], "grpc": grpc_port}
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    ended = asyncio.Event()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: _UntilEnd(reader, ended), sys.stdin)
    await ended.wait()
    http.close()
    await rpc.stop(grace=None)


class _UntilEnd(asyncio.StreamReaderProtocol):
    """Tells when the input is over."""

    def __init__(self, reader: asyncio.StreamReader, ended: asyncio.Event) -> None:
        super().__init__(reader)
        self._ended = ended

    def eof_received(self) -> bool | None:
        """The parent is gone, or wants us gone."""
        self._ended.set()
        return super().eof_received()
