"""The part of the chart's values.schema.json that models of ours know: settings, and the policy.

The rest of the file is written by hand. With both in it helm refuses a misspelt setting, where
otherwise a pod would start and end again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from services.autoscaler.policy import PolicySpec
from services.common.config import IsthmusConfig
from services.common.config_source import find_field, iter_fields

# Any: JSON Schema is nested mappings of whatever.
Schema = dict[str, Any]

_DROPPED = ("title", "default", "unit", "public")


def values_schema(path: Path) -> str:
    """Return the file with the generated definitions anew."""
    schema = json.loads(path.read_text(encoding="utf-8"))
    definitions = schema["$defs"]
    for name in [name for name in definitions if name.startswith(("config.", "policy."))]:
        del definitions[name]
    _add(definitions, "sections", "config.", _settings())
    policy = PolicySpec.model_json_schema(by_alias=True)
    del policy["required"]  # the chart names the cluster, and asks for pools where it needs them
    _add(definitions, "policySpec", "policy.", policy)
    return json.dumps(schema, indent=1) + "\n"


def _settings() -> Schema:
    """All settings but secrets, which never stand in values."""
    schema = IsthmusConfig.model_json_schema()
    for doc in iter_fields(IsthmusConfig):
        section, _, name = doc.key.partition(".")
        info = find_field(IsthmusConfig, doc.key)
        if info is not None and info.annotation is SecretStr:
            reference = schema["properties"][section]["$ref"].rpartition("/")[2]
            del schema["$defs"][reference]["properties"][name]
    return schema


def _add(definitions: Schema, name: str, prefix: str, schema: Schema) -> None:
    inner = schema.pop("$defs", {})
    definitions[name] = _tidy(schema, prefix)
    for key, each in sorted(inner.items()):
        definitions[f"{prefix}{key}"] = _tidy(each, prefix)


def _tidy(node: Any, prefix: str) -> Any:
    """Leave out what only says how a form looks, and point references to their new places."""
    if isinstance(node, list):
        return [_tidy(each, prefix) for each in node]
    if not isinstance(node, dict):
        return node
    found: Schema = {}
    for key, value in node.items():
        if key == "$ref":
            found[key] = f"#/$defs/{prefix}{value.rpartition('/')[2]}"
        elif key == "properties":  # its keys are names, such as `default`
            found[key] = {name: _tidy(each, prefix) for name, each in value.items()}
        elif key not in _DROPPED:
            found[key] = _tidy(value, prefix)
    return found
