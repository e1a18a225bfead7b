"""What clients ask first: groups, resources and the OpenAPI documents that kubectl looks into."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.fakekube.kinds import Kind, Kinds, Resource

AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
_SUB_VERBS = {
    "log": ("get",),
    "eviction": ("create",),
    "token": ("create",),
    "finalize": ("update",),
}
_SUB_KINDS = {
    "scale": ("autoscaling", "v1", "Scale"),
    "eviction": ("policy", "v1", "Eviction"),
    "token": ("authentication.k8s.io", "v1", "TokenRequest"),
}
_PATCH_PARAMETERS = ("dryRun", "fieldManager", "fieldValidation", "force")


def _sub_verbs(sub: str) -> tuple[str, ...]:
    return _SUB_VERBS.get(sub, ("get", "patch", "update"))


def _groups(kinds: Iterable[Kind]) -> dict[str, dict[str, list[Kind]]]:
    groups: dict[str, dict[str, list[Kind]]] = {}
    for kind in kinds:
        groups.setdefault(kind.group, {}).setdefault(kind.version, []).append(kind)
    return groups


def aggregated(kinds: Kinds, *, core: bool) -> Resource:
    """Everything at once: of /api (core) or of /apis."""
    items = [
        {
            "metadata": {"name": group, "creationTimestamp": None},
            "versions": [
                {
                    "version": version,
                    "freshness": "Current",
                    "resources": [_aggregated_kind(kind) for kind in of_version],
                }
                for version, of_version in versions.items()
            ],
        }
        for group, versions in _groups(kinds).items()
        if (group == "") is core
    ]
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": "apidiscovery.k8s.io/v2",
        "metadata": {},
        "items": items,
    }


def _aggregated_kind(kind: Kind) -> Resource:
    response = {"group": kind.group, "version": kind.version, "kind": kind.kind}
    found: Resource = {
        "resource": kind.plural,
        "responseKind": response,
        "scope": "Namespaced" if kind.is_namespaced else "Cluster",
        "singularResource": kind.kind.lower(),
        "verbs": list(_VERBS),
    }
    if kind.short:
        found["shortNames"] = list(kind.short)
    if kind.categories:
        found["categories"] = list(kind.categories)
    subresources = []
    for sub in kind.subresources:
        group, version, name = _SUB_KINDS.get(sub, (kind.group, kind.version, kind.kind))
        sort = {"group": group, "version": version, "kind": name}
        subresources.append(
            {"subresource": sub, "responseKind": sort, "verbs": list(_sub_verbs(sub))}
        )
    if subresources:
        found["subresources"] = subresources
    return found


def api_versions() -> Resource:
    """/api, for clients that do not ask for everything at once."""
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}


def api_groups(kinds: Kinds) -> Resource:
    """/apis, for the same."""
    groups = [_group(name, list(of)) for name, of in _groups(kinds).items() if name]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def api_group(kinds: Kinds, name: str) -> Resource | None:
    """/apis/NAME."""
    versions = _groups(kinds).get(name)
    if not name or versions is None:
        return None
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(name, list(versions))}


def _group(name: str, versions: list[str]) -> Resource:
    told = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": told, "preferredVersion": told[0]}


def api_resources(kinds: Kinds, group: str, version: str) -> Resource | None:
    """/apis/GROUP/VERSION."""
    found = _groups(kinds).get(group, {}).get(version)
    if found is None:
        return None
    rows: list[Resource] = []
    for kind in found:
        shared = {"namespaced": kind.is_namespaced, "kind": kind.kind}
        row = {"name": kind.plural, "singularName": kind.kind.lower(), **shared}
        row |= {"verbs": list(_VERBS)} | ({"shortNames": list(kind.short)} if kind.short else {})
        rows.append(row)
        for sub in kind.subresources:
            own: dict[str, Any] = dict(shared)
            if sub in _SUB_KINDS:
                own |= zip(("group", "version", "kind"), _SUB_KINDS[sub], strict=True)
            name = f"{kind.plural}/{sub}"
            rows.append({"name": name, "singularName": "", **own, "verbs": list(_sub_verbs(sub))})
    api_version = f"{group}/{version}" if group else version
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": api_version,
        "resources": rows,
    }


def _path(group: str, version: str) -> str:
    return f"apis/{group}/{version}" if group else f"api/{version}"


def openapi_index(kinds: Kinds) -> Resource:
    """/openapi/v3: one document a group and version."""
    paths = {_path(kind.group, kind.version) for kind in kinds}
    return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in sorted(paths)}}


def openapi_document(kinds: Kinds, path: str) -> Resource | None:
    """Return the operations of one: kubectl looks whether a server validates fields."""
    found = [kind for kind in kinds if _path(kind.group, kind.version) == path]
    if not found:
        return None
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.37.0"},
        "paths": {_item_path(kind, path): _operations(kind) for kind in found},
    }


def _item_path(kind: Kind, path: str) -> str:
    space = "/namespaces/{namespace}" if kind.is_namespaced else ""
    return f"/{path}{space}/{kind.plural}/{{name}}"


def _operations(kind: Kind) -> Resource:
    sort = {"group": kind.group, "version": kind.version, "kind": kind.kind}
    patch = {
        "x-kubernetes-group-version-kind": sort,
        "x-kubernetes-action": "patch",
        "parameters": [
            {"name": name, "in": "query", "schema": {"type": "string"}}
            for name in _PATCH_PARAMETERS
        ],
        "responses": {"200": {"description": "OK"}},
    }
    return {"patch": patch}
