"""Calls to one worker beside its Link, on an operator's word: a deadline each, errors of ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from services.common.errors import ERROR_TABLE, RequestError
from services.pb import worker_pb2_grpc
from services.router.config import LinkConfig
from services.router.link import LinkBroken, open_channel
from services.router.view import WorkerView

CALL_TIMEOUT_S = 5.0

Answer = TypeVar("Answer")


async def call_worker(
    worker: WorkerView,
    config: LinkConfig,
    call: Callable[[worker_pb2_grpc.WorkerAsyncStub], Awaitable[Answer]],
) -> Answer:
    """Make one call over a channel of its own; `call` sets the deadline. Raises RequestError."""
    try:
        async with open_channel(worker.info.address, config) as channel:
            return await call(worker_pb2_grpc.WorkerStub(channel))
    except LinkBroken as error:
        raise RequestError("worker_lost", f"{worker.worker_id}: {error}") from None
    except grpc.aio.AioRpcError as error:
        raise _translate(worker, error) from None


def _translate(worker: WorkerView, error: grpc.aio.AioRpcError) -> RequestError:
    """Keep the worker's own code where it gave one."""
    details = error.details() or ""
    code, _, message = details.partition(": ")
    if code in ERROR_TABLE:
        return RequestError(code, f"{worker.worker_id}: {message}")
    status = error.code()
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestError("deadline_exceeded", f"{worker.worker_id} did not answer in time")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return RequestError(
            "unsupported_parameter", f"{worker.worker_id} is of a version that cannot do this"
        )
    return RequestError("worker_lost", f"{worker.worker_id} cannot be reached: {status.name}")
