"""The verbs on resources: what a call does to the store, and what it answers."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.clock import Clock
from tests.fakekube.errors import ApiError, invalid
from tests.fakekube.kinds import CRD, Kind, Kinds, Resource
from tests.fakekube.ownership import Manager, after_update, applied, write_entries
from tests.fakekube.patches import json_patched, merge_patched, strategic_patched
from tests.fakekube.rules import broken_rules, completed
from tests.fakekube.schemas import Json, defaulted, pruned
from tests.fakekube.selectors import Matches, as_query, of_object
from tests.fakekube.store import Store

PODS, NAMESPACES = ("", "pods"), ("", "namespaces")
_CRD_FINALIZER = "customresourcecleanup.apiextensions.k8s.io"
_FOREGROUND = "foregroundDeletion"
_APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names."""

    kind: Kind
    namespace: str = ""
    name: str = ""
    sub: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """What a query says about a change."""

    manager: str = "unknown"
    force: bool = False
    is_dry: bool = False
    validation: str = "Warn"


class Api:
    """Belongs to the event loop; nothing here waits."""

    def __init__(self, store: Store, kinds: Kinds, clock: Clock) -> None:
        self._store = store
        self._kinds = kinds
        self._clock = clock
        self.warnings: list[str] = []  # of the call under way

    def get(self, target: Target) -> Resource:
        """Read an object, or its scale."""
        found = self._store.get(target.kind, target.namespace, target.name)
        if target.sub == "scale":
            return _scale(target.kind, found)
        return _as_version(target.kind, found)

    def list(self, target: Target, matches: Matches, limit: int = 0, after: str = "") -> Resource:
        """Read objects, in pages where a limit is given."""
        space = target.namespace or None
        found = [
            _as_version(target.kind, item)
            for item in self._store.all_of(target.kind.key, space)
            if matches(item)
        ]
        start = int(after or 0)
        end = start + limit if limit else len(found)
        meta: Resource = {"resourceVersion": str(self._store.version)}
        if end < len(found):
            meta |= {"continue": str(end), "remainingItemCount": len(found) - end}
        return {
            "kind": f"{target.kind.kind}List",
            "apiVersion": target.kind.api_version,
            "metadata": meta,
            "items": found[start:end],
        }

    def create(self, target: Target, body: Resource, options: Options) -> Resource:
        """Add an object, or follow one posted to a subresource."""
        if target.sub == "eviction":
            return self._evict(target, body)
        kind, meta = target.kind, body.setdefault("metadata", {})
        if "name" not in meta and "generateName" in meta:
            meta["name"] = meta["generateName"] + secrets.token_hex(3)[:5]
        if not meta.get("name"):
            raise invalid(kind.title, "", ["metadata.name: Required value"])
        if kind.is_namespaced:
            meta.setdefault("namespace", target.namespace)
        if meta.get("namespace", "") != target.namespace:
            raise ApiError(400, "the namespace of the object is not the one of the request")
        manager = Manager(options.manager, "Update")
        ready = self._prepared(kind, None, body, options)
        entries = after_update(None, ready, kind.schema, manager, self._store.timestamp())
        ready["metadata"]["managedFields"] = write_entries(entries)
        return self._created(kind, ready, options)

    def make_pod(self, body: Resource) -> Resource:
        """Add a pod that a controller asks for."""
        kind = self._kinds.of(PODS)
        assert kind is not None
        return self.create(Target(kind, body["metadata"]["namespace"]), body, Options("controller"))

    def replace(self, target: Target, body: Resource, options: Options) -> Resource:
        """Put an object, its status or its scale."""
        before = self._store.get(target.kind, target.namespace, target.name)
        if target.sub == "scale":
            return self._rescale(target, before, body, options)
        version = body.get("metadata", {}).get("resourceVersion")
        if not version and target.kind.crd_schema is not None:
            raise invalid(
                target.kind.title,
                target.name,
                ["metadata.resourceVersion: Invalid value: 0: must be specified for an update"],
            )
        return self._updated(target, before, body, options)

    def patch(self, target: Target, sort: str, body: Json, options: Options) -> Resource:
        """Patch an object, its status or its scale."""
        if sort == _APPLY:
            return self._applied(target, body, options)
        before = self._store.get(target.kind, target.namespace, target.name)
        shown = _scale(target.kind, before) if target.sub == "scale" else before
        after = _patched(target.kind, sort, copy.deepcopy(shown), body)
        if target.sub == "scale":
            return self._rescale(target, before, after, options)
        return self._updated(target, before, after, options)

    def delete(self, target: Target, body: Resource) -> Resource:
        """Delete an object, now or once it may go."""
        found = self._store.get(target.kind, target.namespace, target.name)
        wanted = body.get("preconditions") or {}
        for name in ("uid", "resourceVersion"):
            if name in wanted and wanted[name] != found["metadata"][name]:
                raise _modified(target.kind, target.name)
        if "All" in (body.get("dryRun") or ()):
            return found
        return self.end(target.kind, found, body)

    def delete_all(self, target: Target, matches: Matches, body: Resource) -> Resource:
        """Delete those that match."""
        listed = self.list(target, matches)
        for item in listed["items"]:
            self.end(target.kind, item, body)
        return listed

    def end(self, kind: Kind, found: Resource, body: Mapping[str, Any]) -> Resource:
        """Delete an object: at once, or by a mark if it has finalizers or a grace period."""
        meta = found["metadata"]
        live = self._store.find(kind.key, meta.get("namespace", ""), meta["name"])
        if live is None:
            return found
        finalizers, meta = list(live["metadata"].get("finalizers") or ()), live["metadata"]
        if body.get("propagationPolicy") == "Foreground" and _FOREGROUND not in finalizers:
            finalizers.append(_FOREGROUND)
        if kind.key == CRD and _CRD_FINALIZER not in finalizers and "deletionTimestamp" not in meta:
            finalizers.append(_CRD_FINALIZER)
        if body.get("propagationPolicy") == "Orphan":
            self._orphan(live)
        grace_s = _grace_s(kind, live, body)
        if not finalizers and not grace_s and kind.key != NAMESPACES:
            self._store.remove(kind.key, live)
            return _done(kind, live)
        if "deletionTimestamp" in meta:
            return live
        at_s = self._clock.unix_ms() / 1000 + grace_s
        marks = {
            "deletionTimestamp": self._store.timestamp(at_s),
            "deletionGracePeriodSeconds": grace_s,
            **({"finalizers": finalizers} if finalizers else {}),
        }
        marked = {**live, "metadata": {**meta, **marks}}
        if kind.key == NAMESPACES:
            marked["status"] = {"phase": "Terminating"}
        return self._store.update(kind, live, marked)

    def _orphan(self, owner: Resource) -> None:
        uid = owner["metadata"]["uid"]
        for key, item in self._store.everything():
            owners = item["metadata"].get("ownerReferences") or ()
            kept = [ref for ref in owners if ref["uid"] != uid]
            kind = self._kinds.of(key)
            if len(kept) != len(owners) and kind is not None:
                meta = {**item["metadata"], "ownerReferences": kept}
                self._store.update(kind, item, {**item, "metadata": meta})

    def _applied(self, target: Target, body: Json, options: Options) -> Resource:
        kind, store = target.kind, self._store
        if not isinstance(body, dict) or "apiVersion" not in body:
            raise ApiError(400, "an applied object has to say its apiVersion and kind")
        live = store.find(kind.key, target.namespace, target.name)
        if body.get("metadata", {}).get("managedFields"):
            raise ApiError(400, "metadata.managedFields must be nil")
        if live is None and target.sub:
            store.get(kind, target.namespace, target.name)
        if kind.is_namespaced:
            body.setdefault("metadata", {}).setdefault("namespace", target.namespace)
        wanted = self._checked(kind, body, options)
        if target.sub == "status":
            keep = {"apiVersion", "kind", "metadata", "status"}
            wanted = {key: value for key, value in wanted.items() if key in keep}
            _only_identity(wanted)
        elif kind.has_status:
            wanted.pop("status", None)
        if live is not None:
            _check_version(kind, live, wanted)
        made = applied(
            live,
            wanted,
            kind.schema,
            Manager(options.manager, "Apply", target.sub),
            force=options.force,
            time=store.timestamp(),
        )
        ready = self._finished(kind, live, made, options)
        return (
            self._created(kind, ready, options)
            if live is None
            else self._put(kind, live, ready, options)
        )

    def _updated(
        self, target: Target, before: Resource, body: Resource, options: Options
    ) -> Resource:
        kind = target.kind
        _check_version(kind, before, body)
        meta = body.setdefault("metadata", {})
        if meta.get("name", target.name) != target.name:
            raise ApiError(400, "the name of the object does not match the name in the URL")
        after = {**body, "metadata": _kept_meta(before, meta)}
        if target.sub == "status":
            own = {key: before[key] for key in before if key != "status"}
            after = {**own, **({"status": body["status"]} if "status" in body else {})}
        elif kind.has_status:
            after.pop("status", None)
            if "status" in before:
                after["status"] = before["status"]
        ready = self._prepared(kind, before, after, options)
        manager = Manager(options.manager, "Update", target.sub)
        entries = after_update(before, ready, kind.schema, manager, self._store.timestamp())
        ready["metadata"]["managedFields"] = write_entries(entries)
        return self._put(kind, before, ready, options)

    def _prepared(
        self, kind: Kind, before: Resource | None, body: Resource, options: Options
    ) -> Resource:
        checked = self._checked(kind, body, options)
        if before is None and kind.has_status:
            checked.pop("status", None)
        return self._finished(kind, before, checked, options)

    def _checked(self, kind: Kind, body: Resource, options: Options) -> Resource:
        """Leave out fields that the kind does not have, or refuse them."""
        own = {"apiVersion": kind.api_version, "kind": kind.kind}
        for name, value in own.items():
            if body.get(name, value) != value:
                raise ApiError(
                    400, f"{name} {body[name]!r} does not match {value!r} of the request"
                )
        known, unknown = pruned({**body, **own}, kind.schema)
        told = [f'unknown field "{name}"' for name in unknown]
        if told and options.validation == "Strict":
            raise ApiError(400, f"strict decoding error: {', '.join(told)}")
        self.warnings += told if options.validation == "Warn" else ()
        checked: Resource = copy.deepcopy(known)
        return checked

    def _finished(
        self, kind: Kind, before: Resource | None, resource: Resource, options: Options
    ) -> Resource:
        if kind.crd_schema is not None:
            resource = defaulted(resource, kind.schema)
        name = resource["metadata"].get("name", "")
        problems = kind.problems(resource)
        if problems:
            raise invalid(kind.title, name, problems)
        ready = completed(kind, resource)
        problems = broken_rules(kind, before, ready)
        if problems:
            raise invalid(kind.title, name, problems)
        return {**ready, "metadata": {**ready["metadata"]}}

    def _created(self, kind: Kind, ready: Resource, options: Options) -> Resource:
        meta = ready["metadata"]
        for name in ("uid", "resourceVersion", "creationTimestamp", "generation", "selfLink"):
            meta.pop(name, None)
        space = meta.get("namespace", "")
        if kind.is_namespaced:
            self._check_namespace(space)
        if options.is_dry:
            if self._store.find(kind.key, space, meta["name"]) is not None:
                raise ApiError(409, f"{meta['name']} already exists", reason="AlreadyExists")
            return ready
        return self._store.create(kind, ready)

    def _check_namespace(self, name: str) -> None:
        found = self._store.find(NAMESPACES, "", name)
        if found is None:
            raise ApiError(404, f'namespaces "{name}" not found')
        if "deletionTimestamp" in found["metadata"]:
            raise ApiError(403, f"namespace {name} is being terminated")

    def _put(self, kind: Kind, before: Resource, after: Resource, options: Options) -> Resource:
        return (
            after if options.is_dry else _as_version(kind, self._store.update(kind, before, after))
        )

    def _rescale(
        self, target: Target, before: Resource, scale: Resource, options: Options
    ) -> Resource:
        assert target.kind.scale is not None
        _check_version(target.kind, before, scale)
        size = (scale.get("spec") or {}).get("replicas") or 0
        if size < 0:
            raise invalid(target.kind.title, target.name, ["spec.replicas: must be 0 or more"])
        after = copy.deepcopy(before)
        node = after
        for name in target.kind.scale.spec[:-1]:
            node = node.setdefault(name, {})
        node[target.kind.scale.spec[-1]] = size
        manager = Manager(options.manager, "Update", "scale")
        entries = after_update(before, after, target.kind.schema, manager, self._store.timestamp())
        after["metadata"]["managedFields"] = write_entries(entries)
        self._put(target.kind, before, after, options)
        return self.get(target) if not options.is_dry else _scale(target.kind, after)

    def _evict(self, target: Target, body: Resource) -> Resource:
        """End a pod unless a disruption budget says otherwise."""
        pod = self._store.get(target.kind, target.namespace, target.name)
        for budget in self._store.all_of(("policy", "poddisruptionbudgets"), target.namespace):
            if not of_object(budget["spec"].get("selector") or {})(pod):
                continue
            if budget.get("status", {}).get("disruptionsAllowed", 0) < 1 and _is_ready(pod):
                raise ApiError(
                    429, "Cannot evict pod as it would violate the pod's disruption budget."
                )
        self.end(target.kind, pod, body.get("deleteOptions") or {})
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


