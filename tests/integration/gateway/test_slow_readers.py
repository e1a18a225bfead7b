"""Chaos plan 17: clients that read slowly or never cost bounded memory, and nobody else's time."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator

import pytest

from services.pb import inference_pb2
from services.router.api import ChoiceDelta, ChoiceEnd, GenerateCall, RequestEnd
from services.text.tokenizer import TextModel
from tests.support.fake_router import FakeRouter, Step
from tests.support.gateway import Doors, open_doors, toy_text_model, wait_until

pytestmark = pytest.mark.integration

CHUNK = "x" * 1000
MAX_CHUNKS = 200_000
MAX_AHEAD_CHUNKS = 20_000  # 20 MB: what sockets and transports hold of one stream, at most
LONG_TOKENS = 1000  # a request for so many is answered without end


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


class Endless:
    """Answers whoever asks for a long answer for ever, as fast as it is taken."""

    def __init__(self) -> None:
        self.num_taken = 0

    def script(self, call: GenerateCall) -> Iterator[Step]:
        if call.sampling.max_tokens == LONG_TOKENS:
            for index in range(MAX_CHUNKS):
                self.num_taken += 1
                yield ChoiceDelta(0, index, (5,), CHUNK)
        yield ChoiceDelta(0, 0, (5,), "short")
        yield ChoiceEnd(0, "stop", num_tokens=1)
        yield RequestEnd(1, 0, 1)

    async def until_stalled(self) -> None:
        """Wait until nothing more is taken; fail if all of it is."""
        looks, seen = 0, -1
        while looks < 20:
            assert self.num_taken < MAX_AHEAD_CHUNKS, "it is taken without being read"
            looks = looks + 1 if self.num_taken == seen and seen > 0 else 0
            seen = self.num_taken
            await asyncio.sleep(0.02)


async def open_http(doors: Doors) -> Callable[[], None]:
    """Ask for a stream and read nothing of it; returns how to leave."""
    body = json.dumps({"prompt": "hello", "max_tokens": LONG_TOKENS, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", doors.http_port))
    client.sendall(head.encode() + body)
    return client.close


async def open_grpc(doors: Doors) -> Callable[[], None]:
    """Ask for a stream and read one frame of it; returns how to leave."""
    request = inference_pb2.GenerateRequest(text="hello", max_tokens=LONG_TOKENS)
    call = doors.stub.Generate(request, timeout=100)
    await call.read()

    def leave() -> None:
        call.cancel()

    return leave


@pytest.mark.parametrize("open_stream", [open_http, open_grpc])
async def test_a_client_that_never_reads_stops_its_own_stream_only(
    text_model: TextModel, open_stream: Callable[[Doors], object]
) -> None:
    """RB-127: the front door takes no more than sockets hold; others are answered meanwhile."""
    endless = Endless()
    router = FakeRouter(text_model, script=endless.script)  # type: ignore[arg-type]  # lazily
    async with open_doors(text_model, router=router) as doors:
        leave = await open_stream(doors)  # type: ignore[misc]  # one of the two above
        await endless.until_stalled()
        for _ in range(20):
            body = {"prompt": "hello", "max_tokens": 3}
            answer = await doors.http.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == "short"
        leave()
        await wait_until(lambda: router.num_open == 0, 20.0)
