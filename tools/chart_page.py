"""The chart's README: a table of every value, from the comments of values.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_KEY = re.compile(r"^( *)([A-Za-z0-9]+):")
_DOC = re.compile(r"^ *# -- (.*)$")

_HEAD = """\
# Chart isthmus

{note}
Router, prefill and decode pools, autoscaler, operator and a store for trials. **Rendered, not
run**: manifests are checked by the real helm, by schemas of Kubernetes and on a stand-in of a
cluster; none of this has met a real one.

Installing, sizes, security, upgrades: [kubernetes.md](../../docs/operations/kubernetes.md).
`profiles/` has files of values to begin with:

| files, in this order | for |
|---|---|
| `values-cpu.yaml` | a trial on CPUs, without keys and TLS |
| `values-production.yaml` | CPUs, keys, TLS, a store of one's own, the autoscaler |
| that and `values-h100.yaml` or `values-h200.yaml` | a GPU for each replica; rendered, not run |
| those and `values-rdma.yaml` | KV over NCCL with RDMA; rendered, not run |
| `values-cpu.yaml`, `values-operator.yaml` | the operator and one IsthmusCluster |
| `values-cpu.yaml`, `values-ray.yaml` | actors on a KubeRay RayCluster; rendered, not run |

## Values

Keys that the chart does not know are refused, as are values of another type. A component may give
any key of `podDefaults` itself; keys of `pools.decode` are those of `pools.prefill`.

| value | default | meaning |
|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Value:
    """One documented line of the file."""

    path: str
    default: Any  # any: whatever YAML holds
    meaning: str


def chart_page(values_file: Path, note: str) -> str:
    """Write the page."""
    text = values_file.read_text(encoding="utf-8")
    rows = [
        f"| `{value.path}` | `{_shown(value.default)}` | {_escaped(value.meaning)} |"
        for value in documented(text)
    ]
    return _HEAD.format(note=note) + "\n".join(rows) + "\n"


def documented(text: str) -> Iterator[Value]:
    """Every value that has a comment `# --`; raises ValueError for a comment without a value."""
    values = yaml.safe_load(text)
    path: list[tuple[int, str]] = []  # indent and key of the mappings around a line
    meaning = ""
    for line in text.splitlines():
        doc, key = _DOC.match(line), _KEY.match(line)
        if doc:
            meaning = doc.group(1)
        elif key:
            indent = len(key.group(1))
            path = [*(each for each in path if each[0] < indent), (indent, key.group(2))]
            if meaning:
                names = [name for _, name in path]
                yield Value(".".join(names), _at(values, names), meaning)
            meaning = ""
        elif meaning and not line.lstrip().startswith("#"):
            raise ValueError(f"values.yaml: no key follows {meaning!r}")


def _at(values: Mapping[str, Any], names: list[str]) -> Any:
    found: Any = values
    for name in names:
        found = found[name]
    return found


def _shown(value: Any) -> str:
    return json.dumps(value).replace("|", "\\|")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
