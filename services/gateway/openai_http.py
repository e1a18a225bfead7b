"""The HTTP front door: OpenAI's endpoints, tokenising, and the process's own."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from services.common.errors import IsthmusError, RequestError
from services.common.limits import Limits
from services.gateway.auth import Authenticator
from services.gateway.front_desk import FrontDesk
from services.gateway.hooks import GatewayHooks
from services.gateway.http_edge import Endpoint, Exchange, HttpEdge, HttpRoute
from services.gateway.http_io import (
    CHUNK_END,
    Connection,
    Responder,
    check_body_headers,
    chunk,
    chunk_head,
    read_body,
    traceparent_of,
    while_connected,
)
from services.gateway.input_bounds import check_text, parse_json
from services.gateway.openai_api import (
    OpenAIRequest,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from services.gateway.openai_output import (
    AnswerFacts,
    BodyWriter,
    CountingWriter,
    StreamWriter,
    dump,
    json_text,
)
from services.gateway.prepare import TextPool
from services.gateway.rate_limits import rate_headers
from services.gateway.spec import ChatInput, GenerateSpec
from services.gateway.validate import Arrival, check_turns, session_of
from services.gateway.wire_names import (
    CHAT_ROUTE,
    COMPLETION_ROUTE,
    DECODE_WORKER,
    DETOKENIZE_ROUTE,
    HEALTH_ROUTE,
    IDEMPOTENCY_KEY,
    METRICS_ROUTE,
    MODE,
    MODEL_ROUTE,
    MODELS_ROUTE,
    PLANE,
    PREFILL_WORKER,
    READY_ROUTE,
    ROUTE,
    SESSION,
    TIMING,
    TOKENIZE_ROUTE,
    TRACEPARENT,
    RouteSpec,
)
from services.router.api import (
    ChoiceDelta,
    ChoiceEnd,
    RequestEnd,
    RouterOutput,
    ServedModel,
    TextWriter,
    WriteOutputs,
)
from services.router.output_sink import LiveSink

T = TypeVar("T")
_Generate = Callable[[WriteOutputs], Awaitable[None]]

_INLINE_PARSE_BYTES = 64 << 10  # larger bodies are parsed in a thread
_TRUE = ("1", "true")
_MAX_JSON_TEXTS = 1 << 15


class HttpDoor:
    """Endpoints of the HTTP door; `app` is the ASGI application."""

    def __init__(
        self,
        desk: FrontDesk,
        pool: TextPool,
        authenticator: Authenticator,
        hooks: GatewayHooks,
    ) -> None:
        self._desk = desk
        self._pool = pool
        self._hooks = hooks
        self._clock = desk.clock
        self._config = desk.config
        self._limits = desk.config.limits
        self._created = self._clock.unix_ms() // 1000
        routes = (
            _route(CHAT_ROUTE, self._limited(self._chat)),
            _route(COMPLETION_ROUTE, self._limited(self._completion)),
            _route(MODELS_ROUTE, self._models),
            _route(MODEL_ROUTE, self._model),
            _route(TOKENIZE_ROUTE, self._limited(self._tokenize)),
            _route(DETOKENIZE_ROUTE, self._limited(self._detokenize)),
            _route(HEALTH_ROUTE, self._health),
            _route(READY_ROUTE, self._ready),
            _route(METRICS_ROUTE, self._metrics),
        )
        self.app = HttpEdge(routes, authenticator, hooks, self._clock)

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, parse_chat)

    async def _completion(self, exchange: Exchange) -> None:
        await self._generate(exchange, parse_completion)

    async def _generate(
        self, exchange: Exchange, parse: Callable[[Any, Limits], OpenAIRequest]
    ) -> None:
        raw = await self._read(exchange)
        request = await self._parse(raw, lambda body: parse(body, self._limits))
        spec = self._with_headers(request.spec, exchange)
        arrival = Arrival(
            request_id=exchange.request_id,
            received_at=exchange.received_at,
            tenant=exchange.caller.tenant,
            namespace=exchange.caller.namespace,
            traceparent=traceparent_of(exchange.headers.get(TRACEPARENT.name, "")),
            session=session_of(exchange.headers.get(SESSION.name, ""), self._limits),
        )
        spec = self._desk.preparer.resolved(spec, arrival)
        key = self._idempotency_key(exchange)
        digest = hashlib.sha256(exchange.route.encode() + b"\0" + raw).digest() if key else b""
        facts = self._facts(exchange, request, spec)
        live = _LiveStream(exchange.responder, _writer(facts)) if request.stream else None
        sink = None if live is None else live.sink

        async def generate(write: WriteOutputs) -> None:
            await self._desk.generate(spec, arrival, write, key, digest, sink)
            if exchange.end is None:
                raise RequestError("internal", "the answer ended without its end")

        try:
            async with asyncio.timeout(self._desk.time_left_s(spec, arrival)):
                if live is None:
                    work = self._whole(exchange, generate, facts, spec.n)
                else:
                    work = self._stream(exchange, generate, live)
                await while_connected(work, exchange.receive)
        except TimeoutError:
            raise RequestError("deadline_exceeded", "the request's deadline passed") from None

    def _limited(self, endpoint: Endpoint) -> Endpoint:
        async def admit(exchange: Exchange) -> None:
            with self._desk.accounting.admitted(exchange.caller.tenant) as verdict:
                exchange.responder.add_headers(rate_headers(verdict))
                await endpoint(exchange)

        return admit

    async def _stream(self, exchange: Exchange, generate: _Generate, live: _LiveStream) -> None:
        responder = exchange.responder

        async def write(outputs: Sequence[RouterOutput]) -> None:
            live.sink.is_open = False  # it must not overtake these
            # Started late: an error before the first token keeps its own HTTP status.
            if not responder.has_started:
                await responder.start_events()
                exchange.ttft_s = self._clock.now() - exchange.received_at
            for output in outputs:
                if isinstance(output, ChoiceDelta):
                    data = live.events.delta(output)
                    if data:
                        await responder.events(data)
                elif isinstance(output, ChoiceEnd):
                    await responder.events(live.events.end(output))
                else:
                    exchange.end = output
                    await responder.end_events(live.events.finish(output))
            live.sink.is_open = exchange.end is None

        try:
            await generate(write)
        except IsthmusError as error:
            if not responder.has_started:
                raise
            live.sink.is_open = False
            # Headers are out: the error is an event, and no finish_reason or DONE follows.
            exchange.code = error.spec.code
            await responder.end_events(live.events.error(error))

    async def _whole(
        self, exchange: Exchange, generate: _Generate, facts: AnswerFacts, num_choices: int
    ) -> None:
        writer: BodyWriter | None = None

        async def write(outputs: Sequence[RouterOutput]) -> None:
            nonlocal writer
            # Not before the desk has checked how many choices there are.
            writer = writer or BodyWriter(facts, num_choices)
            for output in outputs:
                if isinstance(output, ChoiceDelta):
                    if exchange.ttft_s is None:
                        exchange.ttft_s = self._clock.now() - exchange.received_at
                    writer.delta(output)
                elif isinstance(output, ChoiceEnd):
                    writer.end(output)
                else:
                    exchange.end = output
                    headers = _where_headers(output)
                    await exchange.responder.whole(200, writer.finish(output), headers=headers)

        await generate(write)

    async def _models(self, exchange: Exchange) -> None:
        models = self._desk.preparer.models()
        body = {"object": "list", "data": [self._model_object(model) for model in models]}
        await exchange.responder.whole(200, dump(body))

    async def _model(self, exchange: Exchange) -> None:
        name = (exchange.path_params or {}).get("model_id", "")
        model = replace(self._desk.preparer.model(name), name=name)
        await exchange.responder.whole(200, dump(self._model_object(model)))

    async def _tokenize(self, exchange: Exchange) -> None:
        raw = await self._read(exchange)
        body = await self._parse(raw, lambda parsed: parse_tokenize(parsed, self._limits))
        model = self._desk.preparer.model(body.model)
        if isinstance(body.prompt, ChatInput):
            check_turns(body.prompt, self._limits, "messages")
        else:
            check_text(body.prompt.text, "prompt")
        deadline = exchange.received_at + self._limits.default_timeout_ms / 1000
        ids = await self._desk.preparer.tokenize(
            body.prompt, body.add_special_tokens, deadline, "prompt", model
        )
        answer = {
            "count": len(ids),
            "max_model_len": model.context_length,
            "tokens": ids.tolist(),
        }
        await exchange.responder.whole(200, dump(answer))

    async def _detokenize(self, exchange: Exchange) -> None:
        raw = await self._read(exchange)
        name, tokens = await self._parse(raw, parse_detokenize)
        model = self._desk.preparer.model(name)
        text = self._desk.preparer.detokenize(tokens.token_ids, "tokens", model)
        await exchange.responder.whole(200, dump({"prompt": text}))

    async def _health(self, exchange: Exchange) -> None:
        await exchange.responder.whole(200, dump({"status": "ok"}))

    async def _ready(self, exchange: Exchange) -> None:
        is_ready, reason = self._desk.is_ready()
        if is_ready:
            # Served all the same, so no prober may take it out; but somebody should look.
            degraded = {"degraded": ["prefix_hints"]} if self._desk.is_degraded else {}
            await exchange.responder.whole(200, dump({"status": "ready", **degraded}))
        else:
            await exchange.responder.whole(503, dump({"status": "not ready", "reason": reason}))

    async def _metrics(self, exchange: Exchange) -> None:
        content_type, body = self._hooks.render_metrics()
        await exchange.responder.whole(200, body, content_type)

    async def _read(self, exchange: Exchange) -> bytes:
        check_body_headers(exchange.headers)
        return await read_body(
            exchange.receive,
            exchange.headers,
            self._limits.max_body_bytes,
            self._config.http_body_timeout_s,
        )

    async def _parse(self, raw: bytes, parse: Callable[[Any], T]) -> T:
        depth = self._limits.max_json_depth
        if len(raw) <= _INLINE_PARSE_BYTES:
            return parse(parse_json(raw, depth))
        return await self._pool.run(
            lambda: parse(parse_json(raw, depth)), self._config.http_body_timeout_s
        )

    def _with_headers(self, spec: GenerateSpec, exchange: Exchange) -> GenerateSpec:
        """Add what clients say in headers; values are checked with the rest."""
        mode = exchange.headers.get(spec.names.force_mode)
        if mode is not None:
            spec = replace(spec, force_mode=mode.upper())
        return replace(
            spec,
            timeout_ms=_milliseconds(exchange, spec.names.timeout),
            slo_ttft_ms=_milliseconds(exchange, spec.names.slo_ttft),
            slo_tpot_ms=_milliseconds(exchange, spec.names.slo_tpot),
        )

    def _idempotency_key(self, exchange: Exchange) -> str:
        key = exchange.headers.get(IDEMPOTENCY_KEY.name, "")
        if len(key) > self._limits.max_id_bytes:
            raise RequestError(
                "invalid_argument",
                f"{IDEMPOTENCY_KEY.name} is longer than {self._limits.max_id_bytes} bytes",
                param=IDEMPOTENCY_KEY.name,
            )
        return key

    def _facts(self, exchange: Exchange, request: OpenAIRequest, spec: GenerateSpec) -> AnswerFacts:
        model = self._desk.preparer.exactly(spec)
        timing = exchange.headers.get(TIMING.name, "").lower() in _TRUE
        return AnswerFacts(
            request_id=exchange.request_id,
            model=model.name,
            created=self._clock.unix_ms() // 1000,
            fingerprint=f"fp_{model.weights_digest[:12]}",
            is_chat=request.is_chat,
            logprobs=request.spec.logprobs,
            top_logprobs=request.spec.top_logprobs,
            with_usage=request.include_usage,
            with_timing=timing,
        )

    def _model_object(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "isthmus",
            "max_model_len": model.context_length,
        }


class _LiveStream:
    """Writes deltas of one stream in the moment they come."""

    def __init__(self, responder: Responder, events: StreamWriter) -> None:
        self.events = events
        self.sink = LiveSink(self)
        self._responder = responder

    def write_now(self, output: ChoiceDelta) -> bool:
        """Write it, unless the client lags."""
        transport = self._responder.transport_now()
        if transport is None:
            return False
        data = self.events.delta(output)
        if data:
            transport.write(chunk(data))
        return True

    def writer(self) -> TextWriter | None:
        """Give what writes plain text of the only choice, unless the client lags."""
        connection, frame = self._responder.connection, self.events.frame_of(0)
        if connection is None or frame is None:
            return None
        return _EventWriter(connection, frame).write

    def note_written(self, num_tokens: int) -> None:
        """Keep the count of what was written that way."""
        self.events.note_written(0, num_tokens)


# Of single tokens, which are few and come again and again.
_json_of = functools.lru_cache(_MAX_JSON_TEXTS)(json_text)


class _EventWriter:
    """Writes one event for each text, with the shortest way of everything."""

    __slots__ = ("_flow", "_head", "_heads", "_tail", "_transport")

    def __init__(self, connection: Connection, frame: tuple[bytes, bytes]) -> None:
        self._flow, self._transport = connection.flow, connection.transport
        self._head, tail = frame
        self._tail = tail + CHUNK_END
        self._heads: dict[int, bytes] = {}  # by the length of what they stand before

    def write(self, text: str) -> bool:
        transport = self._transport
        if self._flow.write_paused or transport.is_closing():
            return False
        data = _json_of(text)
        head = self._heads.get(len(data))
        if head is None:
            size = len(self._head) + len(data) + len(self._tail) - len(CHUNK_END)
            head = self._heads[len(data)] = chunk_head(size) + self._head
        transport.write(head + data + self._tail)
        return True


def _writer(facts: AnswerFacts) -> StreamWriter:
    return CountingWriter(facts) if facts.with_timing else StreamWriter(facts)


def _route(spec: RouteSpec, endpoint: Endpoint) -> HttpRoute:
    return HttpRoute(spec.path, spec.method, endpoint)


def _milliseconds(exchange: Exchange, name: str) -> int:
    """Read a header of whole milliseconds; 0 when it is absent."""
    value = exchange.headers.get(name, "0")
    if not (value.isascii() and value.isdigit() and len(value) < 12):
        raise RequestError(
            "invalid_argument", f"{name} must be a whole number of milliseconds", param=name
        )
    return int(value)


def _where_headers(end: RequestEnd) -> dict[str, str]:
    timing = end.timing
    named = {
        MODE.name: timing.mode,
        ROUTE.name: "local" if timing.routed_locally else "",
        PLANE.name: timing.plane,
        PREFILL_WORKER.name: timing.prefill_worker,
        DECODE_WORKER.name: timing.decode_worker,
    }
    return {name: value for name, value in named.items() if value}
