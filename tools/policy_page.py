"""The pages and files made of the models of our resources, for tools/gen_docs.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import StrEnum
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import WithJsonSchema
from pydantic.fields import FieldInfo

from services.autoscaler.policy import PolicySection, PoolAutoscalingPolicy
from services.autoscaler.policy_file import section_of
from services.autoscaler.policy_schema import crd, json_schema
from services.autoscaler.policy_status import PolicyStatus
from services.autoscaler.structural_schema import Schema
from services.operator.cluster import ClusterSpec, ClusterStatus
from services.operator.cluster_schema import cluster_crd

_INTRO = """\
How the two pools are sized is one YAML file. It is a resource of Kubernetes at the same time, of
the kind `PoolAutoscalingPolicy`, and the same file works where there is no Kubernetes. Field names
are those of the HPA wherever it has one.

`isthmus policy example` prints a file to begin with, `isthmus policy lint FILE` tells everything
that is wrong in one at once, `isthmus policy explain FILE` says what it does. Unknown keys are
errors. A quantity is `"400m"`, `8192` or `"512Mi"`, as in Kubernetes: whole numbers need no quotes.

Rules between fields:

* a target has the one field of its type. `TTFT` and `ITL` are held at a `Value` in seconds,
  `KVUtilization` at a `Utilization`, `QueuedTokens` and `External` at an `AverageValue` for each
  replica or a `Value` for all of them;
* `TTFT` and `QueuedTokens` tell of the pool with role `Prefill`, `ITL` and `KVUtilization` of the
  one with role `Decode`, `External` of either. A metric is there once in a pool;
* `minReplicas` 0 needs `scaleToZero.enabled`, and both pools have it or none;
* the least replicas of both pools together fit the budget, and some sizes within all limits keep
  the ratio: by themselves and under each schedule;
* a schedule's limits replace the pool's own, one by one, while it holds. Where several hold at once
  the highest least and the highest most win, whatever their order;
* a schedule starts by local time. A start in an hour that is skipped comes right after it, one in
  an hour that comes twice is the first. The end is so many seconds later, by any clock;
* nothing is looked ahead less than the longest start, given up before it is expected, or shrunk
  twice for the same figure (`stabilizationWindowSeconds` of `scaleDown` is at least
  `staleAfterSeconds`).
"""


_CLUSTER_INTRO = """\
One cluster as a resource of Kubernetes, for the [operator](operations/operator.md). Fields that are
"as in a pod" or "as in a container" are passed on as they are. `config` holds sections of
`isthmus.yaml` ([configuration](config.md)), except what has a place of its own here.
"""


def policy_page(note: str) -> str:
    """Every field of a policy, and of its status in Kubernetes."""
    head = ["# Policy of the autoscaler", "", note, _INTRO]
    return _page(head, (("File", PoolAutoscalingPolicy), ("Status", PolicyStatus)))


def cluster_page(note: str) -> str:
    """Every field of a cluster's resource."""
    head = ["# The resource IsthmusCluster", "", note, _CLUSTER_INTRO]
    return _page(head, (("Spec", ClusterSpec), ("Status", ClusterStatus)))


def _page(lines: list[str], parts: Sequence[tuple[str, type[PolicySection]]]) -> str:
    for title, kind in parts:
        lines += [f"## {title}", ""]
        for path, section in _sections(kind, ""):
            lines += [*_table(path, section), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def schema_file() -> str:
    """The JSON Schema, for editors."""
    return json.dumps(json_schema(), indent=1) + "\n"


def crd_files(note: str) -> dict[str, str]:
    """Return the CustomResourceDefinitions, by the name of their file."""
    return {
        f"{each['spec']['names']['plural']}.yaml": _crd_file(note, each)
        for each in (crd(), cluster_crd())
    }


def _crd_file(note: str, definition: Schema) -> str:
    """Through JSON, so that nothing is written as a reference."""
    plain = json.loads(json.dumps(definition))
    return f"# {note}\n{yaml.safe_dump(plain, sort_keys=False, width=100)}"


def _sections(kind: type[PolicySection], path: str) -> Iterator[tuple[str, type[PolicySection]]]:
    """Depth first, as in the file: where a section is, and what it is."""
    yield path, kind
    for info in kind.model_fields.values():
        inner = section_of(info.annotation)
        if inner is not None:
            origin = get_origin(_given(info.annotation))
            mark = "[]" if origin is tuple else ".NAME" if origin is dict else ""
            yield from _sections(inner, f"{path}.{info.alias}{mark}".removeprefix("."))


def _table(path: str, kind: type[PolicySection]) -> list[str]:
    lines = [f"### `{path}`", ""] if path else []
    lines += [" ".join((kind.__doc__ or "").split()), ""]
    lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    for info in kind.model_fields.values():
        lines.append(
            f"| `{info.alias}` | {_type_name(info)} | {_default(info)} | {_meaning(info)} |"
        )
    return lines


def _type_name(info: FieldInfo) -> str:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    unit = f", {extra['unit']}" if extra.get("unit") else ""
    return _name(_given(info.annotation), info.metadata) + unit


def _name(kind: object, metadata: Sequence[object] = ()) -> str:
    if any(isinstance(part, WithJsonSchema) for part in metadata):
        return "quantity"
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _name(args[0], args[1:])
    if origin is tuple:
        return f"list of {_name(args[0])}"
    if origin is dict:
        return f"{_name(args[1])} by name"
    if origin is Literal:
        return _choice(args)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _choice(tuple(kind))
    if isinstance(kind, type) and issubclass(kind, PolicySection):
        return "section"
    names: dict[object, str] = {
        int: "integer", bool: _choice(("true", "false")), str: "text", Any: "anything",
    }  # fmt: skip
    return names[kind]


def _choice(words: Sequence[object]) -> str:
    return " \\| ".join(str(word) for word in words)


def _given(annotation: object) -> object:
    """Return what a field holds where it is not absent."""
    args = [arg for arg in get_args(annotation) if arg is not NoneType]
    return args[0] if NoneType in get_args(annotation) else annotation


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if info.default is None or section_of(info.annotation) is not None:
        return ""
    return f"`{json.dumps(info.default)}`".replace('"', "") if info.default != {} else ""


def _meaning(info: FieldInfo) -> str:
    section = section_of(info.annotation)
    if info.description or section is None:
        return info.description or ""
    return " ".join((section.__doc__ or "").split())
