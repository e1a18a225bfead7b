"""What Kubernetes adds to objects of built-in kinds, and what of them never changes. Pure.

Only defaults that something here or a client looks at are filled in, and only fields are kept from
change that charts have been seen to change.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.fakekube.kinds import Kind, KindKey, Resource
from tests.fakekube.selectors import of_object

_DEPLOYMENTS, _STATEFUL = ("apps", "deployments"), ("apps", "statefulsets")
_JOBS = ("batch", "jobs")
_SERVICES, _PODS, _SECRETS = ("", "services"), ("", "pods"), ("", "secrets")
_CLAIMS = ("", "persistentvolumeclaims")

# Paths that an update may not change, by kind.
_FIXED: Mapping[KindKey, tuple[tuple[str, ...], ...]] = {
    _DEPLOYMENTS: (("spec", "selector"),),
    ("apps", "replicasets"): (("spec", "selector"),),
    ("apps", "daemonsets"): (("spec", "selector"),),
    _STATEFUL: (("spec", "selector"), ("spec", "serviceName"), ("spec", "volumeClaimTemplates")),
    _JOBS: (("spec", "selector"), ("spec", "template"), ("spec", "completions")),
    _SERVICES: (("spec", "clusterIP"),),
    _CLAIMS: (("spec", "accessModes"), ("spec", "storageClassName"), ("spec", "volumeName")),
    ("rbac.authorization.k8s.io", "rolebindings"): (("roleRef",),),
    ("rbac.authorization.k8s.io", "clusterrolebindings"): (("roleRef",),),
}
_FIXED_IF_SET = {(_SERVICES, ("spec", "clusterIP"))}


def completed(kind: Kind, resource: Resource) -> Resource:
    """Fill in what Kubernetes fills in."""
    complete = _COMPLETE.get(kind.key)
    if complete is None:
        return resource
    filled = copy.deepcopy(resource)
    complete(filled)
    return filled


def broken_rules(kind: Kind, before: Resource | None, after: Resource) -> list[str]:
    """Say which rules an object breaks besides its schema."""
    problems = list(_selects_itself(kind, after))
    for path in _FIXED.get(kind.key, ()) if before is not None else ():
        old, new = _at(before, path), _at(after, path)
        if old != new and not ((kind.key, path) in _FIXED_IF_SET and not old):
            problems.append(f"{'.'.join(path)}: Invalid value: field is immutable")
    return problems


def _selects_itself(kind: Kind, resource: Resource) -> Iterator[str]:
    if kind.key in (_DEPLOYMENTS, _STATEFUL):
        template = resource["spec"]["template"]
        if not of_object(resource["spec"]["selector"])(
            {"metadata": template.get("metadata") or {}}
        ):
            yield "spec.template.metadata.labels: `selector` does not match template `labels`"


def _at(resource: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        resource = (resource or {}).get(name)
    return resource


def _complete_deployment(resource: Resource) -> None:
    spec = resource["spec"]
    spec.setdefault("replicas", 1)
    spec.setdefault("revisionHistoryLimit", 10)
    spec.setdefault("progressDeadlineSeconds", 600)
    strategy = spec.setdefault("strategy", {})
    if strategy.setdefault("type", "RollingUpdate") == "RollingUpdate":
        rolling = strategy.setdefault("rollingUpdate", {})
        rolling.setdefault("maxSurge", "25%")
        rolling.setdefault("maxUnavailable", "25%")
    _complete_pod_spec(spec["template"]["spec"], "Always")


def _complete_stateful(resource: Resource) -> None:
    spec = resource["spec"]
    spec.setdefault("replicas", 1)
    spec.setdefault("podManagementPolicy", "OrderedReady")
    _complete_pod_spec(spec["template"]["spec"], "Always")


def _complete_job(resource: Resource) -> None:
    spec = resource["spec"]
    for name, value in (("parallelism", 1), ("completions", 1), ("backoffLimit", 6)):
        spec.setdefault(name, value)
    template = spec["template"].setdefault("metadata", {})
    labels = template.setdefault("labels", {})
    labels.setdefault("batch.kubernetes.io/job-name", resource["metadata"].get("name", ""))
    labels.setdefault("job-name", resource["metadata"].get("name", ""))
    spec.setdefault("selector", {"matchLabels": {"job-name": labels["job-name"]}})
    _complete_pod_spec(spec["template"]["spec"], "Never")


def _complete_pod(resource: Resource) -> None:
    _complete_pod_spec(resource["spec"], "Always")
    resource["spec"].setdefault("serviceAccountName", "default")


def _complete_pod_spec(spec: Resource, restart: str) -> None:
    spec.setdefault("restartPolicy", restart)
    spec.setdefault("terminationGracePeriodSeconds", 30)
    for container in (*spec.get("initContainers", ()), *spec.get("containers", ())):
        for port in container.get("ports") or ():
            port.setdefault("protocol", "TCP")


def _complete_service(resource: Resource) -> None:
    spec = resource.setdefault("spec", {})
    spec.setdefault("type", "ClusterIP")
    for port in spec.get("ports") or ():
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port["port"])


def _complete_secret(resource: Resource) -> None:
    plain = resource.pop("stringData", None) or {}
    coded = {name: base64.b64encode(text.encode()).decode() for name, text in plain.items()}
    if coded:
        resource["data"] = {**(resource.get("data") or {}), **coded}
    resource.setdefault("type", "Opaque")


_COMPLETE: Mapping[KindKey, Callable[[Resource], None]] = {
    _DEPLOYMENTS: _complete_deployment,
    _STATEFUL: _complete_stateful,
    _JOBS: _complete_job,
    _PODS: _complete_pod,
    _SERVICES: _complete_service,
    _SECRETS: _complete_secret,
}
