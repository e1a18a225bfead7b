"""What a pass comes to: what to do in Kubernetes, why, and what to tell. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.operator.cluster import ClusterStatus
from services.operator.observed import Resource

FINALIZER = "isthmus.dev/drain"


@dataclass(frozen=True, slots=True)
class Apply:
    """Have a resource be as written, by server-side apply under our name."""

    body: Resource
    reason: str


@dataclass(frozen=True, slots=True)
class Patch:
    """Merge into a Deployment what nobody owns for good: its size, and marks of ours."""

    name: str
    body: Resource
    reason: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a resource, and what belongs to it."""

    kind: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Finalize:
    """Have the cluster's resource stay until we are done with it, or let it go."""

    is_wanted: bool
    reason: str


Action = Apply | Patch | Delete | Finalize


@dataclass(frozen=True, slots=True)
class Plan:
    """One pass."""

    actions: tuple[Action, ...] = ()
    status: ClusterStatus = field(default_factory=ClusterStatus)
    requeue_after_s: float | None = None  # something is awaited that no event may tell of
