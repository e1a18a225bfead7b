"""Bytes and connections that mean no good: a clear answer or none, and nobody else notices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.config import GatewayConfig
from services.pb import inference_pb2, inference_pb2_grpc
from services.text.tokenizer import TextModel
from tests.support.gateway import Doors, open_doors, toy_text_model, wait_until

pytestmark = pytest.mark.integration

SENTINEL = "Xyzzy-of-a-prompt"
BODY = b'{"prompt": "%s", "max_tokens": 1}' % SENTINEL.encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors(text_model: TextModel) -> AsyncIterator[Doors]:
    config = GatewayConfig(health_poll_s=0.02, http_head_timeout_s=5.0, http_body_timeout_s=5.0)
    async with open_doors(text_model, config) as opened:
        yield opened


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever comes, no log has the prompt, a traceback, or a line for every piece of garbage."""
    caplog.set_level(logging.DEBUG)
    for noisy in ("asyncio", "httpcore", "httpx", "grpc"):
        caplog.set_level(logging.WARNING, noisy)
    yield
    assert SENTINEL not in caplog.text
    assert [r for r in caplog.records if r.exc_info or r.levelno >= logging.WARNING] == []


def post(head: bytes = b"", body: bytes = BODY, length: bytes = LENGTH) -> bytes:
    start = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    return start + length + head + b"\r\n" + body


async def serves(doors: Doors) -> None:
    answer = await doors.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 1})
    assert answer.status_code == 200


REQUESTS: dict[str, tuple[bytes, int, bytes]] = {
    "good": (post(b"content-type: application/json; charset=utf-8\r\n"), 200, b""),
    "text": (post(b"content-type: text/plain\r\n"), 400, b'"content-type"'),
    "a form": (post(b"content-type: application/x-www-form-urlencoded\r\n"), 400, b"content-type"),
    "no type": (post(b"content-type: ;;;\r\n"), 200, b""),
    "packed": (post(b"content-encoding: gzip\r\n"), 400, b'"content-encoding"'),
    "a name twice": (
        post(body=b'{"n": 1, "n": 2}', length=b"content-length: 16\r\n"),
        400,
        b"twice",
    ),
    "two lengths": (post(length=LENGTH + b"content-length: 5\r\n"), 400, b"invalid_argument"),
    "length and chunks": (post(length=LENGTH + CHUNKED), 400, b"invalid_argument"),
    "no chunk": (post(length=CHUNKED, body=b"zz\r\n" + BODY), 400, b"invalid_argument"),
    "endless chunk": (post(length=CHUNKED, body=b"f" * 20 + b"\r\n"), 400, b"invalid_argument"),
    "less than nothing": (post(length=b"content-length: -1\r\n"), 400, b"invalid_argument"),
    "more than exists": (post(length=b"content-length: 999999999\r\n"), 413, b"body_too_large"),
    "a folded header": (post(b"x-a: b\r\n c: d\r\n"), 400, b"invalid_argument"),
    "line feeds": (b"GET /health HTTP/1.1\nhost: x\n\n", 400, b"invalid_argument"),
    "upgrade": (
        post(b"Upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n").replace(
            b"connection: close", b"connection: close, upgrade, http2-settings"
        ),
        200,
        b"",
    ),
    "tunnel": (b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n", 400, b"invalid_argument"),
    "no path": (b"GET /%ff%00 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 404, b"not_found"),
    "no digits": (post(b"x-isthmus-timeout-ms: \xd9\xa3\r\n"), 400, b'"x-isthmus-timeout-ms"'),
    "no number": (post(b"x-slo-ttft-ms: 1e3\r\n"), 400, b'"x-slo-ttft-ms"'),
    "no mode": (post(b"x-isthmus-force-mode: \xff\r\n"), 400, b'"x-isthmus-force-mode"'),
    "odd names": (post(b"x-request-id: \xff\xfe\r\nx-isthmus-session: \xff\r\n"), 200, b""),
    "garbage after": (post() + b"\x00garbage" * 20, 200, b""),
}


@pytest.mark.parametrize("name", sorted(REQUESTS))
@pytest.mark.asyncio(loop_scope="module")
async def test_odd_requests_get_a_clear_answer(doors: Doors, name: str) -> None:
    sent, status, holds = REQUESTS[name]
    answer = await doors.raw_answer(sent)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:300]
    assert holds in answer
    await serves(doors)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, len(post())), st.integers(0, 12), st.binary(max_size=6)),
        min_size=1,
        max_size=4,
    )
)
@pytest.mark.asyncio(loop_scope="module")
async def test_any_damage_to_a_request_is_answered_or_ends_it(
    doors: Doors, cuts: list[tuple[int, int, bytes]]
) -> None:
    sent = post()
    for at, length, replacement in cuts:
        sent = sent[:at] + replacement + sent[at + length :]
    answer = await doors.raw_answer(sent, half_close=True)
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    assert b"Traceback" not in answer
    assert b" 500 " not in answer[:20]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_shuts_its_side_is_gone(doors: Doors) -> None:
    doors.router.gate = asyncio.Event()
    try:
        assert await doors.raw_answer(post(), half_close=True) == b""
        assert await doors.raw_answer(post()[:-5], half_close=True) == b""
        await wait_until(lambda: doors.router.num_open == 0, 20.0)
    finally:
        doors.router.gate = None
    await serves(doors)


