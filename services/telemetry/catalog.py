"""The one catalogue of every metric and span; docs/metrics.md is generated from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that only grows."""

    name: str
    unit: str
    description: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number read when somebody asks."""

    name: str
    unit: str
    description: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Histogram:
    """A distribution with fixed bounds."""

    name: str
    unit: str
    description: str
    buckets: tuple[float, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one request's time."""

    name: str
    description: str
    attributes: tuple[str, ...] = ()


Metric = Counter | Gauge | Histogram

_FAST_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 8192.0)

# What the router measures of requests
REQUESTS = Counter(
    "isthmus_requests_total",
    "requests",
    "Requests that ended, by mode (REMOTE, LOCAL, STAY, none) and outcome (ok, or the error code).",
    ("mode", "outcome"),
)
REQUESTS_OPEN = Gauge("isthmus_requests_open", "requests", "Requests accepted and not yet ended.")
PROMPT_TOKENS = Counter("isthmus_prompt_tokens_total", "tokens", "Prompt tokens of ended requests.")
CACHED_TOKENS = Counter(
    "isthmus_cached_tokens_total", "tokens", "Prompt tokens taken from a prefix cache."
)
COMPLETION_TOKENS = Counter(
    "isthmus_completion_tokens_total", "tokens", "Tokens generated and billed."
)
TTFT = Histogram(
    "isthmus_ttft_seconds", "s", "Request received to first frame written.", _REQUEST_S, ("mode",)
)
ITL = Histogram(
    "isthmus_itl_seconds", "s", "Gap between two frames over the tokens of the later.", _TOKEN_S
)
TPOT = Histogram(
    "isthmus_tpot_seconds", "s", "Mean time per token after the first frame.", _TOKEN_S, ("mode",)
)
E2E = Histogram(
    "isthmus_e2e_seconds", "s", "Request received to last frame written.", _REQUEST_S, ("mode",)
)
SLO_REQUESTS = Counter(
    "isthmus_slo_requests_total",
    "requests",
    "Ended requests whose client named a target (slo_ttft_ms, slo_tpot_ms), by met or missed.",
    ("slo", "outcome"),
)
STAGE = Histogram(
    "isthmus_stage_seconds",
    "s",
    "Time of one stage of a request; the stages of a request add up to its e2e time.",
    _REQUEST_S,
    ("stage",),
)
HANDOFFS = Counter(
    "isthmus_handoffs_total", "handoffs",
    "Handoffs as the router sees them: ok, recomputed (decode could not have the KV and computed "
    "the prompt itself), or the code a decode worker with a ticket failed with.",
    ("plane", "outcome"),
)  # fmt: skip
HANDOFF_BYTES = Counter("isthmus_handoff_bytes_total", "bytes", "KV that crossed.", ("plane",))
HANDOFF_BLOCKS = Counter(
    "isthmus_handoff_blocks_total", "blocks",
    "Blocks of handoffs: moved, deduped (decode had them), attached (decode began to read them "
    "where prefill had them).",
    ("how",),
)  # fmt: skip
RETRIES = Counter(
    "isthmus_retries_total", "work items", "Work items sent again, by the error that caused it.",
    ("code",),
)  # fmt: skip
MIGRATIONS = Counter(
    "isthmus_migrations_total", "requests", "Requests that went on at another worker mid-answer."
)
WAITED = Counter(
    "isthmus_waited_total", "requests",
    "Requests that lost their worker, or found none once let in, and waited; by how that ended.",
    ("outcome",),
)  # fmt: skip
HEDGES = Counter(
    "isthmus_hedges_total", "prefills",
    "Second prefills of slow ones: `sent`, and of those `won`.", ("outcome",),
)  # fmt: skip
QUARANTINED = Counter(
    "isthmus_quarantined_total", "requests", "Requests blamed for the death of two workers."
)
MIGRATION_GAP = Histogram(
    "isthmus_migration_gap_seconds", "s",
    "Last token at one worker to the first at the next, as the router sees them.", _TOKEN_S,
)  # fmt: skip

