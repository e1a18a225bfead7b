"""Default deny in front of every RPC, known or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc

from services.common.access import GRPC_POLICY, Access, check_scopes, is_open
from services.common.errors import IsthmusError
from services.gateway.auth import Authenticator, Caller
from services.gateway.grpc_call import AnyContext, AnyHandler, abort, text_metadata
from services.gateway.hooks import GatewayHooks, RequestRecord


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through if its method is open or its key may call it; records the others."""

    def __init__(self, authenticator: Authenticator, hooks: GatewayHooks) -> None:
        self._authenticator = authenticator
        self._hooks = hooks

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> AnyHandler | None:
        """Refuse before the handler is even looked up, so that names do not leak either."""
        method = handler_call_details.method
        if not is_open(GRPC_POLICY, method):
            headers = text_metadata(handler_call_details.invocation_metadata)
            try:
                caller = self._authenticator.authenticate(headers)
                if method in GRPC_POLICY:  # else nobody serves it
                    check_scopes(GRPC_POLICY[method], caller.scopes)
            except IsthmusError as error:
                self._record(method, error.spec.code)
                return _refusal(error)
            if GRPC_POLICY.get(method) is Access.ADMIN:
                self._record(method, "ok", caller)  # who changed something must be known later
        return await continuation(handler_call_details)

    def _record(self, method: str, code: str, caller: Caller | None = None) -> None:
        # No handler does: those of refused calls are never reached, the admin service has no hooks.
        # Names nobody serves stay out of the labels.
        route = method.rpartition("/")[2] if method in GRPC_POLICY else "unknown"
        caller = caller or Caller()
        self._hooks.request_finished(
            RequestRecord(
                door="grpc",
                route=route,
                code=code,
                duration_s=0.0,
                tenant=caller.tenant,
                key_id=caller.key_id,
            )
        )


def _refusal(error: IsthmusError) -> AnyHandler:
    # Streaming on both sides: it answers at once, without waiting for a request message.
    async def refuse(_requests: object, context: AnyContext) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
