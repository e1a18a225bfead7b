"""Connections that misbehave below the level of a request."""

from __future__ import annotations

import asyncio
import json

import pytest

from services.gateway.config import GatewayConfig
from services.pb import inference_pb2
from services.text.tokenizer import TextModel
from tests.support.gateway import Doors, open_doors, toy_text_model, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


def error_of(answer: bytes) -> str:
    return str(json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"])


async def test_slow_heads_are_closed(text_model: TextModel) -> None:
    async with open_doors(text_model, GatewayConfig(http_head_timeout_s=0.1)) as doors:
        assert await doors.raw_answer(b"") == b""
        assert await doors.raw_answer(b"GET /health HTTP/1.1\r\nhost:") == b""
        # Another request on a connection that was served has its own time.
        reader, writer = await asyncio.open_connection("127.0.0.1", doors.http_port)
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            await reader.readuntil(b'{"status":"ok"}')
            await asyncio.sleep(0.15)
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nx: " + b"a" * 5000,
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 1000,
        b"GET /" + b"a" * 5000,
    ],
)
async def test_large_heads_are_refused(text_model: TextModel, sent: bytes) -> None:
    """However many packets they come in."""
    async with open_doors(text_model, GatewayConfig(max_http_head_bytes=2000)) as doors:
        answer = await doors.raw_answer(sent)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert error_of(answer) == "body_too_large"


async def test_bytes_that_are_not_http_get_an_error_object(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        for sent in (b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            answer = await doors.raw_answer(sent)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert error_of(answer) == "invalid_argument"


async def test_connections_over_the_limit_are_refused(text_model: TextModel) -> None:
    async with open_doors(text_model, GatewayConfig(max_http_connections=2)) as doors:
        held = [await asyncio.open_connection("127.0.0.1", doors.http_port) for _ in range(2)]
        await asyncio.sleep(0.05)
        answer = await doors.raw_answer(b"")
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert error_of(answer) == "overloaded"
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        await asyncio.sleep(0.05)
        assert (await doors.http.get("/health")).status_code == 200


async def test_slow_bodies_are_refused(text_model: TextModel) -> None:
    async with open_doors(text_model, GatewayConfig(http_body_timeout_s=0.1)) as doors:
        reader, writer = await asyncio.open_connection("127.0.0.1", doors.http_port)
        writer.write(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 504 ")
        writer.close()


async def test_old_connections_end_after_an_answer_so_that_clients_find_new_routers(
    text_model: TextModel,
) -> None:
    """RB-092: at both doors, and without cutting off what runs."""
    config = GatewayConfig(max_connection_age_s=0.3, max_connection_age_grace_s=30.0)
    async with open_doors(text_model, config) as doors:
        doors.router.gate = asyncio.Event()
        body = {"prompt": "Once", "max_tokens": 1}
        request = inference_pb2.GenerateRequest(text="Once", max_tokens=1)
        held = asyncio.create_task(doors.http.post("/v1/completions", json=body))
        held_frames = asyncio.create_task(_frames(doors, request))
        await wait_until(lambda: len(doors.router.calls) == 2, 20.0)
        await asyncio.sleep(0.5)  # both connections are old now
        doors.router.gate.set()
        doors.router.gate = None
        assert "connection" not in (await held).headers
        assert await held_frames
        last = await doors.http.post("/v1/completions", json=body)
        assert last.headers["connection"] == "close"
        await doors.http.post("/v1/completions", json=body)
        assert len(_peers(doors, "http")) == 2
        async with asyncio.timeout(20.0):
            while len(_peers(doors, "grpc")) < 2:  # as soon as the client has heard of it
                assert await _frames(doors, request)


def _peers(doors: Doors, door: str) -> set[str]:
    return {record.peer for record in doors.hooks.records if record.door == door}


async def _frames(doors: Doors, request: inference_pb2.GenerateRequest) -> list[object]:
    return [frame async for frame in doors.stub.Generate(request, timeout=20)]
