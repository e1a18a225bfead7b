"""Clients that go, stay away, read slowly; servers that drain."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from services.common.errors import ConfigError
from services.gateway.config import GatewayConfig
from services.gateway.server import GatewayServer
from services.router.api import ChoiceDelta, ChoiceEnd, RequestEnd
from services.text.tokenizer import TextModel
from tests.support.fake_router import TIMING, FakeRouter
from tests.support.gateway import Doors, open_doors, toy_text_model, wait_until

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


async def raw_request(doors: Doors, body: dict[str, Any]) -> tuple[Any, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", doors.http_port)
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_cancels_the_router(text_model: TextModel, stream: bool) -> None:
    async with open_doors(text_model) as doors:
        doors.router.script = lambda _: [ChoiceDelta(0, 0, (1,), "a"), 60.0]
        _, writer = await raw_request(doors, {**BODY, "stream": stream})
        await wait_until(lambda: doors.router.num_open == 1)
        writer.close()
        await wait_until(lambda: doors.router.num_cancelled == 1)
        await wait_until(lambda: bool(doors.hooks.records))
        assert doors.hooks.records[-1].code == "cancelled"


async def test_client_that_leaves_before_the_first_token(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        doors.router.gate = asyncio.Event()
        _, writer = await raw_request(doors, {**BODY, "stream": True})
        await wait_until(lambda: doors.router.num_open == 1)
        writer.close()
        await wait_until(lambda: doors.router.num_cancelled == 1)


async def test_client_that_never_reads_is_ended_by_its_deadline(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        doors.router.script = lambda _: [
            *(ChoiceDelta(0, index, (1,), "x" * 60_000) for index in range(2000)),
            ChoiceEnd(0, "stop", None, 2000),
            RequestEnd(1, 0, 2000, TIMING),
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", doors.http_port, limit=1024)
        content = json.dumps({**BODY, "stream": True}).encode()
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-isthmus-timeout-ms: 300\r\n"
            f"content-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        await wait_until(lambda: doors.router.num_cancelled == 1)
        assert doors.hooks.records[-1].code == "deadline_exceeded"
        assert (await doors.http.get("/health")).status_code == 200
        writer.transport.abort()
        reader.feed_eof()


async def test_stray_cancellation_gives_an_error(text_model: TextModel) -> None:
    """RB-089, over HTTP."""
    async with open_doors(text_model) as doors:
        doors.router.script = lambda _: [asyncio.CancelledError()]
        answer = await doors.http.post(CHAT, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")


async def test_faults_of_ours_are_internal_and_say_nothing(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        doors.router.script = lambda _: [ValueError("secret")]
        for stream in (False, True):
            answer = await doors.http.post(CHAT, json={**BODY, "stream": stream})
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "internal"
            assert answer.headers["x-request-id"] in answer.json()["error"]["message"]
            assert "secret" not in answer.text


async def test_draining_finishes_what_runs_and_refuses_the_rest(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        doors.router.gate = asyncio.Event()
        running = asyncio.create_task(doors.http.post(CHAT, json=BODY))
        await wait_until(lambda: doors.router.num_open == 1)
        doors.server.desk.start_draining()
        refused = await doors.http.post(CHAT, json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert (await doors.http.get("/ready")).status_code == 503
        stopping = asyncio.create_task(doors.server.stop(5.0))
        await asyncio.sleep(0.02)
        doors.router.gate.set()
        assert (await running).status_code == 200
        assert await stopping is True


async def test_drain_limit_cuts_off_and_says_so(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        doors.router.gate = asyncio.Event()
        running = asyncio.create_task(doors.http.post(CHAT, json=BODY))
        await wait_until(lambda: doors.router.num_open == 1)
        async with asyncio.timeout(6):
            assert await doors.server.stop(0.05) is False
        with pytest.raises(httpx.HTTPError):
            (await running).raise_for_status()
        assert doors.router.num_open == 0


async def test_probes_are_answered_while_prompts_are_tokenised(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RB-123: the tokeniser, however long it takes, does not hold up the event loop."""
    entered, gate = threading.Event(), threading.Event()
    encode = TextModel.encode_chat_at_most

    def held(*arguments: Any, **options: Any) -> Any:
        entered.set()
        assert gate.wait(30.0)
        return encode(*arguments, **options)

    monkeypatch.setattr(TextModel, "encode_chat_at_most", held)
    async with open_doors(text_model) as doors:
        long = {"messages": [{"role": "user", "content": "lorem ipsum " * 90_000}]}
        work = [asyncio.create_task(doors.http.post(CHAT, json=long)) for _ in range(2)]
        await wait_until(entered.is_set)
        for _ in range(3):
            assert (await doors.http.get("/health")).status_code == 200
        assert not any(task.done() for task in work)
        gate.set()
        for task in work:
            assert (await task).json()["error"]["code"] == "context_length_exceeded"


async def test_repeated_key_joins_the_running_request(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        doors.router.gate = asyncio.Event()
        headers = {"idempotency-key": "k1"}
        posts = [
            asyncio.create_task(doors.http.post(CHAT, json=BODY, headers=headers)) for _ in range(3)
        ]
        await wait_until(lambda: doors.router.num_open == 1)
        await asyncio.sleep(0.05)
        doors.router.gate.set()
        texts = {(await post).json()["choices"][0]["message"]["content"] for post in posts}
        again = await doors.http.post(CHAT, json=BODY, headers=headers)
        assert texts == {again.json()["choices"][0]["message"]["content"]} == {doors.router.text}
        assert len(doors.router.calls) == 1
        other = await doors.http.post(CHAT, json={**BODY, "seed": 1}, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "duplicate_request")
        assert other.headers["x-should-retry"] == "false"


async def test_keyed_request_outlives_its_connection_for_a_moment(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        doors.router.gate = asyncio.Event()
        headers = {"idempotency-key": "k2"}
        first = asyncio.create_task(doors.http.post(CHAT, json=BODY, headers=headers))
        await wait_until(lambda: doors.router.num_open == 1)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(doors.http.post(CHAT, json=BODY, headers=headers))
        await asyncio.sleep(0.05)
        doors.router.gate.set()
        assert (await second).status_code == 200
        assert len(doors.router.calls) == 1


async def test_keyed_request_nobody_comes_back_for_is_cancelled(text_model: TextModel) -> None:
    config = GatewayConfig(orphan_grace_s=0.05)
    async with open_doors(text_model, config) as doors:
        doors.router.gate = asyncio.Event()
        headers = {"idempotency-key": "k3"}
        first = asyncio.create_task(doors.http.post(CHAT, json=BODY, headers=headers))
        await wait_until(lambda: doors.router.num_open == 1)
        first.cancel()
        await asyncio.wait([first])
        await wait_until(lambda: doors.router.num_cancelled == 1)
        doors.router.gate.set()
        again = await doors.http.post(CHAT, json=BODY, headers=headers)
        assert again.status_code == 200  # a cancelled run is not kept: the key may try again
        assert len(doors.router.calls) == 2


async def test_ports_in_use_are_refused(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        for grpc_port, http_port in ((doors.grpc_port, 0), (0, doors.http_port)):
            second = GatewayServer(
                FakeRouter(text_model), text_model, text_model.manifest, GatewayConfig()
            )
            with pytest.raises(ConfigError, match="cannot listen"):
                await second.start(f"127.0.0.1:{grpc_port}", f"127.0.0.1:{http_port}")
            await second.stop(0)
