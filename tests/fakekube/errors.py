"""What the stand-in refuses with: the Status object that clients of Kubernetes expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    406: "NotAcceptable",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
}


class ApiError(Exception):
    """A call is refused."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: str = "",
        causes: Sequence[Mapping[str, str]] = (),
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason or _REASONS.get(status, "Unknown")
        self.causes = list(causes)
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The Status."""
        details: dict[str, Any] = {}
        if self.causes:
            details["causes"] = self.causes
        if self.retry_after_s is not None:
            details["retryAfterSeconds"] = self.retry_after_s
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.status,
            **({"details": details} if details else {}),
        }


def not_found(what: str, name: str) -> ApiError:
    """There is none of this name."""
    return ApiError(404, f'{what} "{name}" not found')


def invalid(what: str, name: str, problems: Sequence[str]) -> ApiError:
    """An object that breaks the rules of its kind."""
    return ApiError(422, f'{what} "{name}" is invalid: {"; ".join(problems)}')
