"""The gRPC front door: isthmus.v1.Inference over the same desk as the HTTP door."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import numpy as np
import numpy.typing as npt

from services.common.clock import Clock
from services.common.errors import IsthmusError, RequestError
from services.common.ids import RequestId, new_request_id
from services.gateway.auth import Caller
from services.gateway.errors import cut_off_error, internal_error, is_own_cancel
from services.gateway.frame_queue import FrameQueue
from services.gateway.front_desk import FrontDesk
from services.gateway.grpc_call import ADMITTED, AnyContext, abort
from services.gateway.grpc_spec import (
    add_choice_end,
    add_request_end,
    chat_input,
    delta_frame,
    parse_generate,
    unpack_ids,
)
from services.gateway.hooks import GatewayHooks, RequestRecord, client_id_of
from services.gateway.http_io import traceparent_of
from services.gateway.input_bounds import check_count, check_text
from services.gateway.rate_limits import rate_headers
from services.gateway.spec import ChatInput, GenerateSpec, TextInput
from services.gateway.validate import Arrival, check_turns, session_of
from services.gateway.wire_names import (
    CLIENT_REQUEST_ID,
    FORCE_MODE,
    GRPC_CLIENT_REQUEST_ID,
    REQUEST_ID,
    SESSION,
    TRACEPARENT,
)
from services.kv.hashing import pack_token_ids
from services.pb import inference_pb2, inference_pb2_grpc
from services.resilience.tenant_limiter import Verdict
from services.router.api import ChoiceDelta, ChoiceEnd, RequestEnd, RouterOutput, TextWriter
from services.router.output_sink import LiveSink
from services.telemetry.logs import get_logger

log = get_logger(__name__)

# Of bytes: its handler is registered as one of a single response, whose `write` takes no message.
GenerateContext: TypeAlias = "grpc.aio.ServicerContext[inference_pb2.GenerateRequest, bytes]"
_MAX_TRANSPORT_DEADLINE_S = 1e9  # grpc reports "no deadline" as a huge number on some paths


@dataclass(slots=True)
class _Progress:
    """What a request has come to, for its record."""

    request_id: RequestId
    received_at: float
    code: str = "ok"
    ttft_s: float | None = None
    end: RequestEnd | None = None
    client_request_id: str = ""
    caller: Caller = field(default_factory=Caller)
    peer: str = ""


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves Generate, ListModels, Tokenize and Detokenize."""

    def __init__(self, desk: FrontDesk, hooks: GatewayHooks) -> None:
        self._desk = desk
        self._hooks = hooks
        self._clock = desk.clock
        self._limits = desk.config.limits

    # A coroutine that writes: a generator between each layer cost as much as the rest of the door.
    async def Generate(  # type: ignore[override]  # the stubs know generators only
        self,
        request: inference_pb2.GenerateRequest,
        context: GenerateContext,
    ) -> bytes:
        """Write a request's frames but for the last, which is returned and goes with the status.

        Every way a request can end gives the client a status.
        """
        progress = _Progress(new_request_id(), self._clock.now())
        failure: IsthmusError | None = None
        last = b""
        try:
            last = await self._answer(request, context, progress)
        except IsthmusError as error:
            failure = error
        except TimeoutError:
            failure = RequestError("deadline_exceeded", "the request's deadline passed")
        except asyncio.CancelledError:
            if is_own_cancel():
                progress.code = "cancelled"
                raise
            # A handler that lets this out never answers, and its client hangs.
            failure = cut_off_error()
        except Exception:  # outermost for one request
            log.exception("gateway.grpc_failed", request_id=progress.request_id)
            failure = internal_error(progress.request_id)
        finally:
            if failure is not None:
                progress.code = failure.spec.code
            # Noted while the status is on its way.
            ended_at = self._clock.now()
            asyncio.get_running_loop().call_soon(self._record, "Generate", progress, ended_at)
        if failure is not None:
            await abort(context, failure)
        return last

    async def ListModels(
        self,
        request: inference_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.ListModelsRequest, inference_pb2.ListModelsResponse
        ],
    ) -> inference_pb2.ListModelsResponse:
        """List what the cluster serves."""
        models = [
            inference_pb2.Model(
                id=model.name,
                context_length=model.context_length,
                vocab_size=model.vocab_size,
                weights_digest=model.weights_digest,
            )
            for model in self._desk.preparer.models()
        ]
        return inference_pb2.ListModelsResponse(models=models)

    async def Tokenize(
        self,
        request: inference_pb2.TokenizeRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.TokenizeRequest, inference_pb2.TokenizeResponse
        ],
    ) -> inference_pb2.TokenizeResponse:
        """Turn text or a chat into ids."""
        progress = _Progress(new_request_id(), self._clock.now())
        try:
            with self._admitted(context, progress):
                ids = await self._tokenize(request, progress.received_at, _time_left(context))
        except IsthmusError as error:
            progress.code = error.spec.code
            await abort(context, error)
        finally:
            self._record("Tokenize", progress, self._clock.now())
        return inference_pb2.TokenizeResponse(token_ids=pack_token_ids(ids), count=len(ids))

    async def Detokenize(
        self,
        request: inference_pb2.DetokenizeRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.DetokenizeRequest, inference_pb2.DetokenizeResponse
        ],
    ) -> inference_pb2.DetokenizeResponse:
        """Turn ids into text."""
        progress = _Progress(new_request_id(), self._clock.now())
        try:
            with self._admitted(context, progress):
                model = self._desk.preparer.model(request.model)
                ids = unpack_ids(request.token_ids, "token_ids")
                text = self._desk.preparer.detokenize(ids, "token_ids", model)
        except IsthmusError as error:
            progress.code = error.spec.code
            await abort(context, error)
        finally:
            self._record("Detokenize", progress, self._clock.now())
        return inference_pb2.DetokenizeResponse(text=text)

    def _admitted(
        self, context: AnyContext, progress: _Progress
    ) -> AbstractContextManager[Verdict]:
        """Let a call in that the interceptor has let through; note whose it is."""
        caller = ADMITTED.get().caller
        progress.caller, progress.peer = caller, context.peer()
        return self._desk.accounting.admitted(caller.tenant)

    async def _answer(
        self,
        request: inference_pb2.GenerateRequest,
        context: GenerateContext,
        progress: _Progress,
    ) -> bytes:
        metadata = ADMITTED.get().metadata
        progress.client_request_id = client_id_of(
            request.request_id or metadata.get(CLIENT_REQUEST_ID.name, "")
        )
        with self._admitted(context, progress) as verdict:
            self._check_ids(request)
            head = (
                *_initial_metadata(request, progress.request_id),
                *rate_headers(verdict).items(),
            )
            # Sent while the request is on its way to a worker.
            sending = asyncio.create_task(context.send_initial_metadata(head))
            writer = _FrameWriter(request.return_token_ids, sending, context, progress, self._clock)
            try:
                spec, arrival = self._parse(request, context, metadata, progress)
                async with asyncio.timeout(self._desk.time_left_s(spec, arrival)):
                    await self._run(request, spec, arrival, writer)
            finally:
                writer.close()
                await _end_of(sending)  # an error's status must not overtake it
                sending.exception()  # seen: where there is one the call is gone
            if writer.last is None:
                raise RequestError("internal", "the answer ended without its end")
            return writer.last.SerializeToString()

    async def _run(
        self,
        request: inference_pb2.GenerateRequest,
        spec: GenerateSpec,
        arrival: Arrival,
        writer: _FrameWriter,
    ) -> None:
        key, digest = _idempotency(request)
        # The first token never goes through it: it says more than the others.
        sink = None if spec.max_tokens == 1 else writer.sink
        try:
            await self._desk.generate(spec, arrival, writer.write, key, digest, sink)
        except IsthmusError as error:
            if error.spec.code != "slow_reader":  # who does not read is not waited for
                await writer.drained()  # an error's status must not overtake what came before it
            raise

    def _parse(
        self,
        request: inference_pb2.GenerateRequest,
        context: GenerateContext,
        metadata: Mapping[str, str],
        progress: _Progress,
    ) -> tuple[GenerateSpec, Arrival]:
        caller, mode = progress.caller, metadata.get(FORCE_MODE.name)
        spec = parse_generate(request, self._limits, None if mode is None else mode.upper())
        arrival = Arrival(
            request_id=progress.request_id,
            received_at=progress.received_at,
            tenant=caller.tenant,
            namespace=caller.namespace,
            traceparent=traceparent_of(metadata.get(TRACEPARENT.name, "")),
            time_left_s=_time_left(context),
            session=session_of(metadata.get(SESSION.name, ""), self._limits),
        )
        return self._desk.preparer.resolved(spec, arrival), arrival

    async def _tokenize(
        self, request: inference_pb2.TokenizeRequest, received_at: float, time_left: float | None
    ) -> npt.NDArray[np.uint32]:
        model = self._desk.preparer.model(request.model)
        prompt: TextInput | ChatInput
        if request.WhichOneof("input") == "chat":
            prompt = chat_input(request.chat, self._limits, "chat.messages")
            check_turns(prompt, self._limits, "chat.messages")
        else:
            prompt = TextInput(check_text(request.text, "text"))
            check_count(len(request.text), self._limits.max_body_bytes, "text", "characters")
        timeout_s = self._limits.default_timeout_ms / 1000
        if time_left is not None:
            timeout_s = min(timeout_s, time_left)
        return await self._desk.preparer.tokenize(
            prompt, True, received_at + timeout_s, "text", model
        )

    def _check_ids(self, request: inference_pb2.GenerateRequest) -> None:
        for param in ("request_id", "idempotency_key"):
            size = len(getattr(request, param).encode())
            check_count(size, self._limits.max_id_bytes, param, "bytes")

    def _record(self, route: str, progress: _Progress, ended_at: float) -> None:
        self._hooks.request_finished(
            RequestRecord(
                door="grpc",
                route=route,
                code=progress.code,
                duration_s=ended_at - progress.received_at,
                request_id=progress.request_id,
                ttft_s=progress.ttft_s,
                end=progress.end,
                client_request_id=progress.client_request_id,
                tenant=progress.caller.tenant,
                key_id=progress.caller.key_id,
                peer=progress.peer,
            )
        )


