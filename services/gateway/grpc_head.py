"""What a call is told at its start, sent as late as it may be: mostly with all the rest.

gRPC's Python for servers sends metadata of ours in a batch of their own, and each batch is an event
that its thread hands to the loop: up to an eighth of a request. Its core takes metadata, message
and status at once, and so do the classes under its Python. Those are private, so only versions
that were looked at are used this way; with others the metadata go ahead (ADR 0049).
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any, NoReturn

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined, unused-ignore]  # types, or none

from services.gateway.grpc_call import AnyContext

# A client that waits for longer is told meanwhile what its request is called here.
HEAD_AFTER_S = 2.0
_NO_FLAGS = 0
_private: Any = cygrpc
IS_KNOWN_VERSION = grpc.__version__.startswith("1.85.")

Metadata = tuple[tuple[str, str], ...]


class CallHead:
    """The initial metadata of one call: sent once, before or with its first message."""

    def __init__(self, context: AnyContext, metadata: Metadata) -> None:
        """Belong to a call of which nothing was sent yet."""
        self._context = context
        self._metadata = metadata
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if IS_KNOWN_VERSION:
            self._timer = asyncio.get_running_loop().call_later(HEAD_AFTER_S, self.begin)
        else:
            self.begin()  # while the request is on its way to a worker

    def begin(self) -> asyncio.Task[None]:
        """Send it ahead, unless that has begun."""
        self.close()
        if self._task is None:
            self._task = asyncio.create_task(self._context.send_initial_metadata(self._metadata))
        return self._task

    async def sent(self) -> None:
        """Send it if that has not begun, and wait for its end; no cancel ends it half-way."""
        task = self.begin()
        if not task.done():
            await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # seen: where there is one the call is gone

    async def finish(self, message: bytes) -> bytes:
        """Give the handler what it is to return; a call that was sent nothing ends in here."""
        self.close()
        if self._task is None:
            await _answer_whole(self._context, self._metadata, message)
        await self.sent()
        return message

    def close(self) -> None:
        """Send nothing by itself any more."""
        if self._timer is not None:
            self._timer.cancel()


async def _answer_whole(context: AnyContext, metadata: Metadata, message: bytes) -> NoReturn:
    """Send all there is to a call, with the status OK, and leave its handler."""
    status = grpc.StatusCode.OK.value[0]
    operations = (
        _private.SendInitialMetadataOperation(metadata, _NO_FLAGS),
        _private.SendMessageOperation(message, _NO_FLAGS),
        _private.SendStatusFromServerOperation((), status, "", _NO_FLAGS),
    )
    await _private.execute_batch(_state_of(context), operations, asyncio.get_running_loop())
    # gRPC does not know of it, and would send a status. It sends none for a cancelled handler.
    raise asyncio.CancelledError


def _state_of(context: AnyContext) -> Any:
    """Return what a context keeps for itself."""
    for kept in gc.get_referents(context):
        if isinstance(kept, _private.RPCState):
            return kept
    raise AssertionError("a context without the state of its call")
