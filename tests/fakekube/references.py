"""ConfigMaps, Secrets and claims that a pod needs before its containers can be made. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_VOLUMES = {"configMap": ("configmaps", "name"), "secret": ("secrets", "secretName")}


@dataclass(frozen=True, slots=True)
class Reference:
    """What is needed."""

    plural: str
    name: str
    keys: tuple[str, ...] = ()  # of its data; none = whatever it has


def references(spec: Mapping[str, Any]) -> Iterator[Reference]:
    """Return everything that a pod's specification needs to be there."""
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        for variable in container.get("env") or ():
            yield from _of_variable(variable.get("valueFrom") or {})
        for source in container.get("envFrom") or ():
            yield from _named(source, "configMapRef", "secretRef", ())
    for volume in spec.get("volumes") or ():
        yield from _of_volume(volume)
        for source in (volume.get("projected") or {}).get("sources") or ():
            yield from _of_volume(source, "name")


def _of_variable(source: Mapping[str, Any]) -> Iterator[Reference]:
    for name in ("configMapKeyRef", "secretKeyRef"):
        if name in source:
            yield from _named(source, "configMapKeyRef", "secretKeyRef", (source[name]["key"],))


def _named(
    source: Mapping[str, Any], config: str, secret: str, keys: tuple[str, ...]
) -> Iterator[Reference]:
    for field, plural in ((config, "configmaps"), (secret, "secrets")):
        found = source.get(field)
        if found and not found.get("optional"):
            yield Reference(plural, found["name"], keys)


def _of_volume(volume: Mapping[str, Any], secret_field: str = "") -> Iterator[Reference]:
    for field, (plural, named_by) in _VOLUMES.items():
        found = volume.get(field)
        if found and not found.get("optional"):
            keys = tuple(item["key"] for item in found.get("items") or ())
            yield Reference(plural, found[secret_field or named_by], keys)
    claim = volume.get("persistentVolumeClaim")
    if claim:
        yield Reference("persistentvolumeclaims", claim["claimName"])
