"""Default deny in front of every RPC, known or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from services.common.access import GRPC_POLICY, Access, check_scopes, is_open
from services.common.clock import Clock
from services.common.errors import IsthmusError
from services.gateway.auth import Authenticator, Caller
from services.gateway.grpc_call import (
    ADMITTED,
    Admitted,
    AnyContext,
    AnyHandler,
    abort,
    text_metadata,
)
from services.gateway.hooks import GatewayHooks, RequestRecord
from services.gateway.wire_names import TRAILER_CODE


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through if its method is open or its key may call it; records the others."""

    def __init__(self, authenticator: Authenticator, hooks: GatewayHooks, clock: Clock) -> None:
        self._authenticator = authenticator
        self._hooks = hooks
        self._clock = clock

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
                return self._refusal(method, error)
            ADMITTED.set(Admitted(caller, headers))
            if GRPC_POLICY.get(method) is Access.ADMIN:
                handler = await continuation(handler_call_details)
                return handler and self._recorded(handler, method, caller)
        return await continuation(handler_call_details)

    def _refusal(self, method: str, error: IsthmusError) -> AnyHandler:
        # Streaming on both sides: it answers at once, without waiting for a request message.
        async def refuse(_requests: object, context: AnyContext) -> None:
            # Not before: where a call came from is known here only.
            self._record(method, error.spec.code, peer=context.peer())
            await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _recorded(self, handler: Any, method: str, caller: Caller) -> AnyHandler:
        """Have it known later who changed something, and how that ended."""
        inner = handler.unary_unary  # as all of the admin service are

        async def call(request: Any, context: AnyContext) -> Any:
            started, code = self._clock.now(), "internal"
            try:
                answer = await inner(request, context)
                code = "ok"
            except grpc.aio.AbortError:
                code = text_metadata(context.trailing_metadata()).get(TRAILER_CODE.name, code)
                raise
            except asyncio.CancelledError:
                code = "cancelled"  # nobody waits any more; it may be done all the same
                raise
            finally:
                duration_s = self._clock.now() - started
                self._record(method, code, caller, context.peer(), duration_s)
            return answer

        return grpc.unary_unary_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )

    def _record(
        self,
        method: str,
        code: str,
        caller: Caller | None = None,
        peer: str = "",
        duration_s: float = 0.0,
    ) -> None:
        # No handler does: those of refused calls are never reached, the admin service has no hooks.
        # Names nobody serves stay out of the labels.
        route = method.rpartition("/")[2] if method in GRPC_POLICY else "unknown"
        caller = caller or Caller()
        self._hooks.request_finished(
            RequestRecord(
                door="grpc",
                route=route,
                code=code,
                duration_s=duration_s,
                tenant=caller.tenant,
                key_id=caller.key_id,
                peer=peer,
            )
        )
