"""The resource IsthmusCluster: what one cluster is to be, and what is told of it.

The one source of its CRD and of its page. Fields that Kubernetes defines (resources, tolerations,
volumes) are passed on as they are; the configuration is checked by its own model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal

from pydantic import ValidationError

from services.autoscaler.policy import Fault, PolicySection
from services.common.settings import setting

API_VERSION = "isthmus.dev/v1alpha1"
KIND = "IsthmusCluster"
PLURAL = "isthmusclusters"

MAX_NAME_CHARS = 34  # of a cluster: those of its ReplicaSets are longer by 29, and 63 is the most
NAME = "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
# What the spec says in places of its own, or the operator decides.
_OWN_KEYS = {
    "model": ("name", "served_name", "cache_dir", "weights_digest"),
    "store": ("url", "loader_url", "ca_file"),
    "router": (
        "router_id", "grpc_host", "grpc_port", "http_host", "http_port", "metrics_host",
        "metrics_port", "drain_s",
    ),
    "worker": (
        "role", "worker_id", "bind_host", "grpc_port", "metrics_port", "metrics_token_file",
        "advertise_host", "drain_s",
    ),
    "transfer": ("planes", "wire_dtype", "zmq_port", "curve_key_file", "allow_plaintext_kv"),
    "auth": ("keys_file", "tenant_secret_file", "allow_unauthenticated", "allow_plaintext"),
}  # fmt: skip


class PullPolicy(StrEnum):
    """When a node fetches an image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class Image(PolicySection):
    """An image; its digest wins over its tag."""

    registry: str = setting("localhost", "where it is; empty = the nodes' own", max_length=253)
    repository: str = setting("", "name; empty = the usual one of the component", max_length=253)
    tag: str = setting("", "empty = the operator's own version", max_length=128)
    digest: str = setting("", "sha256:...", pattern="^(sha256:[0-9a-f]{64})?$", max_length=71)
    pull_policy: PullPolicy = setting(PullPolicy.IF_NOT_PRESENT, "when it is fetched")


class LocalSecret(PolicySection):
    """A Secret of the name space."""

    name: str = setting(..., "its name", pattern=NAME, max_length=253)


class VolumeType(StrEnum):
    """Where /models comes from."""

    NONE = "none"  # the model is in the image
    EMPTY_DIR = "emptyDir"
    EXISTING_CLAIM = "existingClaim"
    IMAGE = "image"


class ModelVolume(PolicySection):
    """What is mounted at /models."""

    type: VolumeType = setting(VolumeType.NONE, "where it comes from")
    existing_claim: str = setting("", "name of a claim (existingClaim)", max_length=253)
    size: str = setting(
        "20Gi", "limit (emptyDir)", pattern="^[1-9][0-9]*(Mi|Gi|Ti)$", max_length=16
    )
    image_reference: str = setting("", "image with the files (image)", max_length=512)
    read_only: bool = setting(True, "mount claims so that pods cannot write to them")

    def faults(self) -> Iterator[Fault]:
        """What its type needs."""
        if self.type is VolumeType.EXISTING_CLAIM and not self.existing_claim:
            yield Fault("existingClaim", "type existingClaim needs it")
        if self.type is VolumeType.IMAGE and not self.image_reference:
            yield Fault("imageReference", "type image needs it")


class Model(PolicySection):
    """What is served. Another one gets pods of its own, and all requests when they serve."""

    name: str = setting(
        ..., "name in the model table, or a path below /models", min_length=1, max_length=512
    )
    weights_digest: str = setting(
        "",
        "how the SHA-256 of the weights begins; processes with others refuse to start",
        pattern="^([0-9a-f]{8,64})?$",
        max_length=64,
    )
    served_name: str = setting("", "name clients use; empty = its own", max_length=256)
    max_model_len: int = setting(
        0, "longest prompt plus output; 0 = the model's context", unit="tokens", ge=0
    )
    volume: ModelVolume = setting(ModelVolume(), "what is mounted at /models")


