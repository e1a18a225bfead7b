"""Bytes that are no message: a coded error instead of grpc's stack trace and UNKNOWN."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.common.errors import RequestError
from services.gateway.grpc_call import AnyContext, AnyHandler, abort

_UNDECODABLE = object()


class DecodeInterceptor(grpc.aio.ServerInterceptor):
    """Lets handlers of single requests see only requests that could be parsed."""

    def __init__(self) -> None:
        # By method: what it wraps, and how. Only methods of services get here with a handler.
        self._guarded: dict[str, tuple[AnyHandler, AnyHandler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> AnyHandler | None:
        """Wrap the handler, if it takes one request and parses it."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or not handler.request_deserializer:
            return handler
        method = handler_call_details.method
        known = self._guarded.get(method)
        if known is None or known[0] is not handler:
            known = self._guarded[method] = handler, _guarded(handler, handler.request_deserializer)
        return known[1]


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
    if inspect.isasyncgenfunction(inner):
        raise TypeError(f"{inner} is a generator: handlers here write their responses")

    async def call(request: Any, context: AnyContext) -> Any:
        if request is _UNDECODABLE:
            await _refuse(context)
        return await inner(request, context)

    return make(call, deserialize, handler.response_serializer)


async def _refuse(context: AnyContext) -> None:
    error = RequestError("invalid_argument", "the request is not a valid protobuf message")
    await abort(context, error)