async def test_slow_heads_and_bodies_hold_nobody_up(text_model: TextModel) -> None:
    """Each takes a connection for the time it is given, and nothing else."""
    config = GatewayConfig(http_head_timeout_s=3.0, http_body_timeout_s=3.0)
    async with open_doors(text_model, config) as doors:
        starts = [b"", b"POST /v1/comp", post()[:60], post()[:-5]] * 10
        slow = [asyncio.create_task(doors.raw_answer(start)) for start in starts]
        await serves(doors)
        answers = await asyncio.gather(*slow)
        assert {answer[:12] for answer in answers} == {b"", b"HTTP/1.1 504"}
        assert doors.server.desk.num_open == 0


async def test_idle_connections_are_bounded_and_what_is_open_is_served(
    text_model: TextModel,
) -> None:
    async with open_doors(text_model, GatewayConfig(max_http_connections=40)) as doors:
        await serves(doors)  # one that is kept alive
        idle = [await asyncio.open_connection("127.0.0.1", doors.http_port) for _ in range(60)]
        heard = [asyncio.create_task(reader.read()) for reader, _ in idle]
        await wait_until(lambda: sum(task.done() for task in heard) == 21, 20.0)
        assert all(b" 429 " in t.result()[:20] for t in heard if t.done())
        await serves(doors)
        for _, writer in idle:
            writer.close()
        await asyncio.gather(*heard)


# -- gRPC ---------------------------------------------------------------------------------------


FLOODS: dict[str, list[tuple[str, str | bytes]]] = {
    "many": [(f"x-{i}", "y" * 50) for i in range(200)],
    "one": [("x-a", "y" * 1_000_000)],
    "no mode": [("x-isthmus-force-mode", "m" * 5000)],
    "long session": [("x-isthmus-session", "s" * 5000)],
}


@pytest.mark.parametrize("name", sorted(FLOODS))
@pytest.mark.asyncio(loop_scope="module")
async def test_odd_metadata_gets_a_status(doors: Doors, name: str) -> None:
    request = inference_pb2.GenerateRequest(text=SENTINEL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(doors.stub.Generate(request, timeout=20, metadata=FLOODS[name])))
    assert caught.value.code() in (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    await serves(doors)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_packed_message_is_bounded_unpacked(doors: Doors) -> None:
    """RB-080: thirty kilobytes that become thirty megabytes."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{doors.grpc_port}", compression=grpc.Compression.Gzip, options=options
    ) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        small = inference_pb2.GenerateRequest(text=SENTINEL, max_tokens=1)
        assert [frame async for frame in stub.Generate(small, timeout=20)]
        bomb = inference_pb2.GenerateRequest(text="x" * (30 << 20))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Generate(bomb, timeout=20)))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await serves(doors)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_SETTINGS = b"\0\0\0\x04\0\0\0\0\0"


async def test_grpc_connections_that_nobody_uses_are_closed(text_model: TextModel) -> None:
    config = GatewayConfig(grpc_handshake_timeout_s=1.0, grpc_idle_timeout_s=1.0)
    async with open_doors(text_model, config) as doors:
        doors.router.gate = asyncio.Event()
        request = inference_pb2.GenerateRequest(text="Once", max_tokens=1)

        async def run() -> int:
            return len([frame async for frame in doors.stub.Generate(request, timeout=60)])

        running = asyncio.create_task(run())
        await wait_until(lambda: doors.router.num_open == 1, 20.0)
        for start in (b"", PREFACE, PREFACE + NO_SETTINGS):
            reader, writer = await asyncio.open_connection("127.0.0.1", doors.grpc_port)
            writer.write(start)
            assert await asyncio.wait_for(reader.read(), 20)  # until it is closed
            writer.close()
        doors.router.gate.set()
        assert await running  # a call that waits is in use