class Probes(PolicySection):
    """Numbers of the probes, over the usual ones."""

    startup: dict[str, int] = setting({}, "as in a probe", max_length=8)
    readiness: dict[str, int] = setting({}, "as in a probe", max_length=8)
    liveness: dict[str, int] = setting({}, "as in a probe", max_length=8)


class PodSettings(PolicySection):
    """What Kubernetes is told of pods of one kind."""

    replicas: int = setting(1, "pods; of a pool that a policy scales: at the start", ge=1, le=1000)
    image: Image = setting(Image(), "what they run")
    drain_seconds: int = setting(60, "longest drain after SIGTERM", unit="s", ge=0, le=86_400)
    pre_stop_seconds: int = setting(5, "wait before SIGTERM", unit="s", ge=0, le=600)
    termination_grace_period_seconds: int | None = setting(
        None, "until it is killed; absent = preStop + drain + 15", unit="s", ge=1, le=90_000
    )
    tmp_size: str = setting("1Gi", "limit of /tmp", pattern="^[1-9][0-9]*(Mi|Gi)$", max_length=16)
    # Any: these are Kubernetes' own, nested mappings of whatever.
    resources: dict[str, Any] = setting({}, "as in a container")
    strategy: dict[str, Any] = setting(
        {}, "as in a Deployment; empty = one more at a time, or one less with an accelerator"
    )
    extra_env: tuple[dict[str, Any], ...] = setting((), "as in a container", max_length=64)
    node_selector: dict[str, str] = setting({}, "as in a pod", max_length=64)
    tolerations: tuple[dict[str, Any], ...] = setting((), "as in a pod", max_length=64)
    affinity: dict[str, Any] = setting({}, "as in a pod")
    spread_over_nodes: bool = setting(True, "over nodes as far as that goes")
    priority_class_name: str = setting("", "as in a pod", max_length=253)
    runtime_class_name: str = setting("", "as in a pod", max_length=253)
    probes: Probes = setting(Probes(), "numbers of the probes")
    config: dict[str, Any] = setting({}, "sections of isthmus.yaml for these pods alone")

    def faults(self) -> Iterator[Fault]:
        """No pod is killed while it drains."""
        given, least = self.termination_grace_period_seconds, self._least_grace_s
        if given is not None and given <= least:
            at = "terminationGracePeriodSeconds"
            yield Fault(at, f"must be above preStopSeconds + drainSeconds + 5, {least}")

    @property
    def _least_grace_s(self) -> int:
        return self.pre_stop_seconds + self.drain_seconds + 5

    @property
    def grace_s(self) -> int:
        """Time from the decision to end a pod until it is killed."""
        return self.termination_grace_period_seconds or self._least_grace_s + 10


class RouterPods(PodSettings):
    """Routers: both front doors, and the choice of workers."""

    grpc_port: int = setting(50051, "of the gRPC front door", ge=1, le=65_535)
    http_port: int = setting(8000, "of the HTTP front door", ge=1, le=65_535)
    metrics_port: int = setting(9400, "of /metrics", ge=1, le=65_535)
    bind_host: str = setting("", "address the doors bind; empty = the pod's", max_length=253)


class WorkerPorts(PolicySection):
    """Ports of every worker."""

    grpc: int = setting(50061, "for routers and the autoscaler", ge=1, le=65_535)
    transfer: int = setting(50071, "KV, for other workers", ge=1, le=65_535)
    metrics: int = setting(9400, "of /metrics", ge=1, le=65_535)


class WorkerPool(PodSettings):
    """The workers of one role."""

    shm_size: str = setting(
        "1Gi", "size of /dev/shm, in memory", pattern="^[1-9][0-9]*(Mi|Gi)$", max_length=16
    )


class Pools(PolicySection):
    """Both of them."""

    prefill: WorkerPool = setting(WorkerPool(), "workers that read prompts")
    decode: WorkerPool = setting(WorkerPool(), "workers that write answers")


