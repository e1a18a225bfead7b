"""The mock's OpenAI API: /v1/completions and /v1/chat/completions, as streams or whole."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, cast

import httptools

from loadtest.mock.lateness import Lateness
from loadtest.mock.settings import MockSettings
from loadtest.mock.timing import Answer, Desk

MODEL = "mock"
_MAX_BODY_BYTES = 16 << 20
_MAX_WAITING = 64  # pipelined requests of one connection
_DEFAULT_TOKENS = 16
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_WORD = "word "
_STATUS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 413: b"Content Too Large",
           429: b"Too Many Requests", 500: b"Internal Server Error"}  # fmt: skip
_FAULTS = {"internal": 500, "overloaded": 429}


class HttpDoor:
    """What all connections share."""

    def __init__(self, desk: Desk, settings: MockSettings, lateness: Lateness) -> None:
        self.desk = desk
        self.settings = settings
        self.lateness = lateness

    def connection(self) -> Connection:
        """Take a new connection."""
        return Connection(self)

    def models(self) -> bytes:
        """Say what is served."""
        owner = "isthmus" if self.settings.tells_counts else SERVER
        model = {
            "id": MODEL,
            "object": "model",
            "owned_by": owner,
            "max_model_len": self.settings.context_length,
        }
        return _dump({"object": "list", "data": [model]})


SERVER = "isthmus-mock"


class Connection(asyncio.Protocol):
    """One connection: its requests are answered one after another."""

    def __init__(self, door: HttpDoor) -> None:
        self._door = door
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = bytearray()
        self._waiting: deque[tuple[str, str, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_busy = False

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._close()

    def connection_lost(self, error: Exception | None) -> None:
        """Stop writing."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    # -- httptools -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Forget the request before."""
        self._url, self._body = b"", bytearray()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the path."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._body += body
        if len(self._body) > _MAX_BODY_BYTES:
            self._send(413, _error("too_large"))
            self._close()

    def on_message_complete(self) -> None:
        """Answer, or keep it until the answers before it are written."""
        path = self._url.partition(b"?")[0].decode("latin-1")
        self._waiting.append((self._parser.get_method().decode(), path, bytes(self._body)))
        if len(self._waiting) > _MAX_WAITING:
            self._close()
        self._next()

    # -- answers ---------------------------------------------------------------------------------

    def _next(self) -> None:
        while self._waiting and not self._is_busy and self._transport is not None:
            method, path, body = self._waiting.popleft()
            if method == "POST" and path in (_CHAT, _COMPLETIONS):
                self._generate(path == _CHAT, body)
            elif method in ("GET", "HEAD"):
                self._tell(method, path)
            else:
                self._send(404, _error("not_found"))

    def _tell(self, method: str, path: str) -> None:
        door = self._door
        told: dict[str, Callable[[], bytes]] = {
            "/health": lambda: b"{}",
            "/metrics": lambda: b"",
            "/v1/models": door.models,
            "/mock/lateness": lambda: _dump(door.lateness.told()),
        }
        if path not in told:
            self._send(404, _error("not_found"))
            return
        self._send(200, told[path](), with_body=method == "GET")

    def _generate(self, is_chat: bool, raw: bytes) -> None:
        try:
            body = json.loads(raw)
            wanted = body.get("max_completion_tokens", body.get("max_tokens", _DEFAULT_TOKENS))
            prompt = body["messages"] if is_chat else body["prompt"]
            is_stream = bool(body.get("stream", False))
            if not isinstance(wanted, int) or wanted < 1:
                raise ValueError
            prompt_tokens = _count(prompt)
        except (ValueError, TypeError, KeyError, AttributeError):
            self._send(400, _error("invalid_request"))
            return
        answer = self._door.desk.plan(monotonic(), wanted)
        if answer.fault:
            self._send(_FAULTS[answer.fault], _error(answer.fault))
            return
        self._is_busy = True
        writer = _Writer(self._door.settings, answer, prompt_tokens, is_chat=is_chat)
        if is_stream:
            self._write(_head(200, b"text/event-stream", None))
            self._at(answer.chunks[0][0], self._stream, writer, 0)
        else:
            self._at(answer.chunks[-1][0], self._whole, writer)

    def _stream(self, writer: _Writer, index: int) -> None:
        chunks = writer.answer.chunks
        self._door.lateness.note(monotonic() - chunks[index][0])
        is_last = index == len(chunks) - 1
        self._write(writer.event(index) + (writer.end() if is_last else b""))
        if is_last:
            self._done()
        else:
            self._at(chunks[index + 1][0], self._stream, writer, index + 1)

    def _whole(self, writer: _Writer) -> None:
        self._send(200, writer.body())
        self._done()

    def _done(self) -> None:
        self._is_busy = False
        self._next()

    def _at(self, at_s: float, call: Callable[..., None], *args: object) -> None:
        # The loop's own clock has whole milliseconds.
        self._timer = self._loop.call_later(max(0.0, at_s - monotonic()), call, *args)

    def _send(self, status: int, body: bytes, *, with_body: bool = True) -> None:
        head = _head(status, b"application/json", len(body))
        self._write(head + body if with_body else head)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None