def _is_ready(pod: Resource) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _patched(kind: Kind, sort: str, shown: Resource, body: Json) -> Resource:
    if sort == "application/json-patch+json":
        return json_patched(shown, body)  # type: ignore[no-any-return]  # JSON
    if sort == "application/merge-patch+json":
        return merge_patched(shown, body)  # type: ignore[no-any-return]  # JSON
    if sort == "application/strategic-merge-patch+json" and kind.crd_schema is None:
        return strategic_patched(shown, body, kind.schema)  # type: ignore[no-any-return]  # JSON
    raise ApiError(415, f"the body of the request was in an unknown format: {sort}")


def _grace_s(kind: Kind, live: Resource, body: Mapping[str, Any]) -> int:
    if kind.key != PODS or not live["spec"].get("nodeName"):
        return 0
    if live.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    asked = body.get("gracePeriodSeconds")
    own = live["spec"].get("terminationGracePeriodSeconds", 30)
    return int(own if asked is None else asked)


def _done(kind: Kind, resource: Resource) -> Resource:
    meta = resource["metadata"]
    details = {"name": meta["name"], "kind": kind.plural, "uid": meta["uid"]}
    if kind.group:
        details["group"] = kind.group
    return {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
        "details": details,
    }  # fmt: skip


def _modified(kind: Kind, name: str) -> ApiError:
    return ApiError(
        409,
        f'Operation cannot be fulfilled on {kind.title} "{name}": the object has been modified; '
        "please apply your changes to the latest version and try again",
    )


