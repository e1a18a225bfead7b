"""From a model of ours to a CustomResourceDefinition.

Kubernetes takes only structural schemas: no references, every place has a type, and nothing is said
twice. Rules between fields are written in CEL, as far as one resource can be judged in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.autoscaler.policy import PolicySection

# Any: JSON Schema is nested mappings of whatever.
Schema = dict[str, Any]
Rules = tuple[tuple[str, str], ...]  # expression, what is said where it is not true


@dataclass(frozen=True, slots=True)
class Definition:
    """What a CustomResourceDefinition says besides its fields."""

    api_version: str
    kind: str
    plural: str
    short_name: str
    columns: Sequence[Schema]
    # Lists whose elements have a name, by place: Kubernetes merges them by it.
    list_keys: Mapping[tuple[str, ...], str]
    rules: Mapping[type[PolicySection], Rules]

    def crd(self, words: str, spec: type[PolicySection], status: type[PolicySection]) -> Schema:
        """Return the CustomResourceDefinition, with the one version there is."""
        group, version_name = self.api_version.split("/")
        schema = {
            "type": "object",
            "description": words,
            "required": ["spec"],
            "properties": {
                "apiVersion": {"type": "string"},
                "kind": {"type": "string"},
                "metadata": {"type": "object"},
                "spec": self._structural(spec, ("spec",)),
                "status": self._structural(status, ("status",)),
            },
        }
        version = {
            "name": version_name,
            "served": True,
            "storage": True,
            "subresources": {"status": {}},
            "additionalPrinterColumns": list(self.columns),
            "schema": {"openAPIV3Schema": schema},
        }
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{self.plural}.{group}"},
            "spec": {
                "group": group,
                "scope": "Namespaced",
                "names": {
                    "kind": self.kind,
                    "listKind": f"{self.kind}List",
                    "plural": self.plural,
                    "singular": self.kind.lower(),
                    "shortNames": [self.short_name],
                },
                "versions": [version],
            },
        }

    def _structural(self, kind: type[PolicySection], at: tuple[str, ...]) -> Schema:
        schema = kind.model_json_schema(by_alias=True)
        found: Schema = self._inlined(schema, schema.get("$defs", {}), at)
        return found

    def _inlined(self, node: Schema, sections: Mapping[str, Schema], at: tuple[str, ...]) -> Schema:
        """Rewrite one node: its place in the resource says which lists have keys."""
        node, is_nullable = _without_null(node)
        node = _resolved(node, sections)
        found: Schema = {}
        if node.get("description"):
            found["description"] = _described(node)
        if "anyOf" in node:  # a quantity
            found |= {"anyOf": node["anyOf"], "pattern": node["pattern"]}
            found["x-kubernetes-int-or-string"] = True
        else:
            found["type"] = node["type"]
        found |= _bounds(node)
        if node.get("type") == "array":
            found["items"] = self._inlined(node["items"], sections, at)
            key = self.list_keys.get(at)
            found["x-kubernetes-list-type"] = "map" if key else "atomic"
            if key:
                found["x-kubernetes-list-map-keys"] = [key]
        if node.get("type") == "object":
            found |= self._object(node, sections, at)
        if is_nullable:
            found["nullable"] = True
        return found

    def _object(self, node: Schema, sections: Mapping[str, Schema], at: tuple[str, ...]) -> Schema:
        if node.get("additionalProperties") is True:  # what Kubernetes itself defines
            return {"x-kubernetes-preserve-unknown-fields": True}
        if "properties" not in node:
            return {
                "additionalProperties": self._inlined(node["additionalProperties"], sections, at)
            }
        found: Schema = {
            "properties": {
                key: self._inlined(child, sections, (*at, key))
                for key, child in node["properties"].items()
            }
        }
        if node.get("required"):
            found["required"] = node["required"]
        rules = {kind.__name__: rules for kind, rules in self.rules.items()}.get(node["title"], ())
        if rules:
            found["x-kubernetes-validations"] = [
                {"rule": rule, "message": message} for rule, message in rules
            ]
        return found


def _resolved(node: Schema, sections: Mapping[str, Schema]) -> Schema:
    if "$ref" not in node:
        return node
    target = sections[node["$ref"].rpartition("/")[2]]
    own: Schema = {key: node[key] for key in ("description", "unit") if key in node}
    return {**target, **own}


def _without_null(node: Schema) -> tuple[Schema, bool]:
    kinds = node.get("anyOf", [])
    if {"type": "null"} not in kinds:
        return node, False
    (inner,) = (kind for kind in kinds if kind != {"type": "null"})
    return {**{key: value for key, value in node.items() if key != "anyOf"}, **inner}, True


def _bounds(node: Schema) -> Schema:
    """Return what limits a value; exclusive bounds are of whole numbers here."""
    kept = ("enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
            "minProperties", "maxProperties", "pattern")  # fmt: skip
    found = {key: node[key] for key in kept if key in node}
    if "const" in node:
        found["enum"] = [node["const"]]
    if "exclusiveMinimum" in node:
        found["minimum"] = node["exclusiveMinimum"] + 1
    return found


def _described(node: Schema) -> str:
    words = " ".join(node["description"].split())
    return f"{words} ({node['unit']})" if node.get("unit") else words


def words(kind: type[PolicySection]) -> str:
    return " ".join((kind.__doc__ or "").split())


def tidy(node: Any) -> Any:
    """Drop what is for our own pages, and titles, which repeat the key."""
    if isinstance(node, list):
        return [tidy(part) for part in node]
    if not isinstance(node, dict):
        return node
    found = {}
    for key, value in node.items():
        if key in ("public", "unit") or (key == "title" and isinstance(value, str)):
            continue
        is_names = key in ("properties", "$defs")  # of fields and sections: any may be called so
        found[key] = {n: tidy(v) for n, v in value.items()} if is_names else tidy(value)
    if isinstance(node.get("description"), str):
        found["description"] = _described(node)
    return found
