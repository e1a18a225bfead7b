"""Both front doors on loopback over a scripted router."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx

from services.gateway.config import GatewayConfig
from services.gateway.hooks import RequestRecord
from services.gateway.server import GatewayServer, GrpcService
from services.pb import inference_pb2_grpc
from services.text.tokenizer import TextModel
from tests.support.fake_router import FakeRouter


class RecordingHooks:
    """Keeps the records of finished requests."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)

    def render_metrics(self) -> tuple[str, bytes]:
        return "text/plain; version=0.0.4; charset=utf-8", b"isthmus_up 1\n"


@dataclass(slots=True)
class Doors:
    """A running gateway and clients of it."""

    server: GatewayServer
    router: FakeRouter
    hooks: RecordingHooks
    grpc_port: int
    http_port: int
    http: httpx.AsyncClient
    channel: grpc.aio.Channel

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def stub(self) -> inference_pb2_grpc.InferenceAsyncStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    async def raw_answer(self, sent: bytes, *, half_close: bool = False) -> bytes:
        """Send bytes over HTTP; give everything until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
        try:
            writer.write(sent)
            if half_close:
                writer.write_eof()
            return await asyncio.wait_for(reader.read(), 20)
        except ConnectionError:
            return b""  # it was closed before all was sent
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def open_doors(
    text_model: TextModel,
    config: GatewayConfig | None = None,
    router: FakeRouter | None = None,
    extra_services: tuple[GrpcService, ...] = (),
) -> AsyncIterator[Doors]:
    """Start a gateway on free loopback ports; stop it and check that nothing is left inside."""
    router = router or FakeRouter(text_model)
    hooks = RecordingHooks()
    server = GatewayServer(
        router,
        text_model,
        text_model.manifest,
        config or GatewayConfig(health_poll_s=0.02),
        hooks,
        extra_services=extra_services,
    )
    ports = await server.start("127.0.0.1:0", "127.0.0.1:0")
    url = f"http://127.0.0.1:{ports.http_port}"
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http,
            grpc.aio.insecure_channel(
                f"127.0.0.1:{ports.grpc_port}",
                options=[
                    ("grpc.max_receive_message_length", 32 << 20),
                    ("grpc.max_send_message_length", 32 << 20),
                ],
            ) as channel,
        ):
            yield Doors(server, router, hooks, ports.grpc_port, ports.http_port, http, channel)
    finally:
        await server.stop(2.0)
    assert router.num_open == 0
    assert server.desk.num_open == 0


def toy_text_model(directory: Path) -> TextModel:
    """Make the toy model and load its text side."""
    from tests.support.toy_model import make_toy_model

    return TextModel.load(make_toy_model(directory))


async def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Poll for something that has no event to wait for."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.005)