MIRRORED = Counter(
    "isthmus_mirrored_total", "requests",
    "Requests a rule of the traffic table mirrors, by what became of the copy: ok, failed, or "
    "dropped (too many copies ran).", ("outcome",),
)  # fmt: skip

# What the router decides, and its peers
ADMISSIONS = Counter(
    "isthmus_admissions_total", "requests",
    "Requests let in, queued or refused (start, queue, refuse), with the deciding reason.",
    ("action", "reason"),
)  # fmt: skip
QUEUED = Gauge("isthmus_queued", "requests", "Requests that wait in the router for a worker.")
LOOP_LAG = Gauge(
    "isthmus_loop_lag_seconds", "s",
    "How late the router's event loop runs what is due, in the last second: its core is too slow.",
)  # fmt: skip
TTFT_PREDICTION = Histogram(
    "isthmus_ttft_prediction_ratio", "1", "Measured TTFT over the one predicted at arrival.",
    (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.33, 2.0, 4.0, 10.0),
)  # fmt: skip
TTFT_RATIO = Gauge(
    "isthmus_ttft_correction", "1",
    "What predicted times at workers are multiplied by: learned from measured ones.",
)  # fmt: skip
ROUTE_DECISIONS = Counter(
    "isthmus_route_decisions_total", "decisions", "Modes chosen, with the deciding reason.",
    ("mode", "reason"),
)  # fmt: skip
ROUTE_TIME = Histogram(
    "isthmus_route_seconds", "s", "Tokenised request to chosen worker, the store included.",
    _FAST_S,
)  # fmt: skip
WORKERS = Gauge(
    "isthmus_workers", "workers", "Workers as this router sees them.", ("role", "state")
)
STORE_CALLS = Counter(
    "isthmus_store_calls_total", "calls", "Calls to the store.", ("op", "outcome")
)
STORE_CALL_TIME = Histogram("isthmus_store_call_seconds", "s", "One call to the store.", _FAST_S)
DEGRADED = Gauge(
    "isthmus_router_degraded", "0 or 1", "1 while the router decides without the store."
)
HINT_ERROR = Histogram(
    "isthmus_hint_error_tokens",
    "tokens",
    "Cached tokens a worker was chosen for beside those it had, by sign (missing, extra).",
    (0.0, *_TOKENS, 32_768.0, 131_072.0),
    ("sign",),
)
LINK_CUTS = Counter(
    "isthmus_link_cuts_total",
    "links",
    "Links to workers that ended: broken, silent (cut by the router) or closed by the worker.",
    ("reason",),
)

# The front doors
HTTP_REQUESTS = Counter(
    "isthmus_http_requests_total", "requests", "HTTP requests by route and status.",
    ("route", "status"),
)  # fmt: skip
GRPC_REQUESTS = Counter(
    "isthmus_grpc_requests_total", "calls", "gRPC calls by method and status.", ("method", "status")
)
AUTH_FAILURES = Counter(
    "isthmus_auth_failures_total", "requests", "Requests refused for want of a valid key."
)

RATE_LIMITED = Counter(
    "isthmus_rate_limited_total", "requests",
    "Requests refused because their tenant is over a limit (requests, tokens, streams).",
    ("limit",),
)  # fmt: skip
AUDIT_DROPPED = Gauge(
    "isthmus_audit_dropped", "events", "Events the audit log had no room for, since the start."
)
AUDIT_BLOCKED = Gauge("isthmus_audit_blocked", "0 or 1", "1 while the audit log cannot be written.")

