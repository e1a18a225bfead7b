"""What the operator sees of a cluster in Kubernetes, read into values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

# Any: what Kubernetes answers, nested mappings of whatever.
Resource = dict[str, Any]

REVISION_LABEL = "isthmus.dev/revision"
COMPONENT_LABEL = "app.kubernetes.io/component"
RETIRED = "isthmus.dev/retired-at"  # RFC 3339; since then a Deployment is to be empty
SIZED = "isthmus.dev/sized"  # its first size was set; a policy's autoscaler sets all others

ROUTER, PREFILL, DECODE, AUTOSCALER = "router", "prefill", "decode", "autoscaler"
SERVING = (ROUTER, PREFILL, DECODE)

MANY_RESTARTS = 5  # of a container, after which its pools are given up
_PENDING_S = 60.0  # a pod without a node is told of after so long
_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_ACCELERATORS = ("nvidia.com/", "amd.com/gpu", "gpu.intel.com/", "google.com/tpu")


@dataclass(frozen=True, slots=True)
class PodFault:
    """Why a pod does not serve, and what to do about it."""

    pod: str
    component: str
    revision: str
    reason: str
    hint: str
    is_hopeless: bool = False  # waiting longer would not help

    @property
    def message(self) -> str:
        """All of it in one line."""
        return f"{self.pod}: {self.reason}: {self.hint}"


@dataclass(frozen=True, slots=True)
class Workload:
    """One Deployment."""

    name: str
    component: str
    revision: str
    replicas: int  # that are asked for
    num_pods: int  # that are there, those that end included
    ready: int  # of the template of now
    serving: int  # of any template
    is_settled: bool  # every pod is of the template of now
    retired_at_s: float | None
    is_sized: bool
    has_stalled: bool  # by the Deployment's own deadline


@dataclass(frozen=True, slots=True)
class Policy:
    """A PoolAutoscalingPolicy that names this cluster."""

    name: str
    resource: Resource
    sizes: Mapping[str, int] = field(default_factory=dict)  # to begin with, by component
    pools: Mapping[str, str] = field(default_factory=dict)  # component -> name of its pool
    fault: str = ""  # "" = it can be followed


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that belongs to one cluster, as it was read a moment ago."""

    resources: Mapping[tuple[str, str], Resource] = field(default_factory=dict)  # by kind, name
    workloads: Mapping[str, Workload] = field(default_factory=dict)  # by name
    pods: Mapping[tuple[str, str], int] = field(default_factory=dict)  # by revision, component
    faults: tuple[PodFault, ...] = ()
    policies: tuple[Policy, ...] = ()

    def of(self, revision: str) -> dict[str, Workload]:
        """Return the Deployments of a revision, by component."""
        return {w.component: w for w in self.workloads.values() if w.revision == revision}

    @property
    def revisions(self) -> tuple[str, ...]:
        """All that have a Deployment."""
        return tuple(sorted({w.revision for w in self.workloads.values() if w.revision}))

    def has_pods(self, revision: str, component: str) -> bool:
        """Whether any pod is left, one that ends included."""
        return self.pods.get((revision, component), 0) > 0


def observe(
    resources: Sequence[Resource],
    pods: Sequence[Resource],
    policies: Sequence[Policy],
    now_s: float,
) -> Observed:
    """Read what belongs to a cluster; `resources` tell their kind."""
    by_name = {(r["kind"], r["metadata"]["name"]): r for r in resources}
    deployments = [read_workload(r) for r in resources if r["kind"] == "Deployment"]
    counts: dict[tuple[str, str], int] = {}
    faults = []
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        at = (labels.get(REVISION_LABEL, ""), labels.get(COMPONENT_LABEL, ""))
        if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            counts[at] = counts.get(at, 0) + 1
        fault = pod_fault(pod, now_s)
        if fault is not None:
            faults.append(fault)
    return Observed(
        resources=by_name,
        workloads={w.name: w for w in deployments},
        pods=counts,
        faults=tuple(sorted(faults, key=lambda f: (not f.is_hopeless, f.pod))),
        policies=tuple(policies),
    )


