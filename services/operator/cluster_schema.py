"""The CustomResourceDefinition of IsthmusCluster, made of its model."""

from __future__ import annotations

from services.autoscaler.policy import PolicySection
from services.autoscaler.structural_schema import Definition, Rules, Schema
from services.operator.cluster import (
    API_VERSION,
    KIND,
    PLURAL,
    ClusterSpec,
    ClusterStatus,
    Redis,
    Tls,
)

_HAS_SECRET = "(has(self.existingSecret) && self.existingSecret != '')"
# What one section can be judged by; the operator tells the rest in the condition Degraded.
_RULES: dict[type[PolicySection], Rules] = {
    Redis: (
        (
            f"{_HAS_SECRET} != (has(self.url) && self.url != '')",
            "give existingSecret or url, and not both",
        ),
    ),
    Tls: (
        (
            "(has(self.routerSecret) && self.routerSecret != '') == "
            "(has(self.workerSecret) && self.workerSecret != '')",
            "routerSecret and workerSecret belong together: give both or none",
        ),
    ),
}


def cluster_crd() -> Schema:
    """Return the CustomResourceDefinition."""
    keys: dict[tuple[str, ...], str] = {("status", "conditions"): "type"}
    definition = Definition(API_VERSION, KIND, PLURAL, "icl", _columns(), keys, _RULES)
    return definition.crd("One cluster: routers and both pools.", ClusterSpec, ClusterStatus)


def _columns() -> list[Schema]:
    def column(name: str, path: str, kind: str = "string") -> Schema:
        return {"name": name, "type": kind, "jsonPath": path}

    def claim(kind: str, key: str = "status") -> str:
        return f'.status.conditions[?(@.type=="{kind}")].{key}'

    return [
        column("Model", ".spec.model.name"),
        column("Available", claim("Available")),
        column("Progress", claim("Progressing", "reason")),
        column("Degraded", claim("Degraded", "reason")),
        column("Routers", ".status.router.ready", "integer"),
        column("Prefill", ".status.prefill.ready", "integer"),
        column("Decode", ".status.decode.ready", "integer"),
        column("Revision", ".status.activeRevision"),
        column("Age", ".metadata.creationTimestamp", "date"),
    ]
