"""What the front doors can be told; every bound has a safe default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.common.limits import Limits
from services.gateway.accounting import Accounting
from services.gateway.auth import AuthConfig
from services.gateway.namespaces import Namespaces, random_secret
from services.gateway.traffic_control import TrafficControl
from services.runtime.tls import TlsIdentity
from services.text.tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of both front doors. Limits of a single request are in `limits`."""

    limits: Limits = field(default_factory=Limits)
    auth: AuthConfig = field(default_factory=AuthConfig)  # open to everyone who reaches the port
    namespaces: Namespaces = field(default_factory=lambda: Namespaces(random_secret()))
    tls: TlsIdentity | None = None  # None = plaintext
    more_texts: Mapping[str, TextModel] = field(default_factory=dict)  # of models beside the first
    traffic: TrafficControl | None = None  # None = names are those of models
    max_mirrors: int = 8  # copies of requests that may run at once
    note_mirrored: Callable[[str], None] | None = None  # told what became of every copy
    accounting: Accounting | None = None  # None = no limits of tenants, no usage, no audit log
    shares_ports: bool = False  # with other processes of this router, by SO_REUSEPORT
    max_message_bytes: int = 16 << 20  # gRPC, both ways
    max_concurrent_streams: int = 1000  # per gRPC connection
    max_connection_age_s: float = 1800.0  # of both doors
    max_connection_age_grace_s: float = 660.0  # longer than the default deadline
    grpc_handshake_timeout_s: float = 30.0
    grpc_idle_timeout_s: float = 600.0  # a connection without a call is closed after this
    min_client_ping_interval_s: float = 0.5  # faster keepalive pings are abuse
    max_http_connections: int = 10_000
    max_http_head_bytes: int = 32 << 10
    http_head_timeout_s: float = 30.0
    http_body_timeout_s: float = 30.0
    http_keep_alive_s: int = 75
    text_threads: int = 2  # for templates and long prompts
    max_text_jobs: int = 256  # waiting or running in those threads
    max_idempotency_keys: int = 4096
    idempotency_ttl_s: float = 600.0
    max_kept_outputs: int = 200_000  # outputs kept for replay, all keys together
    orphan_grace_s: float = 2.0  # a keyed request without a client goes on that long
    health_poll_s: float = 0.2
