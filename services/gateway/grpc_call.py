"""What every handler and interceptor of the gRPC door does with a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn, TypeAlias

import grpc

from services.common.errors import IsthmusError
from services.gateway.auth import Caller
from services.gateway.errors import grpc_status, grpc_trailers

# Any: request and response types of whichever RPC.
AnyContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
AnyHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Admitted(NamedTuple):
    """What the first interceptor has found out of a call; its handler runs in the same task."""

    caller: Caller
    metadata: Mapping[str, str]


ADMITTED: ContextVar[Admitted] = ContextVar("admitted")


async def abort(context: AnyContext, error: IsthmusError) -> NoReturn:
    """End an RPC with the error's status, details and trailers."""
    status, details = grpc_status(error)
    await context.abort(status, details, grpc_trailers(error))
    raise AssertionError("abort returned")


def text_metadata(pairs: Iterable[tuple[str, str | bytes]] | None) -> Mapping[str, str]:
    """Give a call's text metadata; grpc has made the keys lower case."""
    return {str(key): value for key, value in pairs or () if isinstance(value, str)}
