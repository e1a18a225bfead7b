"""Kinds that the stand-in serves: those built in, and those that CRDs add."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.fakekube.schemas import Schema, builtin, custom, problems_of_builtin, problems_of_custom

Resource = dict[str, Any]
KindKey = tuple[str, str]  # group, plural


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a kind keeps what its scale shows, as paths of names."""

    spec: tuple[str, ...] = ("spec", "replicas")
    status: tuple[str, ...] = ("status", "replicas")
    selector: tuple[str, ...] | None = None  # None = spec.selector, as of built-in kinds


@dataclass(frozen=True)
class Kind:
    """One version of one kind."""

    group: str
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True
    short: tuple[str, ...] = ()
    has_status: bool = False
    scale: Scale | None = None
    columns: tuple[Mapping[str, Any], ...] = ()
    crd_schema: Mapping[str, Any] | None = None  # None = built in
    categories: tuple[str, ...] = ()
    _cache: dict[str, Schema] = field(default_factory=dict, compare=False, repr=False)

    @property
    def key(self) -> KindKey:
        """The same for all versions."""
        return (self.group, self.plural)

    @property
    def api_version(self) -> str:
        """As objects name it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def title(self) -> str:
        """As messages name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def schema(self) -> Schema:
        """What its fields are."""
        if "schema" not in self._cache:
            self._cache["schema"] = (
                builtin(self.group, self.version, self.kind)
                if self.crd_schema is None
                else custom(self.crd_schema)
            )
        return self._cache["schema"]

    def problems(self, value: Resource) -> list[str]:
        """Say what is wrong with an object."""
        if self.crd_schema is None:
            return problems_of_builtin(self.group, self.version, self.kind, value)
        return problems_of_custom(self.crd_schema, value)

    @property
    def subresources(self) -> tuple[str, ...]:
        """What lies under an object of it."""
        own = _SUBRESOURCES.get(self.key, ())
        return (*(("status",) * self.has_status), *(("scale",) * bool(self.scale)), *own)


_SUBRESOURCES = {
    ("", "pods"): ("log", "eviction"),
    ("", "namespaces"): ("finalize",),
    ("", "serviceaccounts"): ("token",),
}
_ALL = ("all",)
_WORKLOAD = {"has_status": True, "scale": Scale(), "categories": _ALL}


def _kinds(group: str, version: str, *rows: tuple[str, str, str], **more: Any) -> list[Kind]:
    return [
        Kind(group, version, plural, kind, short=tuple(short.split()), **more)
        for plural, kind, short in rows
    ]


_NETWORKING, _RBAC = "networking.k8s.io", "rbac.authorization.k8s.io"
BUILTIN: tuple[Kind, ...] = (
    *_kinds(
        "", "v1",
        ("pods", "Pod", "po"), ("services", "Service", "svc"), has_status=True, categories=_ALL,
    ),
    *_kinds(
        "", "v1",
        ("persistentvolumeclaims", "PersistentVolumeClaim", "pvc"),
        ("resourcequotas", "ResourceQuota", "quota"), has_status=True,
    ),
    *_kinds(
        "", "v1",
        ("configmaps", "ConfigMap", "cm"), ("secrets", "Secret", ""),
        ("serviceaccounts", "ServiceAccount", "sa"), ("events", "Event", "ev"),
        ("endpoints", "Endpoints", "ep"), ("limitranges", "LimitRange", "limits"),
    ),
    *_kinds(
        "", "v1", ("namespaces", "Namespace", "ns"), ("nodes", "Node", "no"),
        is_namespaced=False, has_status=True,
    ),
    *_kinds(
        "apps", "v1",
        ("deployments", "Deployment", "deploy"), ("replicasets", "ReplicaSet", "rs"),
        ("statefulsets", "StatefulSet", "sts"), **_WORKLOAD,
    ),
    *_kinds("apps", "v1", ("daemonsets", "DaemonSet", "ds"), has_status=True, categories=_ALL),
    *_kinds(
        "batch", "v1", ("jobs", "Job", ""), ("cronjobs", "CronJob", "cj"),
        has_status=True, categories=_ALL,
    ),
    *_kinds(_RBAC, "v1", ("roles", "Role", ""), ("rolebindings", "RoleBinding", "")),
    *_kinds(
        _RBAC, "v1", ("clusterroles", "ClusterRole", ""),
        ("clusterrolebindings", "ClusterRoleBinding", ""), is_namespaced=False,
    ),
    *_kinds(_NETWORKING, "v1", ("networkpolicies", "NetworkPolicy", "netpol")),
    *_kinds(_NETWORKING, "v1", ("ingresses", "Ingress", "ing"), has_status=True),
    *_kinds(
        "policy", "v1", ("poddisruptionbudgets", "PodDisruptionBudget", "pdb"), has_status=True,
    ),
    *_kinds("coordination.k8s.io", "v1", ("leases", "Lease", "")),
    *_kinds(
        "autoscaling", "v2", ("horizontalpodautoscalers", "HorizontalPodAutoscaler", "hpa"),
        has_status=True,
    ),
    *_kinds(
        "apiextensions.k8s.io", "v1",
        ("customresourcedefinitions", "CustomResourceDefinition", "crd"),
        is_namespaced=False, has_status=True,
    ),
    *_kinds(
        "scheduling.k8s.io", "v1", ("priorityclasses", "PriorityClass", "pc"), is_namespaced=False,
    ),
    *_kinds("events.k8s.io", "v1", ("events", "Event", "ev")),
    *_kinds("discovery.k8s.io", "v1", ("endpointslices", "EndpointSlice", "")),
    *_kinds("storage.k8s.io", "v1", ("storageclasses", "StorageClass", "sc"), is_namespaced=False),
)  # fmt: skip
CRD: KindKey = ("apiextensions.k8s.io", "customresourcedefinitions")

