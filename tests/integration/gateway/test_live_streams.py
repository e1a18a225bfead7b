"""Events and frames written as a worker's frame is read, past the task that serves the client."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.common.errors import RequestError
from services.gateway.config import GatewayConfig
from services.pb import inference_pb2
from services.router.api import (
    ChoiceDelta,
    ChoiceEnd,
    GenerateCall,
    RequestEnd,
    WriteOutputs,
)
from services.router.output_buffer import OutputBuffer
from services.text.tokenizer import TextModel
from tests.support.certs import identity, make_certs
from tests.support.fake_router import FakeRouter
from tests.support.gateway import open_doors, toy_text_model, wait_until

pytestmark = pytest.mark.integration

TEXT = 'Say "wörld",\n\tzero \x00 and 🫠 \u2028 twice: 🫠🫠\\'
REQUEST = inference_pb2.GenerateRequest(text="hello", max_tokens=500)
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 500, "stream": True}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


@dataclass(slots=True)
class LiveRouter(FakeRouter):
    """Gives its outputs through the call's sink where that takes them, as frames do."""

    buffers: list[OutputBuffer] = field(default_factory=list)
    bursts: int = 1  # times the answer is given before its end
    num_live: int = 0  # deltas that no task was woken for
    num_short: int = 0  # of them: written past everything but the door
    failure: str = ""  # how the last answer broke off
    error: RequestError | None = None  # comes instead of the end
    waits: bool = False  # until the door takes outputs at once, which is after its first frame

    async def generate(self, call: GenerateCall, write: WriteOutputs) -> None:
        self.num_open += 1
        buffer = OutputBuffer(64, call.sink, 64 << 10)
        self.buffers.append(buffer)
        frames = asyncio.get_running_loop().create_task(self._frames(call, buffer))
        try:
            while True:
                outputs = await buffer.take()
                await write(outputs)
                if isinstance(outputs[-1], RequestEnd):
                    return
        finally:
            frames.cancel()
            self.num_open -= 1

    async def _frames(self, call: GenerateCall, buffer: OutputBuffer) -> None:
        outputs = self.answer(call)
        deltas = [output for output in outputs if isinstance(output, ChoiceDelta)]
        try:
            for _ in range(self.bursts):
                for index, delta in enumerate(deltas):
                    write = buffer.writer() if index % 3 else None
                    if write is None or not delta.text or not write(delta.text):
                        buffer.put([delta])
                    elif buffer.sink is not None:
                        buffer.sink.note((0.0,))
                        self.num_short += 1
                    self.num_live += not buffer._items
                    if self.waits and index == 0:
                        await wait_until(lambda: buffer.writer() is not None)
                    await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            buffer.put([ChoiceEnd(0, "stop", None, 1), RequestEnd(1, 0, 1)])
        except RequestError as error:
            self.failure = error.spec.code
            buffer.fail(error)


def texts_of(raw: str) -> list[str]:
    """The texts of all events before the finish; every line has to be whole."""
    events = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert choices[-1]["finish_reason"] == "stop"
    return [choice["text"] for choice in choices[:-1]]


async def stream(http: httpx.AsyncClient) -> list[str]:
    answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    return texts_of(answer.content.decode())


async def test_events_written_at_once_are_whole_and_in_order(text_model: TextModel) -> None:
    router = LiveRouter(text_model, text=TEXT, bursts=3)
    async with open_doors(text_model, router=router) as doors:
        for _ in range(3):  # over one connection, whose framing must hold
            texts = await stream(doors.http)
            assert "".join(texts) == TEXT * 3
            assert len(texts) > 30
    assert router.num_live > 30
    assert router.num_short > 20


async def test_they_are_so_over_tls(text_model: TextModel, tmp_path: Path) -> None:
    make_certs(tmp_path)
    config = GatewayConfig(tls=identity(tmp_path, "doors", ca=False), health_poll_s=0.02)
    router = LiveRouter(text_model, text=TEXT, bursts=3)
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    async with open_doors(text_model, config, router) as doors:
        url = f"https://localhost:{doors.http_port}"
        async with httpx.AsyncClient(base_url=url, verify=context, trust_env=False) as http:
            assert "".join(await stream(http)) == TEXT * 3
    assert router.num_live > 30


async def test_a_client_that_never_reads_is_cut_off_as_with_a_task(text_model: TextModel) -> None:
    """RB-127: what is written at once stays within the transport's bound, then the buffer's."""
    router = LiveRouter(text_model, text="x" * 400, bursts=1_000_000)
    async with open_doors(text_model, router=router) as doors:
        client = open_stream(doors.http_port)
        await wait_until(lambda: router.failure == "slow_reader", 60.0)
        client.close()
        await wait_until(lambda: router.num_open == 0, 20.0)
        assert (await doors.http.get("/health")).status_code == 200


async def test_a_client_that_leaves_gets_nothing_more(
    text_model: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    router = LiveRouter(text_model, text="x" * 400, bursts=1_000_000)
    async with open_doors(text_model, router=router) as doors:
        client = open_stream(doors.http_port)
        await wait_until(lambda: router.num_live > 10)
        client.close()
        await wait_until(lambda: router.num_open == 0, 20.0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_grpc_frames_queued_at_once_are_in_order(text_model: TextModel) -> None:
    router = LiveRouter(text_model, text=TEXT, waits=True)
    async with open_doors(text_model, router=router) as doors:
        frames = [frame async for frame in doors.stub.Generate(REQUEST, timeout=20)]
    assert "".join(frame.text for frame in frames) == TEXT
    counts = [frame.num_tokens for frame in frames]
    assert [frame.first_index for frame in frames] == [sum(counts[:i]) for i in range(len(frames))]
    assert [bool(frame.request_id) for frame in frames] == [i == 0 for i in range(len(frames))]
    assert [frame.HasField("usage") for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert frames[-1].WhichOneof("end") == "finish"
    assert router.num_live > 30
    assert router.num_short > 20


async def test_an_error_over_grpc_comes_after_what_was_queued(text_model: TextModel) -> None:
    router = LiveRouter(text_model, text=TEXT, waits=True)
    router.error = RequestError("worker_lost", "gone")
    async with open_doors(text_model, router=router) as doors:
        call = doors.stub.Generate(REQUEST, timeout=20)
        texts = await texts_until_error(call)
        trailers = dict(await call.trailing_metadata())
    assert "".join(texts) == TEXT
    assert trailers["isthmus-code"] == "worker_lost"
    assert router.num_short > 20


async def test_a_grpc_client_that_never_reads_is_cut_off_by_the_buffer(
    text_model: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    router = LiveRouter(text_model, text="x" * 400, bursts=1_000_000, waits=True)
    async with open_doors(text_model, router=router) as doors:
        call = doors.stub.Generate(REQUEST, timeout=100)
        await call.read()
        await wait_until(lambda: router.failure == "slow_reader", 60.0)
        call.cancel()
        await wait_until(lambda: router.num_open == 0, 20.0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def texts_until_error(call: Any) -> list[str]:
    """The texts of a call that has to fail in the end."""
    texts: list[str] = []
    try:
        while True:
            frame = await call.read()
            assert frame is not grpc.aio.EOF
            texts.append(frame.text)
    except grpc.aio.AioRpcError:
        return texts


def open_stream(port: int) -> socket.socket:
    """Ask for a stream and read nothing of it."""
    body = json.dumps(BODY).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(head.encode() + body)
    return client
