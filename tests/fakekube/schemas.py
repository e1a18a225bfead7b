"""Schemas of built-in kinds and of CRDs: what fields there are, how lists merge, what is refused.

Those of built-in kinds are Kubernetes' own, as the package kubernetes-validate carries them. Rules
in CEL (x-kubernetes-validations) are not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

import jsonschema

# Any: JSON, of kinds that are known at run time only.
Json = Any
_REF = "#/$defs/"
_VERSION = "v1.37.0-local"
# Keys of items that may be left out, and what they then are.
_KEY_DEFAULTS = {"protocol": "TCP"}
_EMBEDDED = {"apiVersion", "kind", "metadata"}


class Schema:
    """A node of a schema."""

    def __init__(self, node: Mapping[str, Json]) -> None:
        self._node = node

    @property
    def node(self) -> Mapping[str, Json]:
        """The schema itself, never a reference."""
        while "$ref" in self._node:
            target = definitions()[self._node["$ref"].removeprefix(_REF)]
            rest = {key: value for key, value in self._node.items() if key != "$ref"}
            self._node = {**target, **rest}
        return self._node

    def field(self, name: str) -> Schema:
        """The schema of a field; an empty one where none is known."""
        found = self.node.get("properties", {}).get(name)
        if found is None:
            found = self.node.get("additionalProperties")
        return Schema(found if isinstance(found, dict) else {})

    @property
    def items(self) -> Schema:
        """The schema of a list's items."""
        return Schema(self.node.get("items") or {})

    @property
    def is_atomic_map(self) -> bool:
        """Whether an object is owned as a whole."""
        return self.node.get("x-kubernetes-map-type") == "atomic"

    @property
    def list_type(self) -> str:
        """How items of a list are owned: atomic, set or map."""
        return str(self.node.get("x-kubernetes-list-type") or "atomic")

    def item_key(self, item: Mapping[str, Json]) -> dict[str, Json]:
        """What an item of a list of type map is told apart by."""
        keys = {}
        for name in self.node.get("x-kubernetes-list-map-keys", ()):
            default = self.items.field(name).node.get("default", _KEY_DEFAULTS.get(name))
            keys[name] = item.get(name, default)
        return {name: value for name, value in keys.items() if value is not None}

    @property
    def merge_key(self) -> str | None:
        """By what a strategic merge patch tells items apart; None = it replaces the list."""
        if "merge" not in str(self.node.get("x-kubernetes-patch-strategy", "")):
            return None
        return str(self.node.get("x-kubernetes-patch-merge-key", ""))

    @property
    def keeps_unknown(self) -> bool:
        """Whether fields that are not named are kept."""
        node = self.node
        return bool(
            node.get("x-kubernetes-preserve-unknown-fields")
            or ("properties" not in node and not isinstance(node.get("additionalProperties"), dict))
        )


@cache
def definitions() -> Mapping[str, Json]:
    """Every built-in type by its name."""
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / _VERSION
    found: Mapping[str, Json] = json.loads((folder / "_definitions.json").read_text("utf-8"))
    return found["$defs"]  # type: ignore[no-any-return]  # JSON


@cache
def _names() -> Mapping[tuple[str, str, str], str]:
    return {
        (gvk["group"], gvk["version"], gvk["kind"]): name
        for name, node in definitions().items()
        for gvk in node.get("x-kubernetes-group-version-kind", ())
    }


@cache
def builtin(group: str, version: str, kind: str) -> Schema:
    """The schema of a built-in kind; KeyError where there is none."""
    return Schema({"$ref": _REF + _names()[group, version, kind]})


@cache
def _builtin_validator(name: str) -> Any:
    return jsonschema.Draft202012Validator({"$ref": _REF + name, "$defs": definitions()})


def problems_of_builtin(group: str, version: str, kind: str, value: Json) -> list[str]:
    """Say what is wrong with an object of a built-in kind."""
    validator = _builtin_validator(_names()[group, version, kind])
    return _told(validator.iter_errors(value))


def custom(schema: Mapping[str, Json]) -> Schema:
    """A CRD's schema, in which metadata is Kubernetes' own."""
    meta = {"$ref": f"{_REF}io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    own = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": meta}
    return Schema({**schema, "properties": {**schema.get("properties", {}), **own}})


def problems_of_custom(schema: Mapping[str, Json], value: Json) -> list[str]:
    """Say what is wrong with an object of a CRD."""
    shown = {key: item for key, item in value.items() if key != "metadata"}
    return _told(jsonschema.Draft202012Validator(_plain(schema)).iter_errors(shown))


def _plain(node: Json) -> Json:
    """OpenAPI 3.0 as CRDs write it -> JSON Schema."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {key: _plain(value) for key, value in node.items()}
    if plain.pop("x-kubernetes-int-or-string", False):
        plain["type"] = ["integer", "string"]
    if plain.pop("nullable", False) is True and "type" in plain:
        kinds = plain["type"] if isinstance(plain["type"], list) else [plain["type"]]
        plain["type"] = [*kinds, "null"]
    for bound in ("Minimum", "Maximum"):
        if plain.get(f"exclusive{bound}") is True:
            plain[f"exclusive{bound}"] = plain.pop(bound.lower())
    plain.pop("format", None)
    return plain


def _told(errors: Iterator[Any]) -> list[str]:
    told = []
    for error in errors:
        where = ".".join(str(part) for part in error.absolute_path) or "<root>"
        told.append(f"{where}: {error.message[:200]}")
    return sorted(told)


def pruned(value: Json, schema: Schema, path: str = "") -> tuple[Json, list[str]]:
    """Leave out fields that the schema does not know; which those were."""
    unknown: list[str] = []
    if isinstance(value, list):
        items = [pruned(item, schema.items, f"{path}[{i}]") for i, item in enumerate(value)]
        return [item for item, _ in items], [name for _, names in items for name in names]
    if not isinstance(value, dict):
        return value, []
    kept = {}
    properties = schema.node.get("properties", {})
    named = schema.node.get("additionalProperties")
    for name, item in value.items():
        where = f"{path}.{name}".lstrip(".")
        if name not in properties and not isinstance(named, dict):
            embedded = schema.node.get("x-kubernetes-embedded-resource") and name in _EMBEDDED
            if schema.keeps_unknown or embedded:
                kept[name] = item
            else:
                unknown.append(where)
            continue
        kept[name], more = pruned(item, schema.field(name), where)
        unknown += more
    return kept, unknown


def defaulted(value: Json, schema: Schema) -> Json:
    """Fill in the defaults of a CRD."""
    if isinstance(value, list):
        return [defaulted(item, schema.items) for item in value]
    if not isinstance(value, dict):
        return value
    filled = dict(value)
    for name, node in schema.node.get("properties", {}).items():
        if name not in filled and "default" in node:
            filled[name] = node["default"]
    return {name: defaulted(item, schema.field(name)) for name, item in filled.items()}