# Of others, which charts make objects of. Their own schemas are theirs: here every field is kept.
_ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
FOREIGN: tuple[Kind, ...] = tuple(
    Kind(group, version, plural, kind, has_status=True, crd_schema=_ANYTHING)
    for group, version, plural, kind in (
        ("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor"),
        ("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor"),
        ("monitoring.coreos.com", "v1", "prometheusrules", "PrometheusRule"),
        ("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute"),
        ("gateway.networking.k8s.io", "v1", "grpcroutes", "GRPCRoute"),
        ("ray.io", "v1", "rayclusters", "RayCluster"),
        ("cert-manager.io", "v1", "certificates", "Certificate"),
        ("cert-manager.io", "v1", "issuers", "Issuer"),
        ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet"),
    )
)


class Kinds:
    """What is served at a moment."""

    def __init__(self, kinds: Iterable[Kind] = (*BUILTIN, *FOREIGN)) -> None:
        self._fixed = tuple(kinds)
        self._of_crds: dict[str, list[Kind]] = {}

    def __iter__(self) -> Iterator[Kind]:
        yield from self._fixed
        for kinds in self._of_crds.values():
            yield from kinds

    def find(self, group: str, version: str, plural: str) -> Kind | None:
        """Return what a path names."""
        for kind in self:
            if (kind.group, kind.version, kind.plural) == (group, version, plural):
                return kind
        return None

    def of(self, key: KindKey) -> Kind | None:
        """Return any version of a kind."""
        return next((kind for kind in self if kind.key == key), None)

    def by_name(self, api_version: str, kind: str) -> Kind | None:
        """Return what an object says it is of."""
        for found in self:
            if (found.api_version, found.kind) == (api_version, kind):
                return found
        return None

    def add_crd(self, crd: Resource) -> None:
        """Serve what a CRD defines."""
        self._of_crds[crd["metadata"]["name"]] = list(_kinds_of(crd["spec"]))

    def remove_crd(self, name: str) -> None:
        """Serve it no longer."""
        self._of_crds.pop(name, None)


def _kinds_of(spec: Mapping[str, Any]) -> Iterator[Kind]:
    names = spec["names"]
    for version in spec["versions"]:
        if version["served"]:
            sub = version.get("subresources") or {}
            yield Kind(
                spec["group"],
                version["name"],
                names["plural"],
                names["kind"],
                is_namespaced=spec["scope"] == "Namespaced",
                short=tuple(names.get("shortNames") or ()),
                has_status="status" in sub,
                scale=_scale(sub["scale"]) if "scale" in sub else None,
                columns=tuple(version.get("additionalPrinterColumns") or ()),
                crd_schema=version["schema"]["openAPIV3Schema"],
                categories=tuple(names.get("categories") or ()),
            )


def _scale(sub: Mapping[str, str]) -> Scale:
    spec, status = (
        tuple(sub[name].lstrip(".").split("."))
        for name in ("specReplicasPath", "statusReplicasPath")
    )
    selector = sub.get("labelSelectorPath")
    return Scale(spec, status, tuple(selector.lstrip(".").split(".")) if selector else ())
