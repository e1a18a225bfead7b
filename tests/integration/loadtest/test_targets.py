"""Both targets before our own doors and before servers that answer oddly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from loadtest.credentials import ApiKeys
from loadtest.grpc_target import GrpcTarget
from loadtest.http_target import HttpTarget
from loadtest.records import Piece, PlannedRequest, Prompt, RequestRecord, Status
from loadtest.runner import RunClock
from loadtest.target import LiveTarget, TargetUnusable
from services.common.errors import RequestError
from services.router.api import ChoiceDelta, GenerateCall, RequestEnd
from services.text.tokenizer import TextModel
from tests.support.gateway import Doors, open_doors, toy_text_model, wait_until

pytestmark = pytest.mark.integration

REQUEST = PlannedRequest(
    number=1, prompt=Prompt((Piece(77, 9, "system"), Piece(78, 30))), max_tokens=64
)
STREAM_HEAD = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
TOKEN = 'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
END = 'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
MODELS = '{"data":[{"id":"m","object":"model"}]}'


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return toy_text_model(tmp_path_factory.mktemp("toy"))


@contextlib.asynccontextmanager
async def opened(target: LiveTarget) -> AsyncIterator[LiveTarget]:
    try:
        await target.open()
        yield target
    finally:
        await target.close()


async def send(
    target: LiveTarget, request: PlannedRequest = REQUEST, timeout_s: float = 20.0
) -> RequestRecord:
    record = RequestRecord(number=request.number, scheduled_s=0.0)
    await target.send(request, record, timeout_s)
    return record


def clock() -> RunClock:
    started = RunClock()
    started.start()
    return started


def targets_of(doors: Doors) -> dict[str, LiveTarget]:
    keys, vocab_size = ApiKeys(), doors.router.served_models()[0].vocab_size
    return {
        "grpc": GrpcTarget(f"127.0.0.1:{doors.grpc_port}", clock(), keys),
        "chat": HttpTarget(doors.base_url, clock(), keys, api="chat"),
        "completions": HttpTarget(doors.base_url, clock(), keys, api="completions"),
        "ids": HttpTarget(
            f"{doors.base_url}/v1", clock(), keys, api="completions", vocab_size=vocab_size
        ),
    }


async def test_every_way_counts_what_the_server_counts(text_model: TextModel) -> None:
    """Characters of several tokens come late: an event is not a token, and none is lost."""
    async with open_doors(text_model) as doors:

        def ends() -> list[RequestEnd]:
            return [r.end for r in doors.hooks.records if r.end is not None]

        def has_ended(number: int) -> bool:
            return len(ends()) == number

        for number, (name, target) in enumerate(targets_of(doors).items(), 1):
            async with opened(target):
                record = await send(target)

            await wait_until(partial(has_ended, number))
            billed, call = ends()[-1], doors.router.calls[-1]
            assert (record.status, record.code) == (Status.OK, ""), name
            assert record.num_heard == record.osl == billed.completion_tokens
            assert record.isl == billed.prompt_tokens == len(call.token_ids)
            assert record.cached_tokens == 0
            assert (record.mode, record.prefill_worker) == ("REMOTE", "prefill-0")
            assert record.stages_ms == {"prefill": 1.2, "handoff": 0.3}
            if name in ("grpc", "ids"):
                assert record.isl == REQUEST.prompt.num_tokens
            times = [record.sent_s, *(chunk.at_s for chunk in record.chunks), record.done_s]
            assert times == sorted(t for t in times if t is not None)


async def test_ids_of_both_doors_are_equal(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        for name in ("grpc", "ids"):
            async with opened(targets_of(doors)[name]) as target:
                await send(target)
        by_grpc, by_http = doors.router.calls
        assert list(by_grpc.token_ids) == list(by_http.token_ids)


@pytest.mark.parametrize(
    ("code", "status"),
    [("overloaded", Status.REJECTED), ("no_workers", Status.ERROR), ("internal", Status.ERROR)],
)
@pytest.mark.parametrize("after", [0, 2])
async def test_errors_keep_their_code_before_and_after_the_first_token(
    text_model: TextModel, code: str, status: Status, after: int
) -> None:
    def script(call: GenerateCall) -> Sequence[ChoiceDelta | Exception]:
        deltas = [ChoiceDelta(0, n, (5,), "a") for n in range(after)]
        return [*deltas, RequestError(code, "as scripted")]

    async with open_doors(text_model) as doors:
        doors.router.script = script
        for name, target in targets_of(doors).items():
            async with opened(target):
                record = await send(target)
            # HTTP has sent its status by then; what is left is an event.
            is_late = after and name != "grpc"
            assert record.code == code, name
            assert record.status == (Status.ERROR if is_late else status), name
            assert record.num_heard == after


async def test_a_request_that_takes_too_long_ends_as_the_client_s_timeout(
    text_model: TextModel,
) -> None:
    async with open_doors(text_model) as doors:
        doors.router.gate = asyncio.Event()
        for name, target in targets_of(doors).items():
            async with opened(target):
                record = await send(target, timeout_s=0.2)
            assert (record.status, record.code) == (Status.TIMEOUT, "client_timeout"), name


async def test_a_cancelled_request_stays_censored_and_frees_the_server(
    text_model: TextModel,
) -> None:
    async with open_doors(text_model) as doors:
        doors.router.gate = asyncio.Event()
        for name, target in targets_of(doors).items():
            record = RequestRecord(number=1, scheduled_s=0.0)
            async with opened(target):
                task = asyncio.ensure_future(target.send(REQUEST, record, 20.0))
                await wait_until(lambda: doors.router.num_open == 1)
                task.cancel()
                await asyncio.wait((task,))
            assert record.status is Status.CENSORED, name
            await wait_until(lambda: doors.router.num_open == 0)


async def test_an_unknown_model_is_told_which_are_served(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors:
        for target in (
            GrpcTarget(f"127.0.0.1:{doors.grpc_port}", clock(), ApiKeys(), model="x"),
            HttpTarget(doors.base_url, clock(), ApiKeys(), model="x"),
        ):
            with pytest.raises(TargetUnusable, match=text_model.manifest.name):
                async with opened(target):
                    pass


async def test_a_connection_is_used_again(text_model: TextModel) -> None:
    async with open_doors(text_model) as doors, opened(targets_of(doors)["chat"]) as target:
        for _ in range(3):
            assert (await send(target)).status is Status.OK
        assert isinstance(target, HttpTarget)
        assert len(target._pool._idle) == 1


@contextlib.asynccontextmanager
async def odd_server(
    answer: str | Callable[[int], str], health: str = "404 No"
) -> AsyncIterator[HttpTarget]:
    """A server that lists its models, and then answers as told; "" closes the connection."""
    asked = 0
    handlers: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        handler = asyncio.current_task()
        assert handler is not None
        handlers.add(handler)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if head.startswith("GET"):
                    is_health = head.startswith("GET /health ")
                    writer.write(
                        (whole(health, "") if is_health else whole("200 OK", MODELS)).encode()
                    )
                    continue
                size = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
                await reader.readexactly(size)
                said = answer if isinstance(answer, str) else answer(asked)
                asked += 1
                writer.write(said.encode())
                if "content-length" not in said:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    target = HttpTarget(f"http://127.0.0.1:{port}", clock(), ApiKeys(), api="completions")
    try:
        await target.open()
        yield target
    finally:
        await target.close()
        server.close()
        await server.wait_closed()
        await asyncio.wait(handlers, timeout=20)


def whole(status: str, body: str, more: str = "") -> str:
    return f"HTTP/1.1 {status}\r\n{more}content-length: {len(body)}\r\n\r\n{body}"


CHUNKED = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (STREAM_HEAD + TOKEN + END, Status.OK, ""),
        ("HTTP/1.1 100 Continue\r\n\r\n" + STREAM_HEAD + TOKEN + END, Status.OK, ""),
        (STREAM_HEAD + TOKEN, Status.ERROR, "broken_stream"),
        (f"{CHUNKED}{len(TOKEN):x}\r\n{TOKEN}\r\n", Status.ERROR, "broken_stream"),
        (whole("307 Moved", "", "location: http://x/\r\n"), Status.ERROR, "redirected"),
        (whole("200 OK", "{}", "content-type: application/json\r\n"), Status.ERROR, "no_stream"),
        (whole("502 Bad Gateway", "<html>"), Status.ERROR, "http_502"),
        (whole("429 Slow", '{"error":{"code":"rate_limited"}}'), Status.REJECTED, "rate_limited"),
        (whole("429 Slow", "later"), Status.REJECTED, "http_429"),
        (whole("500 No", '{"error":{"message":"x"}}'), Status.ERROR, "error_without_code"),
        ("SSH-2.0-OpenSSH\r\n\r\n", Status.ERROR, "not_http"),
        (f"HTTP/1.1 200 OK\r\nx: {'y' * 70_000}\r\n\r\n", Status.ERROR, "not_http"),
        ("", Status.ERROR, "connection_closed"),
        (whole("200 OK", "x" * 1_100_000), Status.ERROR, "answer_too_large"),
    ],
)
async def test_odd_answers_are_errors_with_codes(answer: str, status: Status, code: str) -> None:
    async with odd_server(answer) as target:
        record = await send(target)

    assert (record.status, record.code) == (status, code)
    assert record.done_s is not None


async def test_a_server_that_calls_itself_unwell_is_measured_with_a_note() -> None:
    for health, notes in (("503 No", 1), ("200 OK", 0), ("404 No", 0)):
        async with odd_server("", health) as target:
            facts = await target.open()
        assert sum("unwell" in note for note in facts.notes) == notes


async def test_an_idle_connection_that_the_server_closed_is_no_error() -> None:
    def answer(number: int) -> str:
        return "" if number == 0 else STREAM_HEAD + TOKEN + END

    async with odd_server(answer) as target:  # the connection that asked for models is used again
        record = await send(target)

    assert (record.status, record.retries) == (Status.OK, 1)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1", "is a server running there"),
        ("ftp://127.0.0.1", "no http:// or https:// address"),
        ("http://user@127.0.0.1", "must be scheme://host:port"),
        ("http://127.0.0.1:x", "no http:// or https:// address"),
    ],
)
async def test_where_nothing_can_be_measured_the_reason_is_told(url: str, message: str) -> None:
    with pytest.raises(TargetUnusable, match=message):
        async with opened(HttpTarget(url, clock(), ApiKeys())):
            pass


async def test_a_certificate_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetUnusable, match=r"none\.pem"):
        HttpTarget("https://127.0.0.1:1", clock(), ApiKeys(), ca_file=tmp_path / "none.pem")
    with pytest.raises(TargetUnusable, match=r"none\.pem"):
        await GrpcTarget("127.0.0.1:1", clock(), ApiKeys(), ca_file=tmp_path / "none.pem").open()