class _Writer:
    """Writes one answer; the bytes of an event are put together once."""

    def __init__(
        self, settings: MockSettings, answer: Answer, prompt_tokens: int, *, is_chat: bool
    ) -> None:
        self.answer = answer
        self._prompt_tokens = prompt_tokens
        self._is_chat = is_chat
        self._cached = int(prompt_tokens * settings.cached_share)
        self._counts = settings.tells_counts
        self._by_count: dict[int, bytes] = {}  # events are equal but for their number of tokens

    def event(self, index: int) -> bytes:
        """Write one chunk of text."""
        tokens = self.answer.chunks[index][1]
        found = self._by_count.get(tokens)
        if found is None:
            found = self._by_count[tokens] = self._event(self._choice(_WORD * tokens, None), tokens)
        return found

    def end(self) -> bytes:
        """Write what follows the last chunk."""
        finish = self._event(self._choice("", "length"), 0)
        usage: dict[str, Any] = {**self._head(), "choices": [], "usage": self._usage()}
        if self._counts:
            usage["isthmus"] = {
                "mode": "LOCAL",
                "queue_prefill_us": round(self.answer.queued_s * 1e6),
                "prefill_us": round(self.answer.service_s * 1e6),
            }
        return finish + _chunked(b"data: %b\n\ndata: [DONE]\n\n" % _dump(usage)) + b"0\r\n\r\n"

    def body(self) -> bytes:
        """Write the whole answer as one object."""
        text = _WORD * self.answer.num_tokens
        message = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, "finish_reason": "length"} | (
            message if self._is_chat else {"text": text}
        )
        return _dump({**self._head(), "choices": [choice], "usage": self._usage()})

    def _choice(self, text: str, finish: str | None) -> dict[str, Any]:
        told = {"delta": {"content": text} if text else {}} if self._is_chat else {"text": text}
        return {"index": 0, **told, "finish_reason": finish}

    def _event(self, choice: dict[str, Any], tokens: int) -> bytes:
        own = {"isthmus": {"num_tokens": tokens}} if self._counts else {}
        return _chunked(b"data: %b\n\n" % _dump({**self._head(), "choices": [choice], **own}))

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {"id": "mock", "object": kind, "created": 0, "model": MODEL}

    def _usage(self) -> dict[str, Any]:
        written = self.answer.num_tokens
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self._prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def _count(prompt: object) -> int:
    """Count the tokens of a prompt: ids as they are, words where there is text."""
    if isinstance(prompt, str):
        return max(1, len(prompt.split()))
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        return len(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(item, dict) for item in prompt):
        return sum(_count(message["content"]) for message in prompt)
    raise ValueError


def _head(status: int, content_type: bytes, length: int | None) -> bytes:
    size = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
    return b"HTTP/1.1 %d %b\r\nserver: %b\r\ncontent-type: %b\r\n%b\r\n\r\n" % (
        status, _STATUS[status], SERVER.encode(), content_type, size,
    )  # fmt: skip


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _error(code: str) -> bytes:
    return _dump({"error": {"message": code, "type": code, "code": code}})


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