class _FrameWriter:
    """Writes a request's outputs. What is there at once shares a frame where it may.

    Tokens that come one by one do not wake the request's task: they go into a queue.
    """

    def __init__(
        self,
        with_ids: bool,
        head: asyncio.Task[None],
        context: GenerateContext,
        progress: _Progress,
        clock: Clock,
    ) -> None:
        """Start with nothing written; `head` sends what comes before the first frame."""
        self._with_ids = with_ids
        self._head = head
        self._context = context
        self._progress = progress
        self._clock = clock
        # An end waits for what follows it: the last frame carries usage.
        self._pending: inference_pb2.GenerateFrame | None = None
        self._queue: FrameQueue | None = None  # made when something goes through the sink
        self._next_index = 0  # where there is one choice
        self.last: inference_pb2.GenerateFrame | None = None  # for who sends the status
        self.sink = LiveSink(self)

    async def drained(self) -> None:
        """Wait until what went through the sink is written."""
        if self._queue is not None:
            await self._queue.drained()

    def close(self) -> None:
        """Write nothing more."""
        self.sink.is_open = False
        if self._queue is not None:
            self._queue.close()

    # -- Door, of the sink -------------------------------------------------------------------

    def write_now(self, output: ChoiceDelta) -> bool:
        """Put it into the queue; not the first one, which has to wait for the metadata."""
        if self._progress.ttft_s is None:
            return False
        if not self._put(delta_frame(output, with_ids=self._with_ids)):
            return False
        self._next_index = output.first_index + len(output.token_ids)
        return True

    def writer(self) -> TextWriter | None:
        """Give what writes plain text, where the client wants nothing else."""
        return None if self._with_ids or self._progress.ttft_s is None else self._write_text

    def note_written(self, num_tokens: int) -> None:
        """Nothing to be done: frames count themselves."""

    def _write_text(self, text: str) -> bool:
        frame = inference_pb2.GenerateFrame(first_index=self._next_index, num_tokens=1, text=text)
        if not self._put(frame):
            return False
        self._next_index += 1
        return True

    def _put(self, frame: inference_pb2.GenerateFrame) -> bool:
        if self._queue is None:
            self._queue = FrameQueue(self._send)
        return self._queue.put(frame)

    # -- what the request's task writes ------------------------------------------------------

    async def write(self, outputs: Sequence[RouterOutput]) -> None:
        """Write frames, but for the end of a choice that may be the last, and the last of all."""
        self.sink.is_open = False  # it must not overtake these
        if self._pending is None and self._queue is not None:
            self._pending = self._queue.take_back()
        for output in outputs:
            if isinstance(output, ChoiceDelta):
                await self._flush()
                self._pending = delta_frame(output, with_ids=self._with_ids)
                self._next_index = output.first_index + len(output.token_ids)
            elif isinstance(output, ChoiceEnd):
                await self._add_end(output)
            elif self._pending is not None:
                add_request_end(self._pending, output)
                self._progress.end = output
                self.last = await self._take_pending()
        if self._pending is not None and not self._pending.HasField("finish"):
            await self._flush()
        self.sink.is_open = self._pending is None and self._progress.end is None

    async def _add_end(self, end: ChoiceEnd) -> None:
        pending = self._pending
        if pending is None or pending.choice != end.choice or pending.HasField("finish"):
            await self._flush()
            pending = inference_pb2.GenerateFrame(choice=end.choice, first_index=end.num_tokens)
            self._pending = pending
        add_choice_end(pending, end)

    async def _flush(self) -> None:
        frame = await self._take_pending()
        if frame is not None:
            await self._send(frame)

    async def _take_pending(self) -> inference_pb2.GenerateFrame | None:
        """Give what is to be written next once all before it is."""
        frame, self._pending = self._pending, None
        if frame is None:
            return None
        progress = self._progress
        if progress.ttft_s is None:
            await _end_of(self._head)
            frame.request_id = progress.request_id
            progress.ttft_s = self._clock.now() - progress.received_at
        if self._queue is not None:
            await self._queue.drained()
        return frame

    async def _send(self, frame: inference_pb2.GenerateFrame) -> None:
        await self._context.write(frame.SerializeToString())