class Transfer(PolicySection):
    """How KV crosses from pod to pod."""

    planes: tuple[str, ...] = setting(("zmq",), "best first", min_length=1, max_length=8)
    wire_dtype: str = setting("", "type of KV on zmq links; empty = as stored", max_length=16)
    existing_secret: str = setting("", "with the key ring, key cluster.keys", max_length=253)
    allow_plaintext_kv: bool = setting(False, "let KV cross the network without encryption")


class Auth(PolicySection):
    """Who may ask."""

    existing_secret: str = setting(
        "", "with API keys (*.json) and tenant.secret; empty = no keys", max_length=253
    )
    tenants_secret: str = setting("", "with the tenants' limits, key tenants.yaml", max_length=253)
    metrics_token_secret: str = setting(
        "", "with the token of workers' /metrics, key token", max_length=253
    )
    allow_unauthenticated: bool = setting(False, "serve without API keys")
    allow_plaintext: bool = setting(False, "serve, and connect pods, without TLS")


class Tls(PolicySection):
    """Secrets with tls.crt, tls.key and ca.crt; empty = no TLS."""

    doors_secret: str = setting("", "of the front doors", max_length=253)
    router_secret: str = setting("", "that routers show to workers", max_length=253)
    worker_secret: str = setting("", "that workers show to routers", max_length=253)

    def faults(self) -> Iterator[Fault]:
        """Both ends of a Link, or none."""
        if bool(self.router_secret) != bool(self.worker_secret):
            yield Fault("workerSecret", "belongs together with routerSecret: give both or none")


class Redis(PolicySection):
    """The store, of your own: by a Secret with its address, or by an address that is none."""

    existing_secret: str = setting("", "Secret with its address", max_length=253)
    url_key: str = setting("url", "key of the address", min_length=1, max_length=253)
    loader_url_key: str = setting(
        "loader-url", "key of the address of the user that loads scripts", max_length=253
    )
    ca_key: str = setting("", "key of who signs its certificate", max_length=253)
    url: str = setting(
        "", "address without a password", pattern="^(rediss?://[^@]*)?$", max_length=512
    )
    port: int = setting(6379, "its port, for network policies", ge=1, le=65_535)
    peers: tuple[dict[str, Any], ...] = setting(
        (), "where it is, as in a NetworkPolicy; empty = anywhere", max_length=16
    )

    def faults(self) -> Iterator[Fault]:
        """One of both."""
        if bool(self.existing_secret) == bool(self.url):
            yield Fault("existingSecret", "give it, or url, and not both")


class Rollout(PolicySection):
    """Bounds of changes."""

    progress_deadline_seconds: int = setting(
        1800, "new pods that do not serve by then are given up", unit="s", ge=60, le=86_400
    )
    drain_deadline_seconds: int = setting(
        600, "for all routers to end, and again for all workers", unit="s", ge=10, le=86_400
    )


class Autoscaler(PolicySection):
    """The process that follows the policy of this cluster, where there is one."""

    service_account_name: str = setting(
        "isthmus-autoscaler", "its account, made beforehand", pattern=NAME, max_length=253
    )
    image: Image = setting(Image(), "what it runs")
    resources: dict[str, Any] = setting({}, "as in a container")


class NetworkPolicies(PolicySection):
    """Who may talk to whom."""

    enabled: bool = setting(True, "deny what the cluster does not need")
    clients: tuple[dict[str, Any], ...] = setting(
        ({"podSelector": {}},), "peers that may call the front doors", max_length=16
    )
    monitoring: tuple[dict[str, Any], ...] = setting(
        ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},),
        "peers that may read /metrics",
        max_length=16,
    )
    dns: tuple[dict[str, Any], ...] = setting(
        ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}},),
        "peers that resolve names",
        max_length=16,
    )
    extra_egress: tuple[dict[str, Any], ...] = setting(
        (), "further rules for every pod, such as a collector's", max_length=16
    )


