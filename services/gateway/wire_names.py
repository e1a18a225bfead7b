"""Routes, headers and metadata the front doors read and write; docs/http.md is made of these."""

from __future__ import annotations

from dataclasses import dataclass

_GENERATE = "chat/completions, completions"


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One HTTP route; GET brings HEAD. Who may call it is in services.gateway.auth."""

    path: str
    method: str
    meaning: str


@dataclass(frozen=True, slots=True)
class WireName:
    """A header or a piece of gRPC metadata, and when it is read or written."""

    name: str
    where: str
    meaning: str


CHAT_ROUTE = RouteSpec("/v1/chat/completions", "POST", "Answer a chat, whole or as a stream.")
COMPLETION_ROUTE = RouteSpec(
    "/v1/completions", "POST", "Continue a text or token ids, whole or as a stream."
)
MODELS_ROUTE = RouteSpec("/v1/models", "GET", "List the model this cluster serves.")
MODEL_ROUTE = RouteSpec("/v1/models/{model_id:path}", "GET", "Describe it; 404 for another name.")
TOKENIZE_ROUTE = RouteSpec("/tokenize", "POST", "Turn a prompt or messages into token ids.")
DETOKENIZE_ROUTE = RouteSpec("/detokenize", "POST", "Turn token ids into text.")
HEALTH_ROUTE = RouteSpec("/health", "GET", "200 while the process lives.")
READY_ROUTE = RouteSpec(
    "/ready", "GET",
    "200 while a request would find workers, else 503 with the reason; `degraded` names what "
    "it would do without.",
)  # fmt: skip
METRICS_ROUTE = RouteSpec("/metrics", "GET", "Metrics of this router in Prometheus text form.")
ROUTES = (
    CHAT_ROUTE, COMPLETION_ROUTE, MODELS_ROUTE, MODEL_ROUTE, TOKENIZE_ROUTE, DETOKENIZE_ROUTE,
    HEALTH_ROUTE, READY_ROUTE, METRICS_ROUTE,
)  # fmt: skip

AUTHORIZATION = WireName("authorization", "every route with a key", "`Bearer KEY`.")
API_KEY = WireName(
    "x-api-key", "every route with a key", "The key alone; read if there is no `Bearer`."
)
TIMING = WireName(
    "x-isthmus-timing", _GENERATE,
    "`1` or `true`: the last object gets a key `isthmus` with workers, mode and stage times, and "
    "in a stream each event of a choice one with `num_tokens`, the tokens since the last.",
)  # fmt: skip
TIMEOUT = WireName(
    "x-isthmus-timeout-ms", _GENERATE,
    "Deadline of the request; absent or 0 = `limits.default_timeout_ms`.",
)  # fmt: skip
FORCE_MODE = WireName(
    "x-isthmus-force-mode", _GENERATE,
    "`REMOTE`, `LOCAL` or `STAY`: that mode, or the error `no_workers`.",
)  # fmt: skip
SESSION = WireName(
    "x-isthmus-session", _GENERATE,
    "The client's name for requests that belong together: they get the same model of an alias, and "
    "the same workers where several are as good.",
)  # fmt: skip
IDEMPOTENCY_KEY = WireName(
    "idempotency-key", _GENERATE,
    "A repeat with the same body joins the running request or gets its answer again, for ten "
    "minutes after its end if there is room; with another body it is `duplicate_request`. Each "
    "router process knows its own keys: a repeat that meets another one is run again.",
)  # fmt: skip
TRACEPARENT = WireName(
    "traceparent", _GENERATE, "W3C trace context: the request's spans hang from it."
)
SLO_TTFT = WireName(
    "x-slo-ttft-ms", _GENERATE, "Target for the first token; counted as met or missed, no more."
)
SLO_TPOT = WireName(
    "x-slo-tpot-ms", _GENERATE, "Target for a token after the first; counted the same way."
)
CLIENT_REQUEST_ID = WireName(
    "x-request-id", "every route", "The client's own name for the request, for the log line only."
)
REQUEST_HEADERS = (
    AUTHORIZATION, API_KEY, TIMING, TIMEOUT, FORCE_MODE, SESSION, IDEMPOTENCY_KEY, TRACEPARENT,
    SLO_TTFT, SLO_TPOT, CLIENT_REQUEST_ID,
)  # fmt: skip

REQUEST_ID = WireName(
    "x-isthmus-request-id", "every answer", "This server's id of the request; logs have it too."
)
OPENAI_REQUEST_ID = WireName("x-request-id", "every answer", "The same id, where OpenAI has it.")
MODE = WireName("x-isthmus-mode", "whole answers", "Mode the request ran in.")
ROUTE = WireName(
    "x-isthmus-route", "whole answers decided without the store", "`local`: by this router alone."
)
PLANE = WireName("x-isthmus-plane", "whole answers, after a handoff", "How its KV crossed.")
PREFILL_WORKER = WireName("x-isthmus-prefill-worker", "whole answers", "Who read the prompt.")
DECODE_WORKER = WireName("x-isthmus-decode-worker", "whole answers", "Who wrote the answer.")
RETRY_AFTER = WireName("retry-after", "errors that pass", "Whole seconds, rounded up.")
RETRY_AFTER_MS = WireName("retry-after-ms", "errors that pass", "The same in milliseconds.")
SHOULD_RETRY = WireName(
    "x-should-retry", "errors that stay", "`false`: the `openai` package would try again."
)
WWW_AUTHENTICATE = WireName("www-authenticate", "401", "`Bearer`.")
NO_BUFFERING = WireName(
    "x-accel-buffering", "streams", "`no`: proxies must pass tokens on at once."
)
_LIMITED = "generation and tokenising, of a tenant with limits"
LIMIT_REQUESTS = WireName("x-ratelimit-limit-requests", _LIMITED, "Requests that may come at once.")
REMAINING_REQUESTS = WireName("x-ratelimit-remaining-requests", _LIMITED, "What is left of them.")
RESET_REQUESTS = WireName(
    "x-ratelimit-reset-requests", _LIMITED, "Until all are there, as `0.35s`."
)
LIMIT_TOKENS = WireName("x-ratelimit-limit-tokens", _LIMITED, "Tokens a minute, prompt and answer.")
REMAINING_TOKENS = WireName(
    "x-ratelimit-remaining-tokens", _LIMITED, "What is left of them when the request begins."
)
RESET_TOKENS = WireName("x-ratelimit-reset-tokens", _LIMITED, "Until all are there, as `12.0s`.")
RATE_HEADERS = (
    LIMIT_REQUESTS, REMAINING_REQUESTS, RESET_REQUESTS,
    LIMIT_TOKENS, REMAINING_TOKENS, RESET_TOKENS,
)  # fmt: skip
RESPONSE_HEADERS = (
    *RATE_HEADERS,
    REQUEST_ID, OPENAI_REQUEST_ID, MODE, ROUTE, PLANE, PREFILL_WORKER, DECODE_WORKER, RETRY_AFTER,
    RETRY_AFTER_MS, SHOULD_RETRY, WWW_AUTHENTICATE, NO_BUFFERING,
)  # fmt: skip

GRPC_CLIENT_REQUEST_ID = WireName(
    "x-isthmus-client-request-id", "at the start of Generate",
    "`request_id` of the request, if it is printable ASCII.",
)  # fmt: skip
GRPC_INITIAL = (
    WireName(REQUEST_ID.name, "at the start of Generate", REQUEST_ID.meaning),
    GRPC_CLIENT_REQUEST_ID,
)

TRAILER_CODE = WireName("isthmus-code", "every error", "Code of the error table.")
TRAILER_RETRYABLE = WireName("isthmus-retryable", "every error", "`true` or `false`.")
TRAILER_PARAM = WireName("isthmus-param", "errors of one field", "The field.")
TRAILER_RETRY_AFTER = WireName(
    "isthmus-retry-after-ms", "errors that pass", "When to come back, milliseconds."
)
GRPC_TRAILERS = (TRAILER_CODE, TRAILER_RETRYABLE, TRAILER_PARAM, TRAILER_RETRY_AFTER)
