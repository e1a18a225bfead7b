"""JSON, merge and strategic merge patches. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonpatch

from tests.fakekube.errors import ApiError
from tests.fakekube.schemas import Json, Schema

_ORDER, _DELETE_FROM = "$setElementOrder/", "$deleteFromPrimitiveList/"


def json_patched(resource: Json, operations: Json) -> Json:
    """Follow operations, in order; raises ApiError."""
    try:
        return jsonpatch.apply_patch(resource, operations)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, TypeError) as error:
        raise ApiError(422, f"the patch cannot be applied: {error}") from None


def merge_patched(value: Json, patch: Json) -> Json:
    """Merge objects and replace everything else; null removes."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(value) if isinstance(value, Mapping) else {}
    for name, item in patch.items():
        if item is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patched(merged.get(name), item)
    return merged


def strategic_patched(value: Json, patch: Mapping[str, Json], schema: Schema) -> Json:
    """Merge as the schema says: lists of named items item by item."""
    if patch.get("$patch") == "replace":
        return {name: item for name, item in patch.items() if name != "$patch"}
    merged = dict(value) if isinstance(value, Mapping) else {}
    kept = patch.get("$retainKeys")
    if kept is not None:
        merged = {name: item for name, item in merged.items() if name in kept}
    for name, item in patch.items():
        if name.startswith(_DELETE_FROM):
            target = name.removeprefix(_DELETE_FROM)
            merged[target] = [old for old in merged.get(target) or () if old not in item]
        elif name.startswith("$"):
            continue
        elif item is None:
            merged.pop(name, None)
        else:
            order = patch.get(f"{_ORDER}{name}")
            merged[name] = _field(merged.get(name), item, schema.field(name), order)
    return merged


def _field(old: Json, new: Json, schema: Schema, order: Json) -> Json:
    if isinstance(new, Mapping):
        return strategic_patched(old, new, schema)
    if not isinstance(new, list):
        return new
    key = schema.merge_key
    if key is None:
        return new
    if not key:
        return [*(old or ()), *(item for item in new if item not in (old or ()))]
    return _ordered(_items(old or [], new, key, schema.items), order, key)


def _items(old: list[Json], new: list[Json], key: str, schema: Schema) -> list[Json]:
    if any(item.get("$patch") == "replace" for item in new):
        return [item for item in new if "$patch" not in item]
    merged = {item.get(key): item for item in old}
    for item in new:
        if item.get("$patch") == "delete":
            merged.pop(item[key], None)
        else:
            merged[item[key]] = strategic_patched(merged.get(item[key]), item, schema)
    return list(merged.values())


def _ordered(items: list[Json], order: Json, key: str) -> list[Json]:
    if not order:
        return items
    wanted: dict[Any, int] = {item.get(key): index for index, item in enumerate(order)}
    return sorted(items, key=lambda item: wanted.get(item.get(key), len(wanted)))