class ClusterSpec(PolicySection):
    """What the cluster is to be."""

    model: Model
    redis: Redis = setting(..., "the store")
    router: RouterPods = setting(RouterPods(), "routers")
    pools: Pools = setting(Pools(), "workers")
    worker_ports: WorkerPorts = setting(WorkerPorts(), "of every worker")
    transfer: Transfer = setting(Transfer(), "how KV crosses from pod to pod")
    auth: Auth = setting(Auth(), "who may ask")
    tls: Tls = setting(Tls(), "certificates")
    config: dict[str, Any] = setting({}, "sections of isthmus.yaml of every process")
    image_pull_secrets: tuple[LocalSecret, ...] = setting((), "for all images", max_length=8)
    secrets_revision: str = setting("", "change it and all pods restart", max_length=64)
    rollout: Rollout = setting(Rollout(), "bounds of changes")
    autoscaler: Autoscaler = setting(Autoscaler(), "where a policy names this cluster")
    network_policy: NetworkPolicies = setting(NetworkPolicies(), "who may talk to whom")

    def faults(self) -> Iterator[Fault]:
        """What has a place of its own is not set in the configuration as well."""
        parts = (("", self), ("router.", self.router), ("pools.prefill.", self.pools.prefill),
                 ("pools.decode.", self.pools.decode))  # fmt: skip
        for at, part in parts:
            yield from _own_faults(f"{at}config", part.config)


class RoleStatus(PolicySection):
    """Pods of one kind that get requests."""

    ready: int = setting(0, "that serve", ge=0)
    desired: int = setting(0, "that are asked for", ge=0)


class ClusterCondition(PolicySection):
    """A claim about the cluster, as Kubernetes has them."""

    type: Literal["Available", "Progressing", "Degraded"]
    status: Literal["True", "False", "Unknown"]
    observed_generation: int = setting(0, "of the resource that was judged", ge=0)
    last_transition_time: str = setting(..., "RFC 3339", max_length=64)
    reason: str = setting(..., "one word", max_length=256)
    message: str = setting("", "in one line", max_length=1024)


class ClusterStatus(PolicySection):
    """All that is told of a cluster."""

    observed_generation: int = setting(0, "of the resource that was acted on", ge=0)
    active_revision: str = setting("", "of the pods that get requests", max_length=63)
    target_revision: str = setting("", "of the pods that are to get them", max_length=63)
    rollout_started_at: str | None = setting(None, "of the target, RFC 3339", max_length=64)
    failed_generation: int = setting(
        0, "of the resource whose pools were given up: not tried again", ge=0
    )
    router: RoleStatus = setting(RoleStatus(), "routers")
    prefill: RoleStatus = setting(RoleStatus(), "workers that read prompts")
    decode: RoleStatus = setting(RoleStatus(), "workers that write answers")
    conditions: tuple[ClusterCondition, ...] = setting((), "one of each type", max_length=8)


class SpecFaults(Exception):
    """A spec is wrong: every fault, in one line each."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def parse_spec(values: Mapping[str, Any]) -> ClusterSpec:
    """Read a spec as the API server tells it; raises SpecFaults."""
    try:
        return ClusterSpec.model_validate_json(
            json.dumps(values), strict=True, by_alias=True, by_name=False
        )
    except ValidationError as error:
        raise SpecFaults(tuple(fault_lines("spec.", error))) from None


def parse_status(values: Mapping[str, Any] | None) -> ClusterStatus:
    """Read what was told before; what cannot be read is told anew."""
    try:
        return ClusterStatus.model_validate_json(json.dumps(values or {}), by_alias=True)
    except ValidationError:
        return ClusterStatus()


def _own_faults(at: str, config: Mapping[str, Any]) -> Iterator[Fault]:
    for section, keys in _OWN_KEYS.items():
        given = config.get(section)
        for key in keys:
            if isinstance(given, Mapping) and key in given:
                yield Fault(f"{at}.{section}.{key}", "is set by the operator")


def fault_lines(start: str, error: ValidationError) -> Iterator[str]:
    """Tell each fault of a model in one line."""
    # Values are left out: a configuration may hold what is nobody's business.
    for item in error.errors(include_url=False, include_input=False):
        place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        yield f"{start}{place.removeprefix('.')}: {message}".replace(": : ", ": ")
