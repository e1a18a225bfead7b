"""Who may call a worker: certificates against the policy table, a token for its metrics."""

from __future__ import annotations

import contextlib
import hmac
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from services.common.access import GRPC_POLICY, Access
from services.common.bounded_file import read_secret
from services.common.clock import Clock
from services.common.secret import Secret
from services.runtime.tls import SAN
from services.runtime.watched_file import WatchedFile
from services.telemetry.logs import get_logger

log = get_logger(__name__)

_TOKEN_SETTING = "worker.metrics_token_file"
_MIN_TOKEN_BYTES, _MAX_TOKEN_BYTES = 16, 4096

# Any: request and response types of whichever RPC.
AnyContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
AnyHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class PeerAuth(grpc.aio.ServerInterceptor):
    """Lets a peer call what its certificate allows; the handshake has verified the certificate."""

    def __init__(self, router_names: frozenset[str]) -> None:
        self._router_names = router_names

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> AnyHandler | None:
        """Put the check in front of the handler: only there is it known who calls."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or GRPC_POLICY.get(method) is Access.OPEN:
            return handler

        async def check(context: AnyContext) -> None:
            if not may_call(method, _names_of(context), self._router_names):
                log.warning("worker.peer_refused", method=method, peer=context.peer())
                await context.abort(
                    grpc.StatusCode.PERMISSION_DENIED,
                    "permission_denied: the certificate does not allow this",
                )

        guarded: AnyHandler = _guarded(handler, check)
        return guarded


def may_call(method: str, names: frozenset[str], router_names: frozenset[str]) -> bool:
    """Whether a peer whose certificate has these names may call a method; no names = no TLS."""
    access = GRPC_POLICY.get(method)
    if access is Access.PEER:
        return bool(names)
    return access is Access.ROUTER and not names.isdisjoint(router_names)


def scrape_guard(token_file: str, clock: Clock) -> Callable[[str], bool]:
    """Say who may read /metrics, by the `authorization` header; no file = whoever gets there."""
    if not token_file:
        return lambda _authorization: True
    path = Path(token_file)

    def load() -> Secret:
        return read_secret(_TOKEN_SETTING, path, _MIN_TOKEN_BYTES, _MAX_TOKEN_BYTES)

    watched = WatchedFile(_TOKEN_SETTING, (path,), load, clock)

    def may_read(authorization: str) -> bool:
        expected = b"Bearer " + watched.get().reveal()
        return hmac.compare_digest(authorization.encode("utf-8", "surrogateescape"), expected)

    return may_read


def _names_of(context: AnyContext) -> frozenset[str]:
    found = context.auth_context().get(SAN, ())
    return frozenset(name.decode("utf-8", "replace") for name in found)


_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


# Any: the handler is a named tuple, which its stub does not say.
def _guarded(handler: Any, check: Callable[[AnyContext], Awaitable[None]]) -> Any:
    (kind,) = (kind for kind in _KINDS if getattr(handler, kind) is not None)
    behaviour = getattr(handler, kind)

    async def generate(request: Any, context: AnyContext) -> AsyncIterator[Any]:
        await check(context)
        async with contextlib.aclosing(behaviour(request, context)) as answers:
            async for answer in answers:
                yield answer

    async def answer(request: Any, context: AnyContext) -> Any:
        await check(context)
        return await behaviour(request, context)

    is_generator = inspect.isasyncgenfunction(behaviour)
    return handler._replace(**{kind: generate if is_generator else answer})
