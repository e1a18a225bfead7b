"""Settings of one router process."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.config import AdmissionSettings
from services.common.ids import Incarnation, new_incarnation
from services.router.admission import AdmissionConfig
from services.router.hedge import HedgeConfig
from services.router.poison import PoisonConfig
from services.router.policy import PolicyConfig
from services.runtime.tls import TlsIdentity


@dataclass(frozen=True, slots=True)
class LinkTls:
    """How a router proves itself to workers, and what it asks of them."""

    identity: TlsIdentity
    worker_name: str


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Times and bounds of a Link."""

    connect_timeout_s: float = 1.0
    ping_interval_s: float = 0.5
    lagging_after_s: float = 1.0  # silent for so long: no new work
    cut_after_s: float = 2.0  # silent for so long: the Link is cut
    resume_grace_s: float = 0.5  # a broken Link that is not back by then has lost its requests
    frozen_grace_s: float = 0.4  # the same for one that was cut for silence
    max_backoff_s: float = 1.0
    # Most acknowledgements ride with work. A worker waits for one after 1,024 tokens of a choice.
    ack_delay_s: float = 0.1
    max_queued_work: int = 4096  # not yet written
    max_message_bytes: int = 16 << 20
    tls: LinkTls | None = None  # None = plaintext
    allow_plaintext: bool = False  # to other hosts; this one's loopback is always allowed


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What a router may be told."""

    router_id: str = "router-0"
    incarnation: Incarnation = field(default_factory=new_incarnation)
    force_mode: str | None = None  # "REMOTE" | "LOCAL" | "STAY", for every request
    poll_s: float = 0.25  # between snapshots of the store
    forget_s: float = 5.0  # a worker out of the store whose Link is down this long is dropped
    max_open_requests: int = 4096  # besides those that wait to be admitted
    max_buffered_outputs: int = 2048  # per choice; a client that lags further is cut off
    max_buffered_bytes: int = 256 << 10  # the same in memory
    max_reports: int = 1024  # of ended requests, kept to explain them
    max_retries: int = 1  # times a request is sent again after a refusal, before its first token
    retry_ratio: float = 0.1  # such retries over requests, beyond a small reserve
    max_losses: int = 5  # times a request goes on elsewhere after it lost its worker
    wait_s: float = 5.0  # for workers that are about to come, or to come back
    hedge: HedgeConfig = field(default_factory=HedgeConfig)
    poison: PoisonConfig = field(default_factory=PoisonConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    link: LinkConfig = field(default_factory=LinkConfig)


def admission_config(settings: AdmissionSettings) -> AdmissionConfig:
    """Read the section `admission` of the configuration."""
    weights = (entry.rpartition("=") for entry in settings.tenant_weights)
    return AdmissionConfig(
        max_queued=settings.max_queued,
        max_queued_bytes=settings.max_queued_bytes,
        slo_ttft_s=settings.slo_ttft_ms / 1000,
        slo_tpot_s=settings.slo_tpot_ms / 1000,
        slack=settings.slo_slack,
        worker_backlog_s=settings.worker_backlog_ms / 1000,
        worker_backlog_tokens=settings.worker_backlog_tokens,
        max_decode_waiting=settings.max_decode_waiting,
        priority_ageing_s=settings.priority_ageing_s,
        tenant_weights={tenant: float(weight) for tenant, _, weight in weights},
    )
