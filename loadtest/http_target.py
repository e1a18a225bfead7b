"""A target that speaks OpenAI's HTTP: /v1/completions or /v1/chat/completions, streamed."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from loadtest.credentials import KEY_ADVICE, ApiKeys
from loadtest.http_client import Answer, BadAnswer, Origin, Pool
from loadtest.openai_stream import OpenAIStream, error_code
from loadtest.prompt_bytes import IdBytes, WordBytes
from loadtest.records import Piece, PlannedRequest, RequestRecord, Status
from loadtest.router_metrics import look_at
from loadtest.target import ClusterLook, TargetFacts, TargetUnusable

CONNECT_TIMEOUT_S = 10.0
_LOOK_TIMEOUT_S = 1.0
Api: TypeAlias = Literal["chat", "completions"]
_PATHS: dict[Api, str] = {"chat": "chat/completions", "completions": "completions"}
_NOTHING = b"0"  # stands for the prompt until its bytes take its place
_DEFAULT_PORTS = {"http": 80, "https": 443}


class HttpTarget:
    """Any server that speaks OpenAI's API at a URL.

    Without a vocabulary prompts are words; with one, /v1/completions gets token ids.
    """

    def __init__(
        self,
        url: str,
        clock: Callable[[], float],
        keys: ApiKeys,
        *,
        api: Api = "chat",
        model: str = "",
        vocab_size: int | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self._url = url
        self._clock = clock
        self._keys = keys
        self._api = api
        self._model = model
        self._vocab_size = vocab_size
        origin, self._host, self._base = _read_url(url, ca_file)
        self._pool = Pool(origin, CONNECT_TIMEOUT_S)
        self._ids = IdBytes(vocab_size).json() if vocab_size and api == "completions" else None
        self._words = WordBytes()
        self._is_ours = False

    async def open(self) -> TargetFacts:
        """Ask for the models, which shows that this is the API and that the key is good."""
        answer = await self._get(f"{self._base}/models")
        body = _json(answer)
        if answer.status != 200 or not isinstance(body, dict) or "data" not in body:
            said = f": {error_code(body)}" if isinstance(body, dict) and "error" in body else ""
            raise TargetUnusable(
                f"{self._url} answered {answer.status} to GET {self._base}/models{said}; "
                + _advice(answer.status)
            )
        models = [model for model in body["data"] if isinstance(model, dict) and "id" in model]
        chosen = next((m for m in models if self._model in ("", m["id"])), None)
        if chosen is None:
            known = ", ".join(str(m["id"]) for m in models) or "none"
            raise TargetUnusable(f"{self._url} does not serve {self._model!r}; it serves: {known}")
        self._model = str(chosen["id"])
        self._is_ours = chosen.get("owned_by") == "isthmus"
        notes = await self._unwell()
        if not self._is_ours:
            notes.append(
                "tokens of an event are as the server tells them, else by its usage at the end, "
                "shared evenly among events"
            )
        if self._ids is None:
            notes.append("prompts are words: their length in tokens is the server's count")
        length = chosen.get("max_model_len")
        return TargetFacts(
            kind="http",
            address=self._url,
            model=self._model,
            context_length=length if isinstance(length, int) else None,
            vocab_size=self._vocab_size,
            server=answer.headers.get("server", ""),
            notes=tuple(notes),
        )

    async def _unwell(self) -> list[str]:
        """Ask for the server's health, which many servers tell and none has to."""
        answer = await self._get(f"{self._base.removesuffix('/v1')}/health")
        if answer.status < 500:
            return []
        return [f"the server called itself unwell before the load began: {answer.status}"]

    async def send(self, request: PlannedRequest, record: RequestRecord, timeout_s: float) -> None:
        """Send one request; every end but a cancellation of ours is a status."""
        message = self._message(request, timeout_s)
        stream = OpenAIStream(record, self._clock)
        record.sent_s = self._clock()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._pool.exchange(message, stream.feed)
            record.done_s = self._clock()
            record.retries = answer.retries
            _judge(record, answer, stream)
        except TimeoutError:
            record.done_s = self._clock()
            record.status, record.code = Status.TIMEOUT, "client_timeout"
        except BadAnswer as error:
            record.done_s = self._clock()
            record.status, record.code = Status.ERROR, stream.fault or error.code
        finally:
            stream.finish()

    async def look(self) -> ClusterLook | None:
        """Read a router's metrics; None where the server is another, or the key may not."""
        if not self._is_ours:
            return None
        head = self._head("GET", f"{self._base.removesuffix('/v1')}/metrics", "")
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                answer = await self._pool.exchange(head + b"\r\n", _ignore)
        except (TimeoutError, BadAnswer):
            return None
        return look_at(answer.body.decode(errors="replace")) if answer.status == 200 else None

    async def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    async def _get(self, path: str) -> Answer:
        head = self._head("GET", path, "")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await self._pool.exchange(head + b"\r\n", _ignore)
        except TimeoutError:
            reason = f"no answer within {CONNECT_TIMEOUT_S:g} s"
        except BadAnswer as error:
            reason = str(error)
        raise TargetUnusable(f"{self._url}: {reason}; is a server running there?")

    def _head(self, method: str, path: str, tenant: str, **more: str) -> bytes:
        headers = {"host": self._host, "accept": "*/*", "user-agent": "isthmus-loadtest"}
        key = self._keys.of(tenant)
        if key:
            headers["authorization"] = f"Bearer {key}"
        headers.update((name.replace("_", "-"), value) for name, value in more.items())
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        return f"{method} {path} HTTP/1.1\r\n{''.join(lines)}".encode()

    def _message(self, request: PlannedRequest, timeout_s: float) -> bytes:
        body = self._body(request)
        more = {"content_type": "application/json", "content_length": str(len(body))}
        if self._is_ours:
            more["x_isthmus_timing"] = "1"
            more["x_isthmus_timeout_ms"] = str(round(timeout_s * 1000))
        path = f"{self._base}/{_PATHS[self._api]}"
        return b"%b\r\n%b" % (self._head("POST", path, request.tenant, **more), body)

    def _body(self, request: PlannedRequest) -> bytes:
        wanted: dict[str, Any] = {
            "model": request.model or self._model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:  # an extension most open servers have; OpenAI's own refuses it
            wanted["ignore_eos"] = True
        if request.seed is not None:
            wanted["seed"] = request.seed
        key = b'"messages":' if self._api == "chat" else b'"prompt":'
        return b"{%b%b,%b" % (
            key,
            self._prompt(request.prompt.pieces),
            json.dumps(wanted)[1:].encode(),
        )

    def _prompt(self, pieces: Sequence[Piece]) -> bytes:
        if self._ids is not None:
            return self._ids(pieces)
        if self._api == "completions":
            return b'"%b"' % self._words.text(pieces)
        turns = groupby(pieces, key=lambda piece: piece.role)
        messages = [
            b'{"role":"%b","content":"%b"}' % (role.encode(), self._words.text(list(said)))
            for role, said in turns
        ]
        return b"[%b]" % b",".join(messages)


def _judge(record: RequestRecord, answer: Answer, stream: OpenAIStream) -> None:
    """Say how an answer that came whole went."""
    record.status, record.code = Status.ERROR, ""
    if answer.is_stream:
        if stream.fault or not stream.is_whole:
            record.code = stream.fault or "broken_stream"
        else:
            record.status = Status.OK
    elif answer.status == 200:
        record.code = "no_stream"
    elif 300 <= answer.status < 400:
        record.code = "redirected"
    else:
        body = _json(answer)
        named = isinstance(body, dict) and "error" in body
        record.code = error_code(body) if named else f"http_{answer.status}"
        if answer.status == 429:
            record.status = Status.REJECTED


def _json(answer: Answer) -> object:
    try:
        return json.loads(answer.body)
    except ValueError:
        return None


def _ignore(_piece: bytes) -> None:
    return


def _advice(status: int) -> str:
    if status in (401, 403):
        return KEY_ADVICE
    if 300 <= status < 400:
        return "redirects are not followed: give the address they lead to"
    return "is this the base URL of an OpenAI-compatible API?"


def _read_url(url: str, ca_file: Path | None) -> tuple[Origin, str, str]:
    """Return where the server is, its name in requests, and the path of the API."""
    parts = urlsplit(url)
    try:
        port = parts.port or _DEFAULT_PORTS[parts.scheme]
    except (ValueError, KeyError):
        raise TargetUnusable(f"{url} is no http:// or https:// address") from None
    if not parts.hostname or parts.username or parts.query or parts.fragment:
        raise TargetUnusable(f"{url} must be scheme://host:port, with a path if there is one")
    tls = None
    if parts.scheme == "https":
        try:
            tls = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
        except OSError as error:
            raise TargetUnusable(f"{ca_file}: {error.strerror or 'no certificates'}") from None
    path = parts.path.rstrip("/")
    base = path if path.endswith("/v1") else f"{path}/v1"
    return Origin(parts.hostname, port, tls), parts.netloc, base
