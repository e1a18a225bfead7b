"""The mock's Inference service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from time import monotonic
from typing import Any, TypeAlias

import grpc
import grpc.aio

from loadtest.mock.http_door import MODEL
from loadtest.mock.lateness import Lateness
from loadtest.mock.settings import MockSettings
from loadtest.mock.timing import Desk
from services.pb import common_pb2, inference_pb2, inference_pb2_grpc

_DEFAULT_TOKENS = 16
_FAULTS = {
    "internal": grpc.StatusCode.INTERNAL,
    "overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_TIMER_S = 1e-3
_came_s: ContextVar[float] = ContextVar("came_s")
# Any: a handler is generic in its messages, and here it may be of any method.
AnyHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# Any: the aio context is generic in what the generated code does not say.
Context = grpc.aio.ServicerContext[Any, Any]


class MockInference(inference_pb2_grpc.InferenceServicer):
    """Answers by plan."""

    def __init__(self, desk: Desk, settings: MockSettings, lateness: Lateness) -> None:
        self._desk = desk
        self._settings = settings
        self._lateness = lateness

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """Say what is served."""
        model = inference_pb2.Model(
            id=MODEL,
            context_length=self._settings.context_length,
            vocab_size=self._settings.vocab_size,
        )
        return inference_pb2.ListModelsResponse(models=[model])

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Refuse."""
        raise await _no_tokenizer(context)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Refuse."""
        raise await _no_tokenizer(context)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateFrame]:
        """Write frames when they are due."""
        wanted = request.max_tokens if request.HasField("max_tokens") else _DEFAULT_TOKENS
        if not wanted:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "invalid_request: max_tokens must not be 0"
            )
        answer = self._desk.plan(_came_s.get(), wanted)
        if answer.fault:
            await context.abort(_FAULTS[answer.fault], f"{answer.fault}: as asked for")
        # As the HTTP door does, and the router: a client that gets them with the first token reads
        # that token one wake-up later.
        await context.send_initial_metadata(())
        first_index = 0
        for index, (at_s, num_tokens) in enumerate(answer.chunks):
            if index == 0:
                await _first_instant(at_s)
            else:
                await asyncio.sleep(at_s - monotonic())
            self._lateness.note(monotonic() - at_s)
            frame = inference_pb2.GenerateFrame(
                first_index=first_index, num_tokens=num_tokens, text="word " * num_tokens
            )
            first_index += num_tokens
            if index == len(answer.chunks) - 1:
                frame.finish.reason = common_pb2.FINISH_REASON_LENGTH
                prompt_tokens = _prompt_tokens(request)
                frame.usage.prompt_tokens = prompt_tokens
                frame.usage.cached_tokens = int(prompt_tokens * self._settings.cached_share)
                frame.usage.completion_tokens = first_index
                frame.timing.mode = common_pb2.MODE_LOCAL
                frame.timing.queue_prefill_us = round(answer.queued_s * 1e6)
                frame.timing.prefill_us = round(answer.service_s * 1e6)
            yield frame


class NoteArrival(grpc.aio.ServerInterceptor):
    """Stamps a request when it comes: what gRPC does until its handler runs is not served time."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> AnyHandler | None:
        """Note the time in the task that will run the handler."""
        _came_s.set(monotonic())
        return await continuation(handler_call_details)


async def _first_instant(at_s: float) -> None:
    """Wait for it exactly: timers have whole milliseconds, and are late more often than early.

    The gap after it is less exact for that, which is one of all gaps of an answer.
    """
    await asyncio.sleep(at_s - monotonic() - _TIMER_S)
    while monotonic() < at_s:  # noqa: ASYNC110 - a part of one
        await asyncio.sleep(0)


async def _no_tokenizer(context: Context) -> AssertionError:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a mock has no tokenizer")
    return AssertionError("abort raises")


def _prompt_tokens(request: inference_pb2.GenerateRequest) -> int:
    """Count ids as they are, and words where there is text."""
    if request.HasField("token_ids"):
        return len(request.token_ids) // 4
    if request.HasField("text"):
        return len(request.text.split())
    return sum(len(message.content.split()) for message in request.chat.messages)
