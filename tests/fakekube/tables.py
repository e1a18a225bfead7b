"""Tables, as kubectl get shows objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tests.fakekube.kinds import Kind, KindKey, Resource

_STEP = re.compile(
    r"""\.(?P<name>(?:[\w-]|\\.)+)
    |\['(?P<quoted>(?:[^'\\]|\\.)+)'\]
    |\[(?P<index>\d+|\*)\]
    |\[\?\(@\.(?P<key>[\w.-]+)\s*==\s*["'](?P<value>[^"']*)["']\)\]""",
    re.VERBOSE,
)


def find_path(value: Any, path: str) -> Any:
    """Follow a JSON path of the few forms that printer columns use; None where nothing is."""
    at, found = 0, [value]
    path = path if path.startswith((".", "[")) else f".{path}"
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            raise ValueError(f"a JSON path this stand-in does not read: {path}")
        found = [below for item in found for below in _follow(item, step)]
        at = step.end()
    if not found:
        return None
    return found[0] if len(found) == 1 else found


def _follow(item: Any, step: re.Match[str]) -> Iterable[Any]:
    if name := step["name"] or step["quoted"]:
        name = re.sub(r"\\(.)", r"\1", name)
        return [item[name]] if isinstance(item, Mapping) and name in item else []
    items = item if isinstance(item, list) else []
    if step["key"]:
        return [one for one in items if str(find_path(one, step["key"])) == step["value"]]
    return items if step["index"] == "*" else items[int(step["index"]) :][:1]


def age(then: str | None, now_unix_s: float) -> str:
    """How long ago, as kubectl shows it."""
    if not then:
        return "<unknown>"
    when = datetime.fromisoformat(then).astimezone(UTC)
    seconds = max(0, int(now_unix_s - when.timestamp()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _deployment(item: Resource) -> Sequence[Any]:
    status, wanted = item.get("status", {}), item["spec"].get("replicas", 1)
    ready = f"{status.get('readyReplicas', 0)}/{wanted}"
    return (ready, status.get("updatedReplicas", 0), status.get("availableReplicas", 0))


def _pod(item: Resource) -> Sequence[Any]:
    statuses = item.get("status", {}).get("containerStatuses") or []
    ready = sum(status["ready"] for status in statuses)
    shown = item.get("status", {}).get("phase", "Pending")
    for status in statuses:
        waiting = status["state"].get("waiting")
        shown = waiting["reason"] if waiting and "reason" in waiting else shown
    if "deletionTimestamp" in item["metadata"]:
        shown = "Terminating"
    restarts = sum(status["restartCount"] for status in statuses)
    return (f"{ready}/{len(item['spec']['containers'])}", shown, restarts)


def _sized(item: Resource) -> Sequence[Any]:
    status = item.get("status", {})
    return (
        item["spec"].get("replicas", 1),
        status.get("replicas", 0),
        status.get("readyReplicas", 0),
    )


_Row = Callable[[Resource], Sequence[Any]]
_BUILTIN: Mapping[KindKey, tuple[tuple[str, ...], _Row]] = {
    ("apps", "deployments"): (("Ready", "Up-to-date", "Available"), _deployment),
    ("apps", "replicasets"): (("Desired", "Current", "Ready"), _sized),
    ("", "pods"): (("Ready", "Status", "Restarts"), _pod),
}


def table(kind: Kind, listed: Resource, now_unix_s: float, include: str = "Metadata") -> Resource:
    """Show an object, or those of a list."""
    items = listed.get("items", [listed])
    names, cells = _columns(kind)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {} if "items" not in listed else listed["metadata"],
        "columnDefinitions": [
            {"name": name, "type": sort, "format": "", "description": name, "priority": priority}
            for name, sort, priority in names
        ],
        "rows": [{"cells": cells(item, now_unix_s), **_included(item, include)} for item in items],
    }


def _included(item: Resource, include: str) -> Resource:
    if include == "None":
        return {}
    return {"object": item if include == "Object" else metadata_only(item)}


def metadata_only(item: Resource) -> Resource:
    """The part that every kind has."""
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": item["metadata"],
    }


_Column = tuple[str, str, int]


def _columns(kind: Kind) -> tuple[list[_Column], Callable[[Resource, float], list[Any]]]:
    first: _Column = ("Name", "string", 0)
    if kind.columns:
        own = [(c["name"], c["type"], c.get("priority", 0)) for c in kind.columns]

        def cells(item: Resource, now_s: float) -> list[Any]:
            return [item["metadata"]["name"], *(_cell(item, c, now_s) for c in kind.columns)]

        return [first, *own], cells
    titles, row = _BUILTIN.get(kind.key, ((), lambda _item: ()))

    def builtin_cells(item: Resource, now_s: float) -> list[Any]:
        meta = item["metadata"]
        return [meta["name"], *row(item), age(meta.get("creationTimestamp"), now_s)]

    return [first, *((title, "string", 0) for title in titles), ("Age", "string", 0)], builtin_cells


def _cell(item: Resource, column: Mapping[str, Any], now_s: float) -> Any:
    found = find_path(item, column["jsonPath"])
    if column["type"] == "date":
        return age(found, now_s)
    return found
