"""A client of the HTTP door: one completion over one connection, streamed or whole.

It hears what the gRPC client hears, but for token ids, which OpenAI's form has no place for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from services.chaos.client import Heard, StreamBroken
from services.common.address import split_host_port
from services.common.errors import ERROR_TABLE
from services.gateway.wire_names import FORCE_MODE, IDEMPOTENCY_KEY, TIMEOUT, TIMING
from services.pb import common_pb2, inference_pb2

_MAX_LINE_BYTES = 1 << 20  # a whole answer with its logprobs is one line
_DATA, _DONE = b"data: ", b"[DONE]"
_ENDS = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}


async def call_http(
    address: str,
    body: inference_pb2.GenerateRequest,
    *,
    is_stream: bool,
    timeout_s: float,
    mode: str,
    heard: Heard,
) -> None:
    """Run one request of token ids; a server that is gone half way is `unavailable`."""
    start = time.monotonic()
    heard.has_ids = False
    try:
        async with asyncio.timeout(timeout_s):
            await _exchange(address, _request(address, body, mode, is_stream=is_stream), heard)
    except TimeoutError:
        heard.code = "deadline_exceeded"
    except (OSError, EOFError):
        heard.code = "unavailable"
    heard.took_s = time.monotonic() - start
    if heard.first_s is not None:
        heard.first_s -= start
        heard.newest_s -= start


def _request(
    address: str, body: inference_pb2.GenerateRequest, mode: str, *, is_stream: bool
) -> bytes:
    sampling = body.sampling
    wanted: dict[str, Any] = {
        "prompt": np.frombuffer(body.token_ids, dtype="<u4").tolist(),
        "max_tokens": body.max_tokens,
        "n": body.n,
        "ignore_eos": body.ignore_eos,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "stop": list(body.stop),
        "stream": is_stream,
    }
    if sampling.HasField("repetition_penalty"):
        wanted["repetition_penalty"] = sampling.repetition_penalty
    if sampling.logprobs:
        wanted["logprobs"] = sampling.top_logprobs
    if is_stream:
        wanted["stream_options"] = {"include_usage": True}
    content = json.dumps(wanted).encode()
    headers = {
        "host": address,
        "connection": "close",
        "content-type": "application/json",
        "content-length": str(len(content)),
        TIMING.name: "1",
        TIMEOUT.name: str(body.timeout_ms),
        IDEMPOTENCY_KEY.name: body.idempotency_key,
        FORCE_MODE.name: mode,
    }
    lines = [f"{name}: {value}\r\n" for name, value in headers.items() if value]
    head = "POST /v1/completions HTTP/1.1\r\n" + "".join(lines) + "\r\n"
    return head.encode() + content


async def _exchange(address: str, request: bytes, heard: Heard) -> None:
    host, port = split_host_port(address)
    reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE_BYTES)
    try:
        writer.write(request)
        headers = _headers(await reader.readuntil(b"\r\n\r\n"))
        if headers["content-type"].startswith("text/event-stream"):
            await _hear_events(reader, heard)
        else:
            _hear_whole(await _body(reader, headers), heard)
    finally:
        writer.close()


def _headers(head: bytes) -> dict[str, str]:
    lines = [line.partition(": ") for line in head.decode("latin-1").split("\r\n")[1:]]
    return {name.lower(): value for name, _, value in lines}


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> Any:
    size = headers.get("content-length")
    if size is not None:
        return json.loads(await reader.readexactly(int(size)))
    return json.loads(b"".join([chunk async for chunk in _chunks(reader)]))


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Give the chunks of a body; raise EOFError where it breaks off."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _hear_events(reader: asyncio.StreamReader, heard: Heard) -> None:
    left, is_done = b"", False
    async for chunk in _chunks(reader):
        *lines, left = (left + chunk).split(b"\n")
        for line in lines:
            if is_done and line:
                raise StreamBroken("a stream went on after its end")
            if line == _DATA + _DONE:
                is_done = True
            elif line:
                _hear_object(json.loads(line.removeprefix(_DATA)), heard)
    if not is_done and not heard.code:
        raise EOFError


def _hear_whole(answer: Any, heard: Heard) -> None:
    _hear_object(answer, heard)
    heard.first_s = None  # nobody saw when its tokens came


def _hear_object(answer: Any, heard: Heard) -> None:
    if "error" in answer:
        code = answer["error"]["code"]
        if code not in ERROR_TABLE:
            raise StreamBroken(f"an error without a code: {answer}")
        heard.code = code
        return
    for choice in answer["choices"]:
        _hear_choice(choice, heard)
    if answer.get("usage"):
        usage = answer["usage"]
        heard.usage = (usage["prompt_tokens"], usage["completion_tokens"])
    told = answer.get("isthmus", {})
    if "migrations" in told:  # events with tokens tell only how many
        heard.migrations = told["migrations"]
        heard.plane = told["plane"]
        heard.was_blind = told["routed_locally"]


def _hear_choice(choice: Any, heard: Heard) -> None:
    index, now = choice["index"], time.monotonic()
    if index in heard.ends:
        raise StreamBroken("a choice went on after its end")
    heard.text[index] = heard.text.get(index, "") + choice["text"]
    heard.newest_s = now
    if heard.first_s is None:
        heard.first_s = now
    logprobs = choice["logprobs"]
    heard.logprobs.setdefault(index, []).extend(logprobs["token_logprobs"] if logprobs else ())
    if choice["finish_reason"]:
        heard.ends[index] = (_ENDS[choice["finish_reason"]], "")
