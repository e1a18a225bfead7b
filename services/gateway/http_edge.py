"""The outer edge of the HTTP door: ids, keys, routing, and one answer whatever goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from services.common.access import HTTP_POLICY, check_policy, check_scopes, is_open
from services.common.address import join_host_port
from services.common.clock import Clock
from services.common.errors import IsthmusError, RequestError
from services.common.ids import RequestId, new_request_id
from services.gateway.auth import Authenticator, Caller
from services.gateway.errors import cut_off_error, internal_error, is_own_cancel
from services.gateway.hooks import GatewayHooks, RequestRecord, client_id_of
from services.gateway.http_io import ClientGone, Responder
from services.gateway.http_protocol import CONNECTION_KEY
from services.gateway.wire_names import CLIENT_REQUEST_ID, OPENAI_REQUEST_ID, REQUEST_ID
from services.router.api import RequestEnd
from services.telemetry.logs import get_logger

log = get_logger(__name__)

_EXCHANGE_KEY = "isthmus.exchange"


@dataclass(slots=True)
class Exchange:
    """One HTTP request and the means to answer it."""

    request_id: RequestId
    received_at: float
    headers: Headers
    receive: Receive
    responder: Responder
    caller: Caller = field(default_factory=Caller)
    peer: str = ""
    route: str = "unknown"  # the template, bounded, for metrics
    path_params: Mapping[str, str] | None = None
    code: str = "ok"
    ttft_s: float | None = None
    end: RequestEnd | None = None


Endpoint = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """A path template, its method (GET brings HEAD), and who answers."""

    path: str
    method: str
    endpoint: Endpoint


class _RouteApp:
    """Hands an exchange to its endpoint; an object, so that the router treats it as ASGI."""

    def __init__(self, route: HttpRoute) -> None:
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[_EXCHANGE_KEY]
        exchange.route = self._route.path
        exchange.path_params = scope.get("path_params")
        check_scopes(HTTP_POLICY[self._route.path], exchange.caller.scopes)
        await self._route.endpoint(exchange)


class HttpEdge:
    """The ASGI application. Refuses to be built with a route that has no access policy."""

    def __init__(
        self,
        routes: Sequence[HttpRoute],
        authenticator: Authenticator,
        hooks: GatewayHooks,
        clock: Clock,
    ) -> None:
        check_policy(HTTP_POLICY, (route.path for route in routes))
        self.routes = tuple(routes)
        self._authenticator = authenticator
        self._hooks = hooks
        self._clock = clock
        # No slash redirects: one spelling a route, the one the policy table has.
        self._router = Router(
            [Route(r.path, _RouteApp(r), methods=[r.method]) for r in routes],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            raise RuntimeError("only HTTP is served here")
        request_id = new_request_id()
        ids = {OPENAI_REQUEST_ID.name: request_id, REQUEST_ID.name: request_id}
        exchange = Exchange(
            request_id=request_id,
            received_at=self._clock.now(),
            headers=Headers(scope=scope),
            receive=receive,
            responder=Responder(
                send, ids, is_head=scope["method"] == "HEAD", connection=scope.get(CONNECTION_KEY)
            ),
            peer=join_host_port(*scope["client"][:2]) if scope.get("client") else "",
            route=scope["path"] if scope["path"] in HTTP_POLICY else "unknown",
        )
        scope[_EXCHANGE_KEY] = exchange
        scope["app"] = self  # makes the router raise for 404 and 405 instead of answering
        try:
            await self._answer(scope, exchange, receive, send)
        finally:
            self._record(exchange)

    async def _answer(self, scope: Scope, exchange: Exchange, receive: Receive, send: Send) -> None:
        try:
            if not is_open(HTTP_POLICY, scope["path"]):
                exchange.caller = self._authenticator.authenticate(exchange.headers)
            await self._router(scope, receive, send)
        except ClientGone:
            exchange.code = "cancelled"
        except HTTPException as error:
            await _refuse(exchange, _routing_error(error), error.headers)
        except IsthmusError as error:
            await _refuse(exchange, error)
        except asyncio.CancelledError:
            if is_own_cancel():
                exchange.code = "cancelled"
                raise
            await _refuse(exchange, cut_off_error())
        except Exception:  # outermost for one request
            log.exception("gateway.http_failed", request_id=exchange.request_id)
            await _refuse(exchange, internal_error(exchange.request_id))

    def _record(self, exchange: Exchange) -> None:
        self._hooks.request_finished(
            RequestRecord(
                door="http",
                route=exchange.route,
                code=exchange.code,
                duration_s=self._clock.now() - exchange.received_at,
                request_id=exchange.request_id,
                ttft_s=exchange.ttft_s,
                end=exchange.end,
                client_request_id=client_id_of(exchange.headers.get(CLIENT_REQUEST_ID.name, "")),
                tenant=exchange.caller.tenant,
                key_id=exchange.caller.key_id,
                peer=exchange.peer,
            )
        )


async def _refuse(
    exchange: Exchange, error: IsthmusError, headers: Mapping[str, str] | None = None
) -> None:
    exchange.code = error.spec.code
    if exchange.responder.has_started:
        return  # the server closes the connection of a response that is not complete
    await exchange.responder.error(error, headers)


def _routing_error(error: HTTPException) -> RequestError:
    if error.status_code == 405:
        return RequestError("method_not_allowed", "the method is not allowed on this route")
    return RequestError("not_found", "no such route")