def _check_version(kind: Kind, before: Resource, body: Resource) -> None:
    version = (body.get("metadata") or {}).get("resourceVersion")
    if version and version != before["metadata"]["resourceVersion"]:
        raise _modified(kind, before["metadata"]["name"])


_OF_THE_SERVER = (
    "uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds",
    "resourceVersion", "name", "namespace",
)  # fmt: skip


def _kept_meta(before: Resource, meta: Resource) -> Resource:
    """Take over what a client cannot change."""
    own = {name: before["metadata"][name] for name in _OF_THE_SERVER if name in before["metadata"]}
    kept = {key: value for key, value in meta.items() if key not in _OF_THE_SERVER} | own
    if "managedFields" not in kept and "managedFields" in before["metadata"]:
        kept["managedFields"] = before["metadata"]["managedFields"]
    return kept


def _only_identity(wanted: Resource) -> None:
    meta = wanted.get("metadata") or {}
    keep = ("name", "namespace", "resourceVersion", "uid")
    wanted["metadata"] = {name: meta[name] for name in keep if name in meta}


def _as_version(kind: Kind, found: Resource) -> Resource:
    """Show an object in the version that is asked for; nothing but its name differs."""
    if found.get("apiVersion") == kind.api_version:
        return found
    return {**found, "apiVersion": kind.api_version}


def _at(resource: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        resource = (resource or {}).get(name)
    return resource


def _scale(kind: Kind, found: Resource) -> Resource:
    assert kind.scale is not None
    meta = found["metadata"]
    if kind.scale.selector is None:
        selector = as_query(found["spec"].get("selector") or {})
    else:
        selector = str(_at(found, kind.scale.selector) or "") if kind.scale.selector else ""
    shown = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: meta[name] for name in shown if name in meta},
        "spec": {"replicas": _at(found, kind.scale.spec) or 0},
        "status": {"replicas": _at(found, kind.scale.status) or 0, "selector": selector},
    }
