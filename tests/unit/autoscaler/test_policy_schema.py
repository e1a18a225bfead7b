"""The resource is what Kubernetes takes: structural, with rules about fields that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from services.autoscaler.policy import PolicySection, PolicySpec
from services.autoscaler.policy_file import EXAMPLE, section_of
from services.autoscaler.policy_schema import crd, json_schema
from services.autoscaler.structural_schema import Schema

ROOT: Schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
# What a structural schema may say of a place, as far as this one says it.
ALLOWED = {
    "type", "description", "properties", "required", "items", "additionalProperties", "nullable",
    "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern",
    "minProperties", "maxProperties", "anyOf", "x-kubernetes-int-or-string",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations",
}  # fmt: skip
SCALARS = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}


def nodes(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, node
    for key, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from nodes(node[key], f"{path}[]")


def wrong(value: Any, node: Schema, path: str) -> Iterator[str]:
    """What the API server would refuse, or drop without a word, of a resource."""
    if node.get("x-kubernetes-int-or-string"):
        if type(value) not in (int, str) or not re.search(node["pattern"], str(value)):
            yield f"{path}: no quantity"
        return
    if type(value) is not SCALARS[node["type"]]:
        yield f"{path}: {node['type']}"
    elif value not in node.get("enum", [value]):
        yield f"{path}: enum"
    elif isinstance(value, list):
        for i, element in enumerate(value):
            yield from wrong(element, node["items"], f"{path}[{i}]")
    elif isinstance(value, dict) and ("properties" in node or "additionalProperties" in node):
        yield from (
            f"{path}.{key} is missing" for key in node.get("required", ()) if key not in value
        )
        for key, inner in value.items():
            child = node.get("properties", {}).get(key) or node.get("additionalProperties")
            yield from wrong(inner, child, f"{path}.{key}") if child else [f"{path}.{key}: unknown"]


def test_every_place_is_structural() -> None:
    for path, node in nodes(ROOT):
        assert set(node) <= ALLOWED, path
        if node.get("x-kubernetes-int-or-string"):
            assert "type" not in node, path
            assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
        else:
            assert node["type"] in SCALARS, path
            assert "anyOf" not in node, path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert (node.get("type") == "array") == ("items" in node), path
        assert set(node.get("required", ())) <= set(node.get("properties", {})), path


def test_lists_are_bounded_and_merged_by_name_where_elements_have_one() -> None:
    """A bound is what the price of a rule is estimated from: without one it is refused."""
    kinds = {}
    for path, node in nodes(ROOT):
        if node.get("type") == "array":
            assert node["maxItems"] <= 100, path
            kinds[path] = node["x-kubernetes-list-type"]
            for key in node.get("x-kubernetes-list-map-keys", ()):
                assert key in node["items"]["required"], path
                assert not node["items"]["properties"][key].get("nullable"), path
    named = {path for path, kind in kinds.items() if kind == "map"}
    assert named == {".spec.pools", ".spec.schedules", ".status.pools", ".status.conditions"}


def test_only_type_and_name_of_a_resource_are_left_to_kubernetes() -> None:
    assert ROOT["properties"]["metadata"] == {"type": "object"}
    assert ROOT["required"] == ["spec"]
    assert crd()["spec"]["versions"][0]["subresources"] == {"status": {}}


def fields_of(rule: str) -> Iterator[list[str]]:
    """Names after self, and after a variable, which stands for an element of the list before it."""
    elements = {"self": list[str]()}
    for source, variable in re.findall(r"(\w+(?:\.\w+)*)\.(?:all|exists)\((\w+),", rule):
        head, *rest = source.split(".")
        elements[variable] = [*elements[head], *rest, "[]"]
    for head, rest in re.findall(r"\b([a-z]+)((?:\.\w+)+)(?!\w*\()", re.sub(r"'[^']*'", "", rule)):
        if head in elements:
            yield [*elements[head], *rest.strip(".").split(".")]


def has_field(node: Schema, way: list[str]) -> bool:
    for part in way:
        inner = node.get("items") if part == "[]" else node.get("properties", {}).get(part)
        if inner is None:
            return False
        node = inner
    return True


def test_rules_speak_of_fields_that_exist() -> None:
    count = 0
    for path, node in nodes(ROOT):
        for rule in node.get("x-kubernetes-validations", ()):
            assert rule["message"], path
            text = re.sub(r"\.(size\(\)|all\(name, )", " ", rule["rule"])
            found = list(fields_of(text))
            assert found, rule
            count += len(found)
            for way in found:
                way = way[:-1] if way[-1] in ("all", "exists", "size") else way
                assert has_field(node, way), f"{path}: {rule['rule']}: {'.'.join(way)}"
    assert count > 60


def test_the_example_is_taken_and_nothing_of_it_is_dropped() -> None:
    values = yaml.safe_load(EXAMPLE.read_text())
    assert list(wrong(values, ROOT, "")) == []


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        ("mode", "auto", ".spec.mode: enum"),
        ("tickSeconds", "5", ".spec.tickSeconds: integer"),
        ("tickSecond", 5, ".spec.tickSecond: unknown"),
        ("budget", {"maxCostPerHour": "5x"}, ".spec.budget.maxCostPerHour: no quantity"),
        ("clusterRef", {}, ".spec.clusterRef.name is missing"),
    ],
)
def test_the_check_above_can_fail(place: str, value: object, fault: str) -> None:
    values = yaml.safe_load(EXAMPLE.read_text())
    values["spec"][place] = value
    assert list(wrong(values, ROOT, "")) == [fault]


def test_columns_lead_somewhere() -> None:
    for column in crd()["spec"]["versions"][0]["additionalPrinterColumns"]:
        path = re.sub(r"\[\?\(.*?\)\]", ".[]", column["jsonPath"]).strip(".").split(".")
        assert path[0] == "metadata" or has_field(ROOT, path), column


def test_every_section_of_the_model_is_in_both_schemas() -> None:
    def sections(kind: type[PolicySection]) -> Iterator[str]:
        yield kind.__name__
        for info in kind.model_fields.values():
            inner = section_of(info.annotation)
            if inner is not None:
                yield from sections(inner)

    schema = json_schema()
    assert set(sections(PolicySpec)) <= set(schema["$defs"])
    assert schema["$defs"]["Pool"]["additionalProperties"] is False
    assert "title" not in schema["$defs"]["Pool"]["properties"]["name"]
