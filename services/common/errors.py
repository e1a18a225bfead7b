"""The error tree and its one table: code, retryable, gRPC status, HTTP status, OpenAI type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """One row of the error table; `grpc_status` is the name of a grpc.StatusCode."""

    code: str
    retryable: bool
    grpc_status: str
    http_status: int
    openai_type: str
    meaning: str


_ROWS = (
    ErrorSpec("invalid_argument", False, "INVALID_ARGUMENT", 400, "invalid_request_error",
              "A field has a wrong type or value; `param` names it."),
    ErrorSpec("invalid_json", False, "INVALID_ARGUMENT", 400, "invalid_request_error",
              "The body is not valid JSON or not valid UTF-8."),
    ErrorSpec("unsupported_parameter", False, "INVALID_ARGUMENT", 400, "invalid_request_error",
              "A parameter this server does not implement; it is refused, never ignored."),
    ErrorSpec("unknown_parameter", False, "INVALID_ARGUMENT", 400, "invalid_request_error",
              "A parameter nobody knows."),
    ErrorSpec("empty_prompt", False, "INVALID_ARGUMENT", 400, "invalid_request_error",
              "The prompt has no tokens."),
    ErrorSpec("context_length_exceeded", False, "INVALID_ARGUMENT", 400, "invalid_request_error",
              "Prompt plus requested tokens do not fit the model's context."),
    ErrorSpec("prompt_too_large_for_pool", False, "INVALID_ARGUMENT", 400, "invalid_request_error",
              "The request could never fit a worker's KV pool."),
    ErrorSpec("token_out_of_range", False, "INVALID_ARGUMENT", 400, "invalid_request_error",
              "A token id is not in the vocabulary."),
    ErrorSpec("template_error", False, "INVALID_ARGUMENT", 400, "invalid_request_error",
              "The model's chat template refused the messages; the message is quoted."),
    ErrorSpec("model_not_found", False, "NOT_FOUND", 404, "invalid_request_error",
              "No model of that name is served."),
    ErrorSpec("not_found", False, "NOT_FOUND", 404, "invalid_request_error",
              "No such route or object."),
    ErrorSpec("method_not_allowed", False, "UNIMPLEMENTED", 405, "invalid_request_error",
              "The route exists, the method does not."),
    ErrorSpec("body_too_large", False, "INVALID_ARGUMENT", 413, "invalid_request_error",
              "The body is larger than the limit in the message."),
    ErrorSpec("unauthenticated", False, "UNAUTHENTICATED", 401, "authentication_error",
              "No API key, or an unknown one."),
    ErrorSpec("permission_denied", False, "PERMISSION_DENIED", 403, "permission_error",
              "The key may not do this."),
    ErrorSpec("duplicate_request", False, "ALREADY_EXISTS", 409, "invalid_request_error",
              "The idempotency key is in use with another body."),
    ErrorSpec("rate_limited", True, "RESOURCE_EXHAUSTED", 429, "rate_limit_error",
              "Too many requests; `retry_after_ms` says when to come back."),
    ErrorSpec("audit_unavailable", True, "UNAVAILABLE", 503, "server_error",
              "The audit log cannot be written, and nothing is done that it would not show."),
    ErrorSpec("overloaded", True, "RESOURCE_EXHAUSTED", 429, "rate_limit_error",
              "Every queue that could take the request is full."),
    ErrorSpec("cancelled", False, "CANCELLED", 499, "request_cancelled",
              "The client went away or cancelled."),
    ErrorSpec("killed", False, "ABORTED", 503, "server_error",
              "An operator ended the request."),
    ErrorSpec("deadline_exceeded", False, "DEADLINE_EXCEEDED", 504, "timeout_error",
              "The request's deadline passed."),
    ErrorSpec("worker_lost", True, "UNAVAILABLE", 503, "server_error",
              "The worker that ran the request died or was cut off."),
    ErrorSpec("no_workers", True, "UNAVAILABLE", 503, "server_error",
              "No worker is ready to take the request."),
    ErrorSpec("draining", True, "UNAVAILABLE", 503, "server_error",
              "This process is shutting down."),
    ErrorSpec("slow_reader", False, "ABORTED", 499, "request_cancelled",
              "The client read too slowly and its buffer is full."),
    ErrorSpec("stale_incarnation", True, "UNAVAILABLE", 503, "server_error",
              "The work item was meant for an earlier life of the worker."),
    ErrorSpec("fenced", True, "ABORTED", 503, "server_error",
              "A higher attempt of the same request is running."),
    ErrorSpec("incompatible", False, "FAILED_PRECONDITION", 503, "server_error",
              "Prefill and decode worker do not serve the same model; the field is named."),
    ErrorSpec("handoff_failed", True, "UNAVAILABLE", 503, "server_error",
              "The KV could not be handed over and no other way was left."),
    ErrorSpec("hash_mismatch", True, "INTERNAL", 500, "server_error",
              "The block hashes sent with a work item are not those of its tokens."),
    ErrorSpec("quarantined", False, "FAILED_PRECONDITION", 422, "invalid_request_error",
              "Workers died of this very prompt; it is not run again for a while."),
    ErrorSpec("internal", False, "INTERNAL", 500, "server_error",
              "A fault of ours; the request id leads to the log line."),
)  # fmt: skip

ERROR_TABLE: dict[str, ErrorSpec] = {row.code: row for row in _ROWS}


class IsthmusError(Exception):
    """An error a client may see: a code of ERROR_TABLE and a message free of paths and secrets."""

    code: ClassVar[str] = "internal"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms

    @property
    def spec(self) -> ErrorSpec:
        """Row of the error table."""
        return ERROR_TABLE[self.code]


class RequestError(IsthmusError):
    """An error made from a code, for edges that translate foreign errors."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_ms=retry_after_ms)
        self._code = ERROR_TABLE[code].code

    @property
    def spec(self) -> ErrorSpec:
        """Row of the error table."""
        return ERROR_TABLE[self._code]


class ConfigError(Exception):
    """The configuration is wrong; the message says which key and how to mend it."""


class ModelFileError(Exception):
    """A model file is missing, damaged or of an unsupported kind."""


class BlocksExhausted(Exception):
    """The pool cannot give that many blocks now."""

    def __init__(self, *, needed: int, free: int) -> None:
        super().__init__(f"needed {needed} blocks, {free} are free or evictable")
        self.needed = needed
        self.free = free


class StoreUnavailable(Exception):
    """The store did not answer within its deadline, or answered with an error."""
