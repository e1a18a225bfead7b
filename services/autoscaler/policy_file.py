"""Reading a policy: from a file or from Kubernetes, with all of its faults told at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from services.autoscaler.policy import (
    FAULTS,
    FIELDS_ONLY,
    Budget,
    Fault,
    MetricsSource,
    PolicySection,
    Pool,
    PoolAutoscalingPolicy,
    PoolSize,
    Predictive,
    Ratio,
    Schedule,
)
from services.autoscaler.policy_check import Parts, spec_faults
from services.common.bounded_file import read_bounded
from services.common.config_source import did_you_mean, parse_yaml
from services.common.errors import ConfigError

EXAMPLE = Path(__file__).parent / "example.yaml"
MAX_FILE_BYTES = 256 << 10
_MAX_TOLD = 50
_Section = TypeVar("_Section", bound=PolicySection)

# Where the checker speaks of Python to people who write YAML.
_PLAIN = {
    "missing": "is missing",
    "model_type": "must hold keys and values",
    "dict_type": "must hold keys and values",
    "tuple_type": "must be a list",
    "int_type": "must be a whole number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length}",
    "too_long": "must have at most {max_length}",
    "string_too_short": "must have {min_length} characters or more",
    "string_too_long": "must have {max_length} characters or fewer",
    "string_pattern_mismatch": "must match {pattern}",
}


class PolicyFaults(ConfigError):
    """A policy is wrong: every fault, and where it was read."""

    def __init__(self, where: str, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        told = [f"{f.path}: {f.message}" if f.path else f.message for f in faults[:_MAX_TOLD]]
        lines = [f"{where}: {_on_one_line(line)}" for line in told]
        if len(faults) > _MAX_TOLD:
            lines.append(f"{where}: and {len(faults) - _MAX_TOLD} more")
        super().__init__("\n".join(lines))


def _on_one_line(text: str) -> str:
    """Write out what is not printable: keys and values are anybody's."""
    return text if text.isprintable() else repr(text)[1:-1]


def load_policy(path: Path) -> PoolAutoscalingPolicy:
    """Read a policy from a file; raises ConfigError with everything that is wrong."""
    if path.exists() and not path.is_file():
        # A pipe would keep us until somebody writes; it could not be read again after an edit.
        raise ConfigError(f"policy: {path} is no regular file")
    raw = read_bounded("policy", path, MAX_FILE_BYTES)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    return parse_policy(parse_yaml(text, str(path)), str(path))


def parse_policy(values: Mapping[Any, Any], where: str) -> PoolAutoscalingPolicy:
    """Read a policy from what YAML or JSON held; types must be right as written.

    Raises:
        PolicyFaults: with everything that is wrong.
    """
    try:
        policy = _validated(PoolAutoscalingPolicy, values)
    except ValidationError as error:
        salvage = _Salvage(values)
        told = (*_section_faults(error), *salvage.faults, *spec_faults(salvage.parts))
        raise PolicyFaults(where, list(dict.fromkeys(told))) from None
    faults = list(spec_faults(Parts.of(policy.spec)))
    if faults:
        raise PolicyFaults(where, faults)
    return policy


def _validated(kind: type[_Section], values: object, *, context: str | None = None) -> _Section:
    # Strict JSON mode is right for YAML: lists become tuples, but "5" does not become 5.
    text = json.dumps(_with_text_keys(values), default=str)
    return kind.model_validate_json(
        text, strict=True, by_alias=True, by_name=False, context=context
    )


