"""The definition of IsthmusCluster is one that an API server takes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.autoscaler.structural_schema import Schema
from services.operator.cluster import SpecFaults, parse_spec
from services.operator.cluster_schema import cluster_crd
from tests.support.operator_world import SPEC, World

ROOT: Schema = cluster_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, node
    for key, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from nodes(node[key], f"{path}[]")


def has_field(path: list[str]) -> bool:
    node = ROOT
    for part in path:
        inner = node.get("items") if part == "[]" else node.get("properties", {}).get(part)
        if inner is None:
            return False
        node = inner
    return True


def test_every_place_has_a_type_and_lists_have_bounds() -> None:
    for path, node in nodes(ROOT):
        assert node["type"] in ("object", "array", "string", "integer", "boolean"), path
        assert "$ref" not in node
        assert "default" not in node, path  # defaults are the program's
        if node["type"] == "array":
            assert node["maxItems"] <= 64, path
        if node["type"] == "object" and path:
            kinds = {"properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"}
            assert len(kinds & node.keys()) == 1 or path == ".metadata", path


def test_what_kubernetes_defines_is_passed_on() -> None:
    free = {path for path, node in nodes(ROOT) if node.get("x-kubernetes-preserve-unknown-fields")}
    assert {".spec.config", ".spec.router.affinity", ".spec.router.tolerations[]"} <= free
    assert ".spec" not in free


def test_columns_lead_somewhere() -> None:
    for column in cluster_crd()["spec"]["versions"][0]["additionalPrinterColumns"]:
        path = re.sub(r"\[\?\(.*?\)\]", ".[]", column["jsonPath"]).strip(".").split(".")
        assert path[0] == "metadata" or has_field(path), column


def test_there_is_one_version_that_is_served_and_stored() -> None:
    versions = cluster_crd()["spec"]["versions"]
    assert [(v["name"], v["served"], v["storage"]) for v in versions] == [("v1alpha1", True, True)]
    assert versions[0]["subresources"] == {"status": {}}


def test_every_status_we_tell_is_in_the_schema() -> None:
    world = World()
    for _ in range(4):
        world.reconcile()
        world.run()

    def check(value: object, path: list[str]) -> None:
        assert has_field(path), path
        if isinstance(value, dict):
            for key, inner in value.items():
                check(inner, [*path, key])
        for inner in value if isinstance(value, list) else []:
            check(inner, [*path, "[]"])

    check(world.status, ["status"])


def test_what_the_operator_decides_is_refused_in_the_configuration() -> None:
    values = {**SPEC, "config": {"worker": {"worker_id": "x"}, "model": {"name": "y"}}}
    try:
        parse_spec(values)
    except SpecFaults as error:
        told = str(error)
    assert "config.worker.worker_id: is set by the operator" in told
    assert "config.model.name: is set by the operator" in told