# The worker's engine
STEPS = Counter("isthmus_steps_total", "steps", "Engine steps.")
STEP_TIME = Histogram("isthmus_step_seconds", "s", "Duration of one engine step.", _TOKEN_S)
STEP_TOKENS = Histogram("isthmus_step_tokens", "tokens", "Tokens computed in one step.", _TOKENS)
PREEMPTIONS = Counter(
    "isthmus_preemptions_total", "sequences", "Sequences put back for want of KV blocks."
)
KV_BLOCKS = Gauge(
    "isthmus_kv_blocks", "blocks", "KV blocks by state (in_use, cached, free).", ("state",)
)
KV_BLOCKS_ATTACHED = Gauge(
    "isthmus_kv_blocks_attached",
    "blocks",
    "Blocks of other workers' pools that are read in place (plane attach); in no other count.",
)
ATTACH_BLOCKS = Counter(
    "isthmus_attach_blocks_total",
    "blocks",
    "Blocks on the plane attach: attached, or moved into our pool later.",
    ("what",),
)
ATTACH_EVENTS = Counter(
    "isthmus_attach_events_total",
    "events",
    "Plane attach: refused (copied instead: no pool number left, or unlike KV), changed (read "
    "blocks changed, the request was computed again), asked_back (send side: the reader was asked "
    "to move).",
    ("what",),
)
WORK_ITEMS = Counter(
    "isthmus_work_items_total", "work items", "Work items that ended, by kind and outcome.",
    ("kind", "outcome"),
)  # fmt: skip
WORK_OPEN = Gauge("isthmus_work_open", "work items", "Work items by state.", ("state",))

# The worker's transfers and lease
TRANSFERS = Counter(
    "isthmus_transfers_total", "transfers", "Transfers that ended.", ("side", "plane", "outcome")
)
TRANSFERS_OPEN = Gauge(
    "isthmus_transfers_open", "transfers", "Transfers not yet closed.", ("side",)
)
TRANSFER_BYTES = Counter(
    "isthmus_transfer_bytes_total", "bytes", "KV moved, without what the peer had.", ("plane",)
)
TRANSFER_TIME = Histogram(
    "isthmus_transfer_seconds", "s", "First block announced to last block verified.", _REQUEST_S,
    ("plane",),
)  # fmt: skip
TRANSFER_PLANS = Counter(
    "isthmus_transfer_plans_total", "transfers",
    "How prompts were announced, with the deciding reason: streamed (hides_more, copy_too_long, "
    "costs_unknown, asked_again, off) or in a single shot (costs_more, nothing_left).",
    ("reason",),
)  # fmt: skip
KV_INTEGRITY_ERRORS = Counter(
    "isthmus_kv_integrity_errors_total",
    "blocks",
    "Blocks received with a wrong digest, generation or length.",
)
TRANSFER_REJECTS = Counter(
    "isthmus_transfer_rejects_total", "transfers", "Opens that prefill refused, by its code.",
    ("code",),
)  # fmt: skip
TRANSFER_FAULTS = Counter(
    "isthmus_transfer_faults_total",
    "events",
    "Faults on KV connections that were repaired or dropped: resent_block (send), gap, "
    "discarded_frame and plane_fallback (receive), bad_frame (both), muted_frame and "
    "incompatible (send). Peers turned away for their keys: key_retired, key_unknown, "
    "key_handshake (send), key_refused (receive). A changed key file that cannot be used: "
    "key_file (both).",
    ("side", "kind"),
)
LEASE_RENEWALS = Counter(
    "isthmus_lease_renewals_total", "calls", "Renewals of the worker's lease.", ("outcome",)
)

