"""The one configuration: strict sections, file < environment < flags, and what may be shown."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import SecretStr, field_validator, model_validator

from services.common.config_source import Source, merge_sources, read_environ, read_yaml, validate
from services.common.limits import Limits
from services.common.settings import Section, setting

_AMOUNT = re.compile(r"(?!0+(\.0+)?$)[0-9]{1,6}(\.[0-9]{1,4})?")
_WEIGHT = re.compile(r"[0-9]{1,3}(\.[0-9]{1,4})?")


class ModelSettings(Section):
    """Which model is served."""

    name: str = setting(
        "",
        "a name of the model table, a model directory, or a .gguf file; empty = the default model",
        public=True,
    )
    served_name: str = setting("", "name clients use; empty = the model's own", public=True)
    cache_dir: str = setting(
        "",
        "where models are kept; empty = $ISTHMUS_CACHE or ~/.cache/isthmus",
        public=True,
    )
    max_model_len: int = setting(
        0, "longest prompt plus output; 0 = the model's context", unit="tokens", ge=0
    )
    weights_digest: str = setting(
        "",
        "how the SHA-256 of the weights begins; with others nothing is served; empty = any",
        public=True,
        pattern="^([0-9a-f]{8,64})?$",
    )


class StoreSettings(Section):
    """The Redis-compatible store that holds the registry and the prefix hints."""

    # The URL may carry a password, so it is a secret as a whole. Defaults are judged as what a
    # file would hold: text.
    url: SecretStr = setting("redis://127.0.0.1:6379/0", "redis://, rediss:// or unix:// address")
    loader_url: SecretStr = setting(
        "", "the same address with the user that may load scripts; empty = url's own"
    )
    ca_file: str = setting(
        "", "PEM file of who signs a rediss:// store's certificate; empty = the system's CAs"
    )
    call_timeout_ms: int = setting(
        25,
        "wait for hints on the path of a request; up to four times that while the store is slow",
        unit="ms",
        gt=0,
        le=5_000,
    )


class RouterSettings(Section):
    """The router process and its two front doors."""

    router_id: str = setting("", "name of this replica; empty = drawn at start", public=True)
    grpc_host: str = setting("127.0.0.1", "address the gRPC front door binds", public=True)
    grpc_port: int = setting(50051, "port of the gRPC front door; 0 = any free", ge=0, le=65_535)
    http_host: str = setting("127.0.0.1", "address the HTTP front door binds", public=True)
    http_port: int = setting(8000, "port of the HTTP front door; 0 = any free", ge=0, le=65_535)
    processes: int = setting(
        1,
        "processes that share the two ports; each has its own /metrics",
        unit="processes",
        ge=1,
        le=64,
    )
    metrics_port: int | None = setting(
        None,
        "port of each process's own /metrics, besides the front door's: of the first process, "
        "further ones take the next; 0 = any free, null = none",
        ge=0,
        le=65_535,
    )
    metrics_host: str = setting(
        "127.0.0.1", "address that /metrics binds; it asks for the front door's keys", public=True
    )
    force_mode: Literal["", "REMOTE", "LOCAL", "STAY"] = setting(
        "", "run every request in this mode; empty = by predicted cost"
    )
    bypass_tokens: int = setting(
        512,
        "uncached tokens a decode worker may compute itself where that costs less; 0 = none",
        unit="tokens",
        ge=0,
    )
    max_connection_age_s: int = setting(
        3_600, "age at which a client connection is asked to reconnect", unit="s", gt=0
    )
    max_concurrent_streams: int = setting(
        1_000, "gRPC streams of one client connection", unit="streams", gt=0
    )
    max_requests: int = setting(
        4_096,
        "requests under way at once, besides those that wait to be admitted; more are refused as "
        "overloaded",
        unit="requests",
        gt=0,
    )
    max_losses: int = setting(
        5,
        "workers one request may lose and go on elsewhere; 0 = it ends as worker_lost",
        unit="workers",
        ge=0,
        le=100,
    )
    hedge_prefill: bool = setting(
        False, "have a second worker do a prefill that is slow, and take whichever is first"
    )
    drain_s: float = setting(10.0, "longest wait for running requests at shutdown", unit="s", ge=0)
    more_models: tuple[str, ...] = setting(
        (),
        "further models this router serves, each with workers of its own: `MODEL` as in "
        "model.name, or `NAME=MODEL` for another name than its own",
        public=True,
    )
    traffic_file: str = setting(
        "",
        "aliases, canaries and mirrors (YAML or JSON), reread when it changes; empty = none",
        public=True,
    )
    max_mirrors: int = setting(
        8, "copies of mirrored requests at once; more are not made", unit="requests", ge=0
    )
    max_reports: int = setting(
        1_024, "ended requests `isthmus explain` can tell of", unit="requests", ge=0, le=100_000
    )


class AdmissionSettings(Section):
    """When the router starts a request, lets it wait, or refuses it with a time to come back."""

    slo_ttft_ms: int = setting(
        0,
        "TTFT of requests that name none, beyond which they are refused; 0 = only the deadline",
        unit="ms",
        ge=0,
    )
    slo_tpot_ms: int = setting(
        0, "the same for the mean time per token after the first; 0 = any", unit="ms", ge=0
    )
    slo_slack: float = setting(
        0.8, "share of an SLO a predicted TTFT may use up", unit="share", gt=0, le=1
    )
    max_queued: int = setting(
        4_096, "requests that may wait in the router; more are refused", unit="requests", gt=0
    )
    max_queued_bytes: int = setting(
        128 << 20, "memory of the requests that wait", unit="bytes", ge=1 << 20
    )
    worker_backlog_ms: int = setting(
        250, "prefill work a worker has in hand before more waits in the router", unit="ms", gt=0
    )
    worker_backlog_tokens: int = setting(
        1_024, "the same for a slow worker: it always may have so much", unit="tokens", ge=0
    )
    max_decode_waiting: int = setting(
        8, "sequences waiting at every decode worker that hold back more", unit="sequences", ge=0
    )
    priority_ageing_s: float = setting(
        10.0, "waiting in the router that makes up for one level of priority", unit="s", gt=0
    )
    tenant_weights: tuple[str, ...] = setting(
        (), "shares of tenants as `tenant=weight`; one not named has 1", public=True
    )

    @field_validator("tenant_weights")
    @classmethod
    def _check_weights(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        for entry in entries:
            tenant, _, weight = entry.rpartition("=")
            if not tenant or not _WEIGHT.fullmatch(weight) or not 0.01 <= float(weight) <= 100:
                raise ValueError(f"{entry!r} is not tenant=weight, with a weight from 0.01 to 100")
        return entries


class WorkerSettings(Section):
    """One prefill or decode worker."""

    worker_id: str = setting("", "name of this worker; empty = drawn at start", public=True)
    role: Literal["prefill", "decode"] = setting("decode", "pool the worker belongs to")
    threads: int = setting(
        0, "compute threads; 0 = one per core of this process", unit="threads", ge=0, le=1024
    )
    device: Literal["cpu", "cuda"] = setting("cpu", "where the model runs; cuda is untested")
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "type of weights and KV; bfloat16 is not bit-stable"
    )
    num_blocks: int = setting(
        0, "KV blocks of 16 tokens; 0 = from kv_memory_bytes", unit="blocks", ge=0
    )
    kv_memory_bytes: int = setting(
        0, "size of the KV pool; 0 = a share of the free memory", unit="bytes", ge=0
    )
    max_num_seqs: int = setting(64, "sequences in one step", unit="sequences", gt=0, le=4096)
    max_requests: int = setting(
        1_024, "requests open at once; more are refused as overloaded", unit="requests", gt=0
    )
    max_step_tokens: int = setting(512, "tokens in one step", unit="tokens", ge=16, le=1 << 20)
    chunk_target_ms: int = setting(
        50, "aimed duration of a step with a prefill chunk and decodes", unit="ms", gt=0
    )
    chunk_target_alone_ms: int = setting(
        100, "aimed duration of a step with a prefill chunk and no decodes", unit="ms", gt=0
    )
    bind_host: str = setting(
        "127.0.0.1", "address the gRPC server and the KV plane bind", public=True
    )
    grpc_port: int = setting(0, "port of the gRPC server; 0 = any free", ge=0, le=65_535)
    metrics_port: int | None = setting(
        None, "port of /metrics on bind_host; 0 = any free, null = none", ge=0, le=65_535
    )
    metrics_token_file: str = setting(
        "", "file of the bearer token /metrics asks for; reread; empty = none", public=True
    )
    advertise_host: str = setting(
        "", "host name others reach this worker by; empty = bind_host", public=True
    )
    runtime_dir: str = setting(
        "", "directory for sockets, mode 0700; empty = made at start, removed at exit", public=True
    )
    drain_s: float = setting(10.0, "longest wait for running requests at shutdown", unit="s", ge=0)


class TransferSettings(Section):
    """How KV crosses between workers."""

    planes: tuple[Literal["attach", "memfd", "cuda_ipc", "nccl", "zmq"], ...] = setting(
        ("memfd", "zmq"),
        "planes this worker may use, best first; `attach` reads a peer's pool in place",
        min_length=1,
    )
    attach_move_after_tokens: int = setting(
        16, "answers up to this long never move attached blocks", unit="tokens", ge=0
    )
    attach_move_blocks: int = setting(
        4, "attached blocks a longer answer moves home in each step", unit="blocks", gt=0
    )
    attach_max_ms: int = setting(
        60_000, "time after which attached blocks move home anyway", unit="ms", ge=100
    )
    attach_pin_share: float = setting(
        0.5, "share of a pool that readers in place may hold", unit="share", gt=0, le=1
    )
    lease_ms: int = setting(
        10_000, "time a running transfer lives without a renewal", unit="ms", ge=100
    )
    ticket_ttl_ms: int = setting(5_000, "time a ticket can be used to open", unit="ms", ge=100)
    verify_digest: str = setting(
        "always",
        "`always`, or `sampled:N` to check one block in N",
        public=True,
        pattern=r"^(always|sampled:[1-9][0-9]{0,5})$",
    )
    copy_threads: int = setting(
        0,
        "threads that share a long copy out of a peer's memory; 0 = one a core, up to four",
        unit="threads",
        ge=0,
        le=16,
    )
    single_shot: bool = setting(
        True,
        "announce the KV of a short prompt at its end where announcing it chunk by chunk would "
        "cost more than it hides",
    )
    wire_dtype: Literal["", "bfloat16", "int8"] = setting(
        "", "type of KV on zmq links; empty = as stored, others round; the same on both ends"
    )
    zmq_port: int = setting(
        0, "port peers connect to, on worker.bind_host; 0 = any free", ge=0, le=65_535
    )
    zmq_advertise: str = setting(
        "",
        "host:port peers reach zmq_port by; empty = the bound one",
        public=True,
        pattern=r"^(\S+:[0-9]{1,5})?$",
    )
    max_open: int = setting(256, "transfers open at once per side", unit="transfers", gt=0)
    curve_key_file: str = setting(
        "", "CURVE key ring of the cluster, a file; reread when it changes", public=True
    )
    allow_plaintext_kv: bool = setting(
        False, "let KV cross other hosts' networks without encryption"
    )


class RaySettings(Section):
    """Workers as actors of a Ray cluster (`isthmus up --runtime ray`)."""

    address: str = setting(
        "", "HOST:PORT of a cluster, or auto; empty = one started for the purpose", public=True
    )
    namespace: str = setting(
        "", "of the workers' names in Ray; empty = drawn at start", public=True, max_length=128
    )
    prefill_resources: tuple[str, ...] = setting(
        ("prefill_slot=1",), "what a prefill worker takes of a node, as name=amount", public=True
    )
    decode_resources: tuple[str, ...] = setting(
        ("decode_slot=1",), "what a decode worker takes of a node, as name=amount", public=True
    )
    prefill_labels: tuple[str, ...] = setting(
        (), "labels a prefill worker's node must have, as name=value", public=True
    )
    decode_labels: tuple[str, ...] = setting(
        (), "labels a decode worker's node must have, as name=value", public=True
    )
    gpus_per_worker: float = setting(0.0, "GPUs Ray gives each worker", unit="GPUs", ge=0, le=64)

    @field_validator("prefill_resources", "decode_resources", "prefill_labels", "decode_labels")
    @classmethod
    def _check_pairs(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        for entry in entries:
            name, equals, value = entry.partition("=")
            if not (name and equals and value):
                raise ValueError(f"{entry!r} is not name=value")
        return entries

    @field_validator("prefill_resources", "decode_resources")
    @classmethod
    def _check_amounts(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        for entry in entries:
            if _AMOUNT.fullmatch(entry.partition("=")[2]) is None:
                raise ValueError(f"{entry!r} is not name=amount, with an amount above 0")
        return entries


class LeaseSettings(Section):
    """How fast a dead or frozen worker is noticed."""

    worker_lease_ms: int = setting(2_000, "life of a worker's lease", unit="ms", ge=100)
    heartbeat_ms: int = setting(500, "time between renewals of the lease", unit="ms", ge=10)


JwtAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]


class AuthSettings(Section):
    """Who may call the front doors."""

    keys_file: str = setting(
        "",
        "API keys (hashed), made by `isthmus key new`: a file, or a directory of *.json such as a "
        "mounted Secret; empty = no keys",
        public=True,
    )
    tenant_secret_file: str = setting(
        "",
        "secret that keeps tenants' prefix caches apart, the same for all routers; empty = "
        "`tenant.secret` beside the keys",
        public=True,
    )
    shared_prefix_tenants: tuple[str, ...] = setting(
        (),
        "tenants that share cached prefixes with one another; all others share none",
        public=True,
    )
    tenants_file: str = setting(
        "", "rate and token limits of tenants, YAML; reread when it changes", public=True
    )
    jwks_file: str = setting(
        "", "public keys (RFC 7517) of the JWTs that are taken; empty = no JWTs", public=True
    )
    jwt_issuer: str = setting("", "`iss` a JWT must have", public=True)
    jwt_audience: str = setting("", "`aud` a JWT must have", public=True)
    jwt_algorithms: tuple[JwtAlgorithm, ...] = setting(
        ("RS256", "ES256"), "signatures a JWT may have", min_length=1
    )
    jwt_tenant_claim: str = setting("tenant", "claim of a JWT that names the tenant", public=True)
    allow_unauthenticated: bool = setting(
        False, "serve addresses other than loopback without API keys"
    )
    allow_plaintext: bool = setting(False, "serve addresses other than loopback without TLS")


class TlsSettings(Section):
    """Certificates, PEM files that are reread when they change: of the front doors, of the cluster.

    Routers and workers know each other by a name (DNS SAN) in certificates of one authority.
    """

    cert_file: str = setting(
        "", "chain of both front doors; empty = no TLS for clients", public=True
    )
    key_file: str = setting("", "private key of cert_file", public=True)
    cluster_cert_file: str = setting(
        "",
        "chain this process shows on Links; empty = no TLS between router and workers",
        public=True,
    )
    cluster_key_file: str = setting("", "private key of cluster_cert_file", public=True)
    cluster_ca_file: str = setting("", "authorities that sign the other side's", public=True)
    router_names: tuple[str, ...] = setting(
        ("isthmus-router",), "names a worker takes for those of routers", min_length=1, public=True
    )
    worker_name: str = setting(
        "isthmus-worker", "name a router asks of every worker", min_length=1, public=True
    )


class AccountingSettings(Section):
    """What routers write down about their tenants."""

    audit_dir: str = setting(
        "", "directory of the audit log, one chain of files a router; empty = none", public=True
    )
    audit_on_full: Literal["refuse", "drop"] = setting(
        "refuse",
        "while the log cannot be written: refuse requests, or go on and count what is missing",
    )
    audit_max_file_bytes: int = setting(
        256 << 20, "size at which the log goes on in a new file", unit="bytes", ge=4096
    )
    usage_dir: str = setting(
        "", "directory of counters per tenant, one file a router; empty = none", public=True
    )


class TelemetrySettings(Section):
    """Logs, traces and metrics."""

    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "least severe record that is written"
    )
    log_format: Literal["json", "console"] = setting(
        "json", "one JSON object a line, or plain text"
    )
    otlp_endpoint: str = setting("", "OTLP/gRPC collector for traces; empty = none", public=True)
    trace_file: str = setting("", "file spans are appended to as JSON lines", public=True)
    trace_file_max_bytes: int = setting(
        64 << 20, "size at which trace_file is rotated (one old file is kept)", unit="bytes", gt=0
    )
    sample_ratio: float = setting(1.0, "share of requests that are traced", ge=0, le=1)


class IsthmusConfig(Section):
    """All settings of a router or a worker; each process reads the sections it needs."""

    model: ModelSettings = ModelSettings()
    store: StoreSettings = StoreSettings()
    router: RouterSettings = RouterSettings()
    admission: AdmissionSettings = AdmissionSettings()
    worker: WorkerSettings = WorkerSettings()
    transfer: TransferSettings = TransferSettings()
    lease: LeaseSettings = LeaseSettings()
    ray: RaySettings = RaySettings()
    limits: Limits = Limits()
    auth: AuthSettings = AuthSettings()
    tls: TlsSettings = TlsSettings()
    accounting: AccountingSettings = AccountingSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _check_front_doors(self) -> Self:
        """A front door on the network is open or unencrypted only in so many words."""
        router, auth = self.router, self.auth
        exposed = [h for h in (router.grpc_host, router.http_host) if not is_loopback(h)]
        pages = [] if router.metrics_port is None else [router.metrics_host]
        readable = exposed + [host for host in pages if not is_loopback(host)]
        if auth.jwks_file and not (auth.jwt_issuer and auth.jwt_audience):
            raise ValueError("auth.jwks_file needs auth.jwt_issuer and auth.jwt_audience")
        if readable and not (auth.keys_file or auth.jwks_file or auth.allow_unauthenticated):
            raise ValueError(
                f"the router would serve {readable[0]} without API keys: set auth.keys_file, "
                "or auth.allow_unauthenticated: true"
            )
        if exposed and not (self.tls.cert_file or self.auth.allow_plaintext):
            raise ValueError(
                f"the router would serve {exposed[0]} without TLS: set tls.cert_file, or "
                "auth.allow_plaintext: true with a TLS proxy in front"
            )
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        tls = self.tls
        if bool(tls.cert_file) != bool(tls.key_file):
            raise ValueError("tls.cert_file and tls.key_file belong together: set both or none")
        cluster = (tls.cluster_cert_file, tls.cluster_key_file, tls.cluster_ca_file)
        if any(cluster) and not all(cluster):
            raise ValueError(
                "tls.cluster_cert_file, tls.cluster_key_file and tls.cluster_ca_file belong "
                "together: set all or none"
            )
        return self

    @model_validator(mode="after")
    def _check_kv_plane(self) -> Self:
        transfer = self.transfer
        if _is_everywhere(self.worker.bind_host):
            raise ValueError("worker.bind_host: bind to one address, not to all interfaces")
        if not is_loopback(self.worker.bind_host):
            if not (transfer.curve_key_file or transfer.allow_plaintext_kv):
                raise ValueError(
                    f"the worker would send KV from {self.worker.bind_host} unencrypted: set "
                    "transfer.curve_key_file, or transfer.allow_plaintext_kv: true"
                )
            is_scraped = self.worker.metrics_port is not None
            if is_scraped and not (
                self.worker.metrics_token_file or self.auth.allow_unauthenticated
            ):
                raise ValueError(
                    f"the worker would serve /metrics on {self.worker.bind_host} to everyone: set "
                    "worker.metrics_token_file, or auth.allow_unauthenticated: true"
                )
            if not (self.tls.cluster_cert_file or self.auth.allow_plaintext):
                raise ValueError(
                    f"the worker would serve gRPC on {self.worker.bind_host} without TLS: "
                    "set tls.cluster_cert_file, or auth.allow_plaintext: true"
                )
        return self

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.lease.worker_lease_ms < 3 * self.lease.heartbeat_ms:
            raise ValueError("lease.worker_lease_ms must be at least 3 x lease.heartbeat_ms")
        if self.limits.default_timeout_ms > self.limits.max_timeout_ms:
            raise ValueError("limits.default_timeout_ms is larger than limits.max_timeout_ms")
        return self


def is_loopback(host: str) -> bool:
    """Whether an address to bind is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # another name may lead anywhere


def _is_everywhere(host: str) -> bool:
    """Whether binding to an address would bind to all interfaces."""
    bare = host.strip("[]")
    if bare in ("", "0", "*"):
        return True
    try:
        return ipaddress.ip_address(bare).is_unspecified
    except ValueError:
        return False  # a name


def load_config(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object]
) -> IsthmusConfig:
    """Read the file, then the environment, then the flags; later ones win.

    Args:
        path: the YAML file, or None for none.
        environ: variables named ISTHMUS_SECTION__FIELD are taken, others ignored.
        overrides: dotted key -> value; None values are flags that were not given.

    Raises:
        ConfigError: names every wrong key, where it came from and how to mend it.
    """
    sources: list[Source] = []
    if path is not None:
        sources.append(read_yaml(path, IsthmusConfig))
    sources.append(read_environ(environ, IsthmusConfig))
    flags = {key: value for key, value in overrides.items() if value is not None}
    sources.append(Source(flags, {key: f"flag for {key}" for key in flags}))
    return validate(merge_sources(sources), IsthmusConfig)
