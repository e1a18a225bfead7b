from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.access import HTTP_POLICY
from services.gateway import openai_params, wire_names
from services.gateway.wire_names import RouteSpec, WireName

GATEWAY = Path(wire_names.__file__).parent
OWN_HEADER = re.compile(r"x-[a-z]+(-[a-z]+)+")
LISTS = (
    wire_names.ROUTES,
    wire_names.REQUEST_HEADERS,
    wire_names.RESPONSE_HEADERS,
    wire_names.GRPC_INITIAL,
    wire_names.GRPC_TRAILERS,
)


def nodes_of_the_gateway() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(GATEWAY.glob("*.py")):
        if path.name != "wire_names.py":
            yield from ((path, node) for node in ast.walk(ast.parse(path.read_text())))


def test_every_name_is_used_by_the_front_doors() -> None:
    """An entry nobody reads or writes is a promise in docs/http.md that is not kept."""
    used = {node.id for _, node in nodes_of_the_gateway() if isinstance(node, ast.Name)}
    entries = {n for n, v in vars(wire_names).items() if isinstance(v, RouteSpec | WireName)}
    assert len(entries) > 30
    assert sorted(entries - used) == []


def test_every_name_is_in_a_list() -> None:
    listed = {entry for entries in LISTS for entry in entries}
    entries = {v for v in vars(wire_names).values() if isinstance(v, RouteSpec | WireName)}
    assert entries <= listed


def test_no_front_door_has_a_header_that_is_not_listed() -> None:
    names = {
        entry.name for entries in LISTS[1:] for entry in entries if isinstance(entry, WireName)
    }
    stray = [
        f"{path.name}:{node.lineno}: {node.value}"
        for path, node in nodes_of_the_gateway()
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and OWN_HEADER.fullmatch(node.value)
        and node.value not in names
    ]
    assert stray == []


def test_the_listed_routes_are_those_with_a_policy() -> None:
    assert {route.path for route in wire_names.ROUTES} == HTTP_POLICY.keys()


@pytest.mark.parametrize("name", sorted(openai_params.LIMITED))
def test_limited_parameters_are_accepted_ones(name: str) -> None:
    assert name.partition(".")[0] in openai_params.CHAT | openai_params.COMPLETION
