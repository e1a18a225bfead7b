"""Label and field selectors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.fakekube.errors import ApiError

Matches = Callable[[Mapping[str, Any]], bool]
_SET = re.compile(r"^\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*$")
_PAIR = re.compile(r"^\s*([^=!<>\s]+)\s*(==|=|!=)\s*([^=!<>\s]*)\s*$")


def label_selector(text: str) -> Matches:
    """Read a selector as queries write it; raises ApiError."""
    tests = [_label_test(part) for part in _parts(text)]

    def matches(resource: Mapping[str, Any]) -> bool:
        labels = resource["metadata"].get("labels") or {}
        return all(test(labels) for test in tests)

    return matches


def of_object(selector: Mapping[str, Any]) -> Matches:
    """Read a selector as objects hold it: matchLabels and matchExpressions."""
    labels = selector.get("matchLabels") or {}
    expressions = selector.get("matchExpressions") or ()

    def matches(resource: Mapping[str, Any]) -> bool:
        found = resource["metadata"].get("labels") or {}
        return labels.items() <= found.items() and all(_expression(e, found) for e in expressions)

    return matches


def as_query(selector: Mapping[str, Any]) -> str:
    """Write a selector of an object as queries do."""
    parts = [f"{name}={value}" for name, value in (selector.get("matchLabels") or {}).items()]
    for test in selector.get("matchExpressions") or ():
        key, operator = test["key"], test["operator"]
        if operator in ("In", "NotIn"):
            parts.append(f"{key} {operator.lower()} ({','.join(test['values'])})")
        else:
            parts.append(key if operator == "Exists" else f"!{key}")
    return ",".join(parts)


def field_selector(text: str) -> Matches:
    """Read pairs of a dotted path and a value; raises ApiError."""
    tests: list[tuple[list[str], bool, str]] = []
    for part in _parts(text):
        found = _PAIR.match(part)
        if found is None:
            raise ApiError(400, f"invalid field selector {part!r}")
        tests.append((found[1].split("."), found[2] != "!=", found[3]))

    def matches(resource: Mapping[str, Any]) -> bool:
        return all((_at(resource, path) == value) is equal for path, equal, value in tests)

    return matches


def _at(resource: Mapping[str, Any], path: list[str]) -> str:
    found: Any = resource
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return "" if found is None else str(found)


def _parts(text: str) -> list[str]:
    return [part for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _label_test(part: str) -> Callable[[Mapping[str, str]], bool]:
    if found := _SET.match(part):
        key, values = found[1], {value.strip() for value in found[3].split(",")}
        if found[2] == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if found := _PAIR.match(part):
        key, value = found[1], found[3]
        if found[2] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    name = part.strip()
    if re.fullmatch(r"![^\s!]+", name):
        return lambda labels: name[1:] not in labels
    if re.fullmatch(r"[^\s!]+", name):
        return lambda labels: name in labels
    raise ApiError(400, f"unable to parse requirement {part!r}")


def _expression(test: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, operator, values = test["key"], test["operator"], test.get("values") or ()
    if operator == "Exists":
        return key in labels
    if operator == "DoesNotExist":
        return key not in labels
    return (labels.get(key) in values) is (operator == "In")
