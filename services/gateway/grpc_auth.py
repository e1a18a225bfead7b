"""Default deny in front of every RPC, known or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc

from services.common.errors import IsthmusError
from services.gateway.auth import GRPC_POLICY, Authenticator, is_open
from services.gateway.grpc_call import AnyContext, AnyHandler, abort, text_metadata


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through if its method is open or its key is known."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> AnyHandler | None:
        """Refuse before the handler is even looked up, so that names do not leak either."""
        if not is_open(GRPC_POLICY, handler_call_details.method):
            headers = text_metadata(handler_call_details.invocation_metadata)
            try:
                self._authenticator.authenticate(headers)
            except IsthmusError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: IsthmusError) -> AnyHandler:
    # Streaming on both sides: it answers at once, without waiting for a request message.
    async def refuse(_requests: object, context: AnyContext) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