def _with_text_keys(values: object) -> object:
    """YAML has keys that JSON has not: dates, numbers."""
    if isinstance(values, Mapping):
        return {str(key): _with_text_keys(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_with_text_keys(value) for value in values]
    return values


def _section_faults(error: ValidationError) -> Iterator[Fault]:
    for item in error.errors(include_url=False):
        path = _path(item["loc"])
        if item["type"] == FAULTS:
            for fault in item["ctx"][FAULTS]:
                yield Fault(".".join(filter(None, (path, fault.path))), fault.message)
        else:
            yield Fault(path, _message(item))


def _path(loc: Sequence[int | str]) -> str:
    """Write a place as people look for it: spec.pools[1].metrics[0].target."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return "".join(parts).removeprefix(".")


def _message(item: ErrorDetails) -> str:
    kind, given = item["type"], item["input"]
    if kind == "extra_forbidden":
        return f"unknown key{did_you_mean(str(item['loc'][-1]), _known_keys(item['loc'][:-1]))}"
    if kind in ("enum", "literal_error"):
        choices = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        return f"no such value{did_you_mean(str(given), choices)}"
    plain = _PLAIN.get(kind)
    return (
        plain.format(**item.get("ctx", {})) if plain else item["msg"].removeprefix("Value error, ")
    )


def _known_keys(loc: Sequence[int | str]) -> list[str]:
    """Return the keys of the section at a place."""
    kind: object = PoolAutoscalingPolicy
    is_name = False  # of a mapping, whose keys are not ours
    for part in loc:
        if isinstance(part, int) or is_name:
            is_name = False
            continue
        section = section_of(kind)
        infos = [] if section is None else list(section.model_fields.values())
        kind = next((info.annotation for info in infos if info.alias == part), None)
        is_name = get_origin(kind) is dict
    section = section_of(kind)
    return [] if section is None else _keys(section)


def section_of(annotation: object) -> type[PolicySection] | None:
    """Return the section that a field holds, maybe several of, maybe none; None = plain values."""
    if isinstance(annotation, type) and issubclass(annotation, PolicySection):
        return annotation
    inner = (section_of(part) for part in get_args(annotation))
    return next((section for section in inner if section is not None), None)


def _keys(kind: type[PolicySection]) -> list[str]:
    return [info.alias or name for name, info in kind.model_fields.items()]


class _Salvage:
    """What can be read, section by section, of a file that is wrong somewhere.

    `faults` are those between fields of a pool that another of its fields kept from being judged.
    """

    def __init__(self, values: Mapping[Any, Any]) -> None:
        found = values.get("spec")
        spec: Mapping[Any, Any] = found if isinstance(found, Mapping) else {}
        pools, schedules = _listed(spec, "pools"), _listed(spec, "schedules")
        self.faults: list[Fault] = []
        sizes = [_part(PoolSize, _only(PoolSize, pool)) for pool in pools]
        for i, size in enumerate(sizes):
            own = () if size is None else size.faults()
            self.faults += (Fault(f"spec.pools[{i}].{f.path}", f.message) for f in own)
        known = tuple(size for size in sizes if size is not None)
        tick = spec.get("tickSeconds", 5)
        self.parts = Parts(
            sizes=known if known and len(known) == len(pools) else None,
            pools=tuple(_part(Pool, pool) for pool in pools),
            schedules=tuple(_part(Schedule, schedule) for schedule in schedules),
            budget=_part(Budget, spec.get("budget", {})),
            ratio=_part(Ratio, spec.get("ratio", {})),
            predictive=_part(Predictive, spec.get("predictive", {})),
            metrics=_part(MetricsSource, spec.get("metrics", {})),
            tick_seconds=tick if type(tick) is int else None,
        )


def _part(kind: type[_Section], values: object) -> _Section | None:
    try:
        return _validated(kind, values, context=FIELDS_ONLY)
    except ValidationError:
        return None  # told with the whole


def _only(kind: type[PolicySection], values: object) -> object:
    """Leave out what another section of the same place has."""
    if not isinstance(values, Mapping):
        return values
    return {key: values[key] for key in _keys(kind) if key in values}


def _listed(spec: Mapping[Any, Any], key: str) -> list[object]:
    found = spec.get(key, [])
    return found if isinstance(found, list) else []
