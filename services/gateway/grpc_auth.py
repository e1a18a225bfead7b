"""Default deny in front of every RPC, known or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from services.common.errors import IsthmusError
from services.gateway.auth import GRPC_POLICY, Authenticator, is_open
from services.gateway.errors import grpc_status, grpc_trailers

# Any: request and response types of RPCs this interceptor knows nothing about.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through if its method is open or its key is known."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Refuse before the handler is even looked up, so that names do not leak either."""
        if not is_open(GRPC_POLICY, handler_call_details.method):
            headers = {
                str(key): value
                for key, value in handler_call_details.invocation_metadata or ()
                if isinstance(value, str)
            }
            try:
                self._authenticator.authenticate(headers)
            except IsthmusError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: IsthmusError) -> _Handler:
    status, details = grpc_status(error)

    # Streaming on both sides: it answers at once, without waiting for a request message.
    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(status, details, grpc_trailers(error))

    return grpc.stream_stream_rpc_method_handler(refuse)