def read_workload(resource: Resource) -> Workload:
    """Read a Deployment."""
    metadata, spec = resource["metadata"], resource.get("spec") or {}
    status, notes = resource.get("status") or {}, metadata.get("annotations") or {}
    labels = metadata.get("labels") or {}
    replicas = int(spec.get("replicas", 1))
    num_pods, updated = int(status.get("replicas") or 0), int(status.get("updatedReplicas") or 0)
    ready = int(status.get("readyReplicas") or 0)
    is_seen = int(status.get("observedGeneration") or 0) >= int(metadata.get("generation") or 0)
    stalled = (
        c.get("type") == "Progressing" and c.get("reason") == "ProgressDeadlineExceeded"
        for c in status.get("conditions") or ()
    )
    return Workload(
        name=metadata["name"],
        component=labels.get(COMPONENT_LABEL, ""),
        revision=labels.get(REVISION_LABEL, ""),
        replicas=replicas,
        num_pods=num_pods,
        # While templates are mixed all that is known is that old ones serve too.
        ready=ready if is_seen and updated == num_pods else 0,
        serving=ready,
        is_settled=is_seen and updated == num_pods == replicas,
        retired_at_s=read_time(notes.get(RETIRED)),
        is_sized=SIZED in notes,
        has_stalled=any(stalled),
    )


def read_time(text: str | None) -> float | None:
    """Return seconds of Unix time; None = none is told that could be read."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


def tell_time(at_s: float) -> str:
    """Write a time as Kubernetes does."""
    return datetime.fromtimestamp(int(at_s), UTC).isoformat().replace("+00:00", "Z")


def pod_fault(pod: Resource, now_s: float) -> PodFault | None:
    """Say why a pod does not come to serve; None = nothing is known against it."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return None
    found = _container_fault(status) or _scheduling_fault(metadata, status, now_s)
    if found is None:
        return None
    labels = metadata.get("labels") or {}
    reason, hint, is_hopeless = found
    return PodFault(
        metadata["name"],
        labels.get(COMPONENT_LABEL, ""),
        labels.get(REVISION_LABEL, ""),
        reason,
        hint,
        is_hopeless,
    )


def _container_fault(status: Resource) -> tuple[str, str, bool] | None:
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, restarts = waiting.get("reason", ""), int(container.get("restartCount") or 0)
        if reason in _PULL:
            hint = "the image cannot be had: check image and imagePullSecrets"
            return "ImagePullFailed", hint, False
        if reason in _CONFIG:
            return "ContainerConfigFailed", "a Secret or ConfigMap it needs is not there", False
        ended = (container.get("lastState") or {}).get("terminated") or {}
        if reason == "CrashLoopBackOff" or (restarts and not container.get("ready")):
            return _crash(ended, restarts)
    return None


def _crash(ended: Resource, restarts: int) -> tuple[str, str, bool]:
    is_hopeless = restarts >= MANY_RESTARTS
    if ended.get("reason") == "OOMKilled":
        hint = "it needs more memory than resources.limits.memory allows"
        return "OutOfMemory", f"{hint} ({restarts} restarts)", is_hopeless
    status = ended.get("exitCode", "unknown")
    hint = f"exit status {status}, {restarts} restarts: see `kubectl logs --previous`"
    return "CrashLoop", hint, is_hopeless


def _scheduling_fault(
    metadata: Resource, status: Resource, now_s: float
) -> tuple[str, str, bool] | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") != "PodScheduled" or condition.get("status") != "False":
            continue
        created_s = read_time(metadata.get("creationTimestamp"))
        if created_s is not None and now_s - created_s < _PENDING_S:
            return None
        message = " ".join(str(condition.get("message", "")).split())[:300]
        if any(name in message for name in _ACCELERATORS):
            return "NoAccelerator", f"no node has a free one: {message}", False
        return "Unschedulable", message or "no node takes it", False
    return None
