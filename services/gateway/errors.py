"""Errors as clients see them: OpenAI error objects and gRPC statuses, from the one table."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from services.common.errors import IsthmusError, RequestError
from services.gateway.rate_limits import RateLimited, rate_headers
from services.gateway.wire_names import (
    RETRY_AFTER,
    RETRY_AFTER_MS,
    SHOULD_RETRY,
    TRAILER_CODE,
    TRAILER_PARAM,
    TRAILER_RETRY_AFTER,
    TRAILER_RETRYABLE,
    WWW_AUTHENTICATE,
)

_STATUS_BY_NAME = {status.name: status for status in grpc.StatusCode}
_MAX_GRPC_DETAILS = 1024  # the status travels in a header


def openai_error(error: IsthmusError) -> dict[str, Any]:
    """Build the body OpenAI clients expect."""
    return {
        "error": {
            "message": error.message,
            "type": error.spec.openai_type,
            "param": error.param,
            "code": error.spec.code,
        }
    }


def http_headers(error: IsthmusError) -> dict[str, str]:
    """Give the headers that go with an error."""
    headers = {}
    if error.retry_after_ms is not None:
        headers[RETRY_AFTER.name] = str(max(1, -(-error.retry_after_ms // 1000)))
        headers[RETRY_AFTER_MS.name] = str(error.retry_after_ms)
    if isinstance(error, RateLimited):
        headers |= rate_headers(error.verdict)
    if error.spec.code == "unauthenticated":
        headers[WWW_AUTHENTICATE.name] = "Bearer"
    if not error.spec.retryable:
        headers[SHOULD_RETRY.name] = "false"  # the openai client would retry any 409 and 5xx
    return headers


def grpc_status(error: IsthmusError) -> tuple[grpc.StatusCode, str]:
    """Give the status and details; details start with the stable code."""
    details = f"{error.spec.code}: {error.message}"[:_MAX_GRPC_DETAILS]
    return _STATUS_BY_NAME[error.spec.grpc_status], details


def grpc_trailers(error: IsthmusError) -> tuple[tuple[str, str], ...]:
    """Give the trailing metadata: code, retryable, field, when to come back."""
    trailers = [
        (TRAILER_CODE.name, error.spec.code),
        (TRAILER_RETRYABLE.name, "true" if error.spec.retryable else "false"),
    ]
    if error.param is not None:
        trailers.append((TRAILER_PARAM.name, error.param.encode("ascii", "replace").decode()))
    if error.retry_after_ms is not None:
        trailers.append((TRAILER_RETRY_AFTER.name, str(error.retry_after_ms)))
    if isinstance(error, RateLimited):
        trailers += rate_headers(error.verdict).items()
    return tuple(trailers)


def internal_error(request_id: str) -> IsthmusError:
    """Make the answer to a fault of ours; the log has the rest."""
    return RequestError("internal", f"internal error; request id {request_id}")


def cut_off_error() -> IsthmusError:
    """Make the answer when the work was cancelled although the client still waits."""
    return RequestError("worker_lost", "the request was cut off inside the server")


def is_own_cancel() -> bool:
    """Say whether the task that runs was cancelled itself, rather than one it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
