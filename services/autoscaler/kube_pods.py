"""Pods of a pool, and which of them Kubernetes ends when a pool shrinks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from services.autoscaler.driver import DriverError
from services.autoscaler.observation import ReplicaState

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
DRAINING = "autoscaling.isthmus.dev/draining"
DRAINING_COST = -1_000  # others go after those that drain
_ENDING_COST = -1_000_000  # and those after the ones that are to go now
_LEAST_COST = -(2**31)
_ENDED = ("Succeeded", "Failed")
_PHASES = {"Pending": 0, "Unknown": 1, "Running": 2}


@dataclass(frozen=True, slots=True)
class Pod:
    """What drivers look at."""

    name: str
    phase: str
    has_node: bool
    is_ready: bool
    is_terminating: bool
    is_draining: bool  # by our own word
    cost: int
    template: str  # which version of the pool it is of
    host: str  # "" = none yet
    since_unix_s: float  # in its state

    @property
    def is_alive(self) -> bool:
        """Whether Kubernetes counts it as one of its pool."""
        return not self.is_terminating and self.phase not in _ENDED

    @property
    def state(self) -> ReplicaState:
        """What it does, of a pod that has not ended."""
        if self.is_terminating or self.is_draining:
            return ReplicaState.DRAINING
        return ReplicaState.READY if self.is_ready else ReplicaState.STARTING


def read_pod(resource: Mapping[str, Any]) -> Pod:
    """Read a pod as Kubernetes tells it; raises DriverError."""
    try:
        return _read_pod(resource)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DriverError("the API server told a pod in an unknown form") from None


def _read_pod(resource: Mapping[str, Any]) -> Pod:
    metadata, status = resource["metadata"], resource.get("status") or {}
    notes, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    ready = conditions.get("Ready") or {}
    is_ready = ready.get("status") == "True"
    ended = metadata.get("deletionTimestamp")  # when it is to be gone at the latest
    grace_s = float(metadata.get("deletionGracePeriodSeconds") or 0) if ended else 0.0
    was_ready = ready.get("lastTransitionTime") if is_ready else None
    since = notes.get(DRAINING) or ended or was_ready or metadata["creationTimestamp"]
    return Pod(
        name=str(metadata["name"]),
        phase=str(status.get("phase") or "Pending"),
        has_node=bool((resource.get("spec") or {}).get("nodeName")),
        is_ready=is_ready,
        is_terminating=ended is not None,
        is_draining=DRAINING in notes,
        cost=_cost(notes.get(DELETION_COST)),
        template=str(labels.get("pod-template-hash") or ""),
        host=str(status.get("podIP") or ""),
        since_unix_s=datetime.fromisoformat(since).timestamp()
        - (grace_s if since == ended else 0.0),
    )


def _cost(text: str | None) -> int:
    """Kubernetes reads what is no whole number as nothing, too."""
    try:
        return int(text or "0")
    except ValueError:
        return 0


def why_not_these(pods: Sequence[Pod], victims: Collection[str]) -> str | None:
    """Say why a pool that shrinks by so many would not lose exactly these, once they are marked.

    Kubernetes ends pods without a node first, then those that do not run, then those that are not
    ready, and looks at costs only among equals. During a rollout it takes from every version.
    """
    alive = [pod for pod in pods if pod.is_alive]
    if len({pod.template for pod in alive}) > 1:
        return "a rollout is under way"
    last = max((_rank(pod) for pod in alive if pod.name in victims), default=None)
    for pod in alive:
        if last is not None and pod.name not in victims and _rank(pod) < last:
            return f"{pod.name} would be ended before: it does not serve yet"
    return None


def ending_cost(pods: Sequence[Pod], victims: Collection[str]) -> int:
    """Return what victims have to cost so that they go before all others of their rank."""
    others = (pod.cost for pod in pods if pod.is_alive and pod.name not in victims)
    return max(_LEAST_COST, min(_ENDING_COST, min(others, default=0) - 1))


def _rank(pod: Pod) -> tuple[bool, int, bool]:
    return (pod.has_node, _PHASES.get(pod.phase, 1), pod.is_ready)
