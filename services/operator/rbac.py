"""What the operator may do in Kubernetes, as data: the chart's Role is compared with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """Verbs on resources of one group."""

    group: str
    resource: str
    verbs: tuple[str, ...]


# Where clusters are: in each of their name spaces.
CLUSTER_RULES = (
    Rule("isthmus.dev", "isthmusclusters", ("get", "list", "watch", "patch")),
    Rule("isthmus.dev", "isthmusclusters/status", ("patch",)),
    Rule("autoscaling.isthmus.dev", "poolautoscalingpolicies", ("list", "watch")),
    Rule("apps", "deployments", ("list", "watch", "create", "patch", "delete")),
    Rule("", "configmaps", ("list", "create", "patch", "delete")),
    Rule("", "services", ("list", "create", "patch")),
    Rule("", "pods", ("list",)),
    Rule("policy", "poddisruptionbudgets", ("list", "create", "patch")),
    Rule("networking.k8s.io", "networkpolicies", ("list", "create", "patch", "delete")),
)
# In the operator's own name space.
LEASE_RULES = (Rule("coordination.k8s.io", "leases", ("get", "create", "update")),)
# Of an autoscaler that the operator makes: the names of Deployments change with the model.
AUTOSCALER_RULES = (
    Rule("apps", "deployments/scale", ("get", "update")),
    Rule("", "pods", ("list", "patch")),
)
