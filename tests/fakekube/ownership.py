"""Who owns which fields, and server-side apply. Pure.

A field is a path of parts as managedFields write them: `f:name`, `k:{"name":"a"}` for an item that
has a key, `v:1` for one of a set. Containers own nothing themselves, but items of keyed lists do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.fakekube.errors import ApiError
from tests.fakekube.kinds import Resource
from tests.fakekube.schemas import Json, Schema

Path = tuple[str, ...]
_ITEM = "<item>"  # the value of a path that only says that an item is there
_OWNED_META = ("labels", "annotations", "finalizers", "ownerReferences")


@dataclass(frozen=True, slots=True)
class Manager:
    """Who changes fields, and how."""

    name: str
    operation: str  # Apply or Update
    subresource: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """The fields of a manager."""

    manager: Manager
    api_version: str
    time: str
    fields: frozenset[Path]


def leaves(resource: Resource, schema: Schema) -> dict[Path, Json]:
    """Return every field that can be owned, with its value."""
    meta = resource.get("metadata") or {}
    shown = {key: value for key, value in resource.items() if key not in ("apiVersion", "kind")} | {
        "metadata": {key: meta[key] for key in _OWNED_META if key in meta}
    }
    found = _leaves(shown, schema, ())
    found.pop(("f:metadata",), None)
    return found


def _leaves(value: Json, schema: Schema, path: Path) -> dict[Path, Json]:
    found: dict[Path, Json] = {}
    if isinstance(value, Mapping) and value and not schema.is_atomic_map:
        for name, item in value.items():
            found |= _leaves(item, schema.field(name), (*path, f"f:{name}"))
        return found
    if isinstance(value, list) and value and schema.list_type == "map":
        for item in value:
            place = (*path, _part(schema.item_key(item)))
            found[place] = _ITEM
            found |= _leaves(item, schema.items, place)
        return found
    if isinstance(value, list) and value and schema.list_type == "set":
        return {(*path, f"v:{json.dumps(item)}"): item for item in value}
    return {path: value}


def _part(key: Mapping[str, Json]) -> str:
    return "k:" + json.dumps(dict(sorted(key.items())), separators=(",", ":"))


def read_entries(resource: Resource) -> list[Entry]:
    """Read managedFields."""
    return [
        Entry(
            Manager(e.get("manager", ""), e.get("operation", ""), e.get("subresource", "")),
            e.get("apiVersion", ""),
            e.get("time", ""),
            frozenset(_decode(e.get("fieldsV1") or {}, ())),
        )
        for e in resource["metadata"].get("managedFields") or ()
    ]


def write_entries(entries: Sequence[Entry]) -> list[Resource]:
    """Write managedFields, without managers that own nothing."""
    return [
        {
            "manager": e.manager.name,
            "operation": e.manager.operation,
            "apiVersion": e.api_version,
            "time": e.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": _encode(e.fields),
            **({"subresource": e.manager.subresource} if e.manager.subresource else {}),
        }
        for e in entries
        if e.fields
    ]


def _decode(node: Mapping[str, Json], path: Path) -> list[Path]:
    found = [path] if path and ("." in node or not node) else []
    for part, below in node.items():
        if part != ".":
            found += _decode(below, (*path, part))
    return found


def _encode(fields: frozenset[Path]) -> Resource:
    tree: Resource = {}
    for path in sorted(fields):
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node["."] = {}
    return _without_lone_dots(tree)


def _without_lone_dots(node: Resource) -> Resource:
    if set(node) == {"."}:
        return {}
    return {
        part: below if part == "." else _without_lone_dots(below) for part, below in node.items()
    }


def after_update(
    before: Resource | None, after: Resource, schema: Schema, manager: Manager, time: str
) -> list[Entry]:
    """Return who owns what once a manager has changed an object: it owns what it changed."""
    was = leaves(before, schema) if before is not None else {}
    now = leaves(after, schema)
    changed = {path for path, value in now.items() if path not in was or was[path] != value}
    gone = was.keys() - now.keys()
    entries = read_entries(after if "managedFields" in after["metadata"] else before or after)
    if not changed and not gone:
        return entries
    mine = frozenset(changed)
    kept = []
    for entry in entries:
        if entry.manager == manager:
            mine |= entry.fields - gone
        else:
            kept.append(_less(entry, changed | gone))
    return [*kept, Entry(manager, after["apiVersion"], time, mine)]


def _less(entry: Entry, fields: set[Path]) -> Entry:
    return Entry(entry.manager, entry.api_version, entry.time, entry.fields - fields)


def applied(
    live: Resource | None,
    wanted: Resource,
    schema: Schema,
    manager: Manager,
    *,
    force: bool,
    time: str,
) -> Resource:
    """Return the object that an apply makes; ApiError names fields that others hold."""
    wanted = _without_nulls(wanted)
    asked = leaves(wanted, schema)
    if live is None:
        entries = [Entry(manager, wanted["apiVersion"], time, frozenset(asked))]
        return _with_entries(wanted, entries)
    now = leaves(live, schema)
    entries = read_entries(live)
    differing = {path for path, value in asked.items() if now.get(path, _ITEM) != value}
    others = [entry for entry in entries if entry.manager != manager]
    contested = {path for entry in others for path in entry.fields & differing}
    if contested and not force:
        raise _conflict(others, contested)
    others = [_less(entry, contested) for entry in others]
    mine = next((entry.fields for entry in entries if entry.manager == manager), frozenset())
    dropped = mine - asked.keys() - {path for entry in others for path in entry.fields}
    merged = _pruned(_merged(live, wanted, schema), schema, dropped)
    new = Entry(manager, wanted["apiVersion"], time, frozenset(asked))
    same = leaves(merged, schema) == now and mine == new.fields and not contested
    return _with_entries(merged, entries if same else [*others, new])


def _with_entries(resource: Resource, entries: Sequence[Entry]) -> Resource:
    meta = {**resource["metadata"], "managedFields": write_entries(entries)}
    return {**resource, "metadata": meta}


def _conflict(others: Sequence[Entry], contested: set[Path]) -> ApiError:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{entry.manager.name}" using {entry.api_version}',
            "field": _told(path),
        }
        for entry in others
        for path in sorted(entry.fields & contested)
    ]
    told = "; ".join(f"{cause['message']}: {cause['field']}" for cause in causes)
    many = "conflict" if len(causes) == 1 else "conflicts"
    return ApiError(409, f"Apply failed with {len(causes)} {many}: {told}", causes=causes)


def _told(path: Path) -> str:
    told = ""
    for part in path:
        sort, _, rest = part.partition(":")
        if sort == "f":
            told += f".{rest}"
        elif sort == "k":
            pairs = ",".join(f"{k}={json.dumps(v)}" for k, v in json.loads(rest).items())
            told += f"[{pairs}]"
        else:
            told += f"[={rest}]"
    return told


def _without_nulls(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {k: _without_nulls(item) for k, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _merged(live: Json, wanted: Json, schema: Schema) -> Json:
    if isinstance(live, Mapping) and isinstance(wanted, Mapping) and not schema.is_atomic_map:
        merged = dict(live)
        for name, item in wanted.items():
            known = name in merged
            merged[name] = _merged(merged[name], item, schema.field(name)) if known else item
        return merged
    if isinstance(live, list) and isinstance(wanted, list):
        if schema.list_type == "map":
            return _merged_items(live, wanted, schema)
        if schema.list_type == "set":
            return [*wanted, *(item for item in live if item not in wanted)]
    return wanted


def _merged_items(live: list[Json], wanted: list[Json], schema: Schema) -> list[Json]:
    there = {_part(schema.item_key(item)): item for item in live}
    merged = []
    for item in wanted:
        known = there.pop(_part(schema.item_key(item)), None)
        merged.append(item if known is None else _merged(known, item, schema.items))
    return [*merged, *there.values()]


def _pruned(value: Json, schema: Schema, dropped: frozenset[Path] | set[Path]) -> Json:
    """Remove fields that nobody wants any more, and containers that become empty by that."""
    if not dropped:
        return value
    if isinstance(value, Mapping):
        kept = {}
        for name, item in value.items():
            below = _below(dropped, f"f:{name}")
            if () in below:
                continue
            left = _pruned(item, schema.field(name), below)
            if left or not below or not isinstance(left, dict | list):
                kept[name] = left
        return kept
    if isinstance(value, list):
        items = []
        for item in value:
            part = (
                _part(schema.item_key(item))
                if schema.list_type == "map"
                else f"v:{json.dumps(item)}"
            )
            below = _below(dropped, part)
            if () not in below:
                items.append(_pruned(item, schema.items, below))
        return items
    return value


def _below(dropped: frozenset[Path] | set[Path], part: str) -> set[Path]:
    return {path[1:] for path in dropped if path[:1] == (part,)}