# The autoscaler
REPLICAS = Gauge(
    "isthmus_autoscaler_replicas", "replicas",
    "Replicas of a pool at the last tick: starting, ready, draining, desired.", ("pool", "state"),
)  # fmt: skip
SCALING_CONDITION = Gauge(
    "isthmus_autoscaler_condition", "0 or 1",
    "Conditions of the policy's status at the last tick, 1 while they hold.", ("type",),
)  # fmt: skip
SCALING_SIGNAL = Gauge(
    "isthmus_autoscaler_signal", "as the metric",
    "What the autoscaler read at the last tick, by pool and metric.", ("pool", "metric"),
)  # fmt: skip
SCALED = Counter(
    "isthmus_autoscaler_actions_total", "replicas",
    "Replicas that were started, cancelled, drained, stopped or flipped, by pool.",
    ("pool", "action"),
)  # fmt: skip
SCALING_TICKS = Counter(
    "isthmus_autoscaler_ticks_total", "ticks",
    "Looks at the cluster: ok, failed, follows (another one leads), fenced (the lease was lost "
    "meanwhile).", ("outcome",),
)  # fmt: skip
SCALING_LED = Gauge(
    "isthmus_autoscaler_leads", "0 or 1", "1 while this process holds the autoscaler's lease."
)
DRIVER_FAULTS = Counter(
    "isthmus_autoscaler_driver_faults_total", "calls",
    "Calls of the driver that failed or did not end in time, by call.", ("call",),
)  # fmt: skip

# The operator
OPERATOR_PASSES = Counter(
    "isthmus_operator_passes_total", "passes",
    "Looks at one cluster's resource: ok, failed (tried again later).", ("outcome",),
)  # fmt: skip
OPERATOR_LED = Gauge(
    "isthmus_operator_leads", "0 or 1", "1 while this process holds the operator's Lease."
)

# Every process
BUILD_INFO = Gauge("isthmus_build_info", "1", "Version of this process.", ("version",))
ROUTER_INFO = Gauge(
    "isthmus_router_info", "1",
    "Which router process answered: several may share a port.", ("router_id",),
)  # fmt: skip
CERT_EXPIRY = Gauge(
    "isthmus_cert_expiry_seconds", "s",
    "Time until the certificate in use ends, negative afterwards (doors, cluster).", ("use",),
)  # fmt: skip
SPANS_DROPPED = Gauge(
    "isthmus_spans_dropped", "spans", "Spans that found the export queue full, since the start."
)

# Counters without labels, by who counts them: shown as 0 until the first event.
ROUTER_TOTALS = (
    PROMPT_TOKENS, CACHED_TOKENS, COMPLETION_TOKENS, MIGRATIONS, QUARANTINED, AUTH_FAILURES,
)  # fmt: skip
WORKER_TOTALS = (STEPS, PREEMPTIONS, KV_INTEGRITY_ERRORS)

# Spans of one request, in the order they begin.
SPAN_REQUEST = Span(
    "isthmus.request",
    "The whole request in the router.",
    ("request_id", "mode", "reason", "plane", "prefill_worker", "decode_worker", "outcome",
     "unattributed_us"),
)  # fmt: skip
SPAN_ROUTE = Span("isthmus.route", "Tokenise, hash, look up, decide.", ("reason", "prompt_tokens"))
SPAN_QUEUE_PREFILL = Span("isthmus.prefill.queue", "Waiting for the first prefill step.")
SPAN_PREFILL = Span(
    "isthmus.prefill", "First step to first token.", ("chunks", "cached_tokens", "computed_tokens")
)
SPAN_PREFILL_CHUNK = Span("isthmus.prefill.chunk", "One chunk of the prompt.", ("tokens",))
SPAN_HANDOFF = Span(
    "isthmus.handoff",
    "Ticket to the last block verified.",
    ("plane", "blocks", "bytes", "deduped", "single_shot"),
)
SPAN_QUEUE_DECODE = Span("isthmus.decode.queue", "KV complete to the first decode step.")
SPAN_DECODE = Span("isthmus.decode", "First decode step to the last token.")
SPAN_UNATTRIBUTED = Span("isthmus.unattributed", "What no other stage of the request accounts for.")


def all_metrics() -> tuple[Metric, ...]:
    """Every metric, in the order of this file."""
    return tuple(v for v in globals().values() if isinstance(v, (Counter, Gauge, Histogram)))


def all_spans() -> tuple[Span, ...]:
    """Every span, in the order of this file."""
    return tuple(v for v in globals().values() if isinstance(v, Span))