def add_inference(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """Serve Inference.

    Generate goes by as a method of one response, which is the same on the wire: only of those does
    gRPC send the last message and the status in one batch, for one event instead of two.
    """
    generate: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
        servicer.Generate,
        request_deserializer=inference_pb2.GenerateRequest.FromString,
    )
    name = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
    # Who is added first is asked first.
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(name, {"Generate": generate}),)
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)


async def _end_of(task: asyncio.Task[None]) -> None:
    """Wait for a task without cancelling it where the waiting is cancelled."""
    if not task.done():
        await asyncio.wait((task,))


def _initial_metadata(
    request: inference_pb2.GenerateRequest, request_id: RequestId
) -> tuple[tuple[str, str], ...]:
    pairs = [(REQUEST_ID.name, str(request_id))]
    own = request.request_id
    if own and own.isascii() and own.isprintable():
        pairs.append((GRPC_CLIENT_REQUEST_ID.name, own))
    return tuple(pairs)


def _idempotency(request: inference_pb2.GenerateRequest) -> tuple[str, bytes]:
    if not request.idempotency_key:
        return "", b""
    content = inference_pb2.GenerateRequest()
    content.CopyFrom(request)
    content.request_id = ""  # a retry may carry a new one
    raw = content.SerializeToString(deterministic=True)
    return request.idempotency_key, hashlib.sha256(b"grpc\0" + raw).digest()


def _time_left(context: AnyContext) -> float | None:
    left = context.time_remaining()
    return None if left is None or left > _MAX_TRANSPORT_DEADLINE_S else float(left)
