"""Bytes that are no message: a coded error instead of grpc's stack trace and UNKNOWN."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.common.errors import RequestError
from services.gateway.grpc_call import AnyContext, AnyHandler, abort

_UNDECODABLE = object()


class DecodeInterceptor(grpc.aio.ServerInterceptor):
    """Lets handlers of single requests see only requests that could be parsed."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> AnyHandler | None:
        """Wrap the handler, if it takes one request and parses it."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or not handler.request_deserializer:
            return handler
        return _guarded(handler, handler.request_deserializer)


def _guarded(handler: Any, parse: Callable[[bytes], Any]) -> AnyHandler:
    def deserialize(raw: bytes) -> Any:
        try:
            return parse(raw)
        except DecodeError:
            return _UNDECODABLE

    inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    # grpc looks at what kind of function a handler is, so each kind keeps its own.
    guard = _generator(inner) if inspect.isasyncgenfunction(inner) else _coroutine(inner)
    return make(guard, deserialize, handler.response_serializer)


def _generator(inner: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    async def stream(request: Any, context: AnyContext) -> AsyncIterator[Any]:
        if request is _UNDECODABLE:
            await _refuse(context)
        async with aclosing(inner(request, context)) as responses:
            async for response in responses:
                yield response

    return stream


def _coroutine(inner: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: AnyContext) -> Any:
        if request is _UNDECODABLE:
            await _refuse(context)
        return await inner(request, context)

    return call


async def _refuse(context: AnyContext) -> None:
    error = RequestError("invalid_argument", "the request is not a valid protobuf message")
    await abort(context, error)
