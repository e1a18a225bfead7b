"""Where settings come from: YAML and environment, with errors that name the key and its source."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from services.common.errors import ConfigError

ENV_PREFIX = "ISTHMUS_"
CONFIG_VARIABLE = "ISTHMUS_CONFIG"  # path of the file where no flag gives one
_MAX_FILE_BYTES = 1 << 20
_MAX_WRITTEN_OUT = 2 * _MAX_FILE_BYTES  # with aliases written out; no file without them has more
_MAX_DEPTH = 64
_BRACKET = re.compile(r"[\[\]{}]")
_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Source:
    """Settings of one origin: dotted key -> raw value, and dotted key -> words for the origin."""

    values: Mapping[str, object]
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One setting as documentation and `isthmus config show` need it."""

    key: str
    type_name: str
    unit: str
    default: str
    description: str
    is_public: bool


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error, and aliases cannot grow without end."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._extents: dict[yaml.Node, tuple[int, int]] = {}  # characters and values, levels

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if node is None:
            return None
        if not is_alias:
            self._extents[node] = self._extent(node)
        elif node not in self._extents:  # what it stands for is still being read
            raise ConfigError(f"line {node.start_mark.line + 1}: a value holds itself")
        return node

    def _extent(self, node: yaml.Node) -> tuple[int, int]:
        """Say how much there is with every alias written out, from what it is made of."""
        if isinstance(node, yaml.ScalarNode):
            return 1 + len(node.value), 1
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        extents = [self._extents[part] for part in parts]
        size = 1 + sum(size for size, _ in extents)
        levels = 1 + max((levels for _, levels in extents), default=0)
        if size > _MAX_WRITTEN_OUT or levels > _MAX_DEPTH:
            raise ConfigError(f"line {node.start_mark.line + 1}: too much, or nested too deep")
        return size, levels

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"line {line}: the key {key!r} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, root: type[BaseModel]) -> Source:
    """Read a file; types must be right as written (no "5" for 5)."""
    raw = _load_yaml(path)
    flat: dict[str, object] = {}
    for section, fields in raw.items():
        if section not in root.model_fields and not (isinstance(fields, dict) and fields):
            hint = did_you_mean(str(section), list(root.model_fields))
            raise ConfigError(f"{path}: unknown section {section!r}{hint}")
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}: section {section!r} must hold keys and values")
        flat.update({f"{section}.{key}": value for key, value in fields.items()})
    origins = {key: str(path) for key in flat}
    _validate_json(Source(flat, origins), root)
    return Source(flat, origins)


def _load_yaml(path: Path) -> dict[Any, Any]:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than 1 MiB")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str) -> dict[Any, Any]:
    """Parse a mapping; `where` it came from is for errors."""
    _check_depth(text, where)
    try:
        loader = _UniqueKeyLoader(text)
        try:
            raw = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML ({_yaml_place(error)})") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deep") from None
    except (ValueError, TypeError, AttributeError):
        # Of the library's constructors: 2020-99-99, !!int x, a list as a key.
        raise ConfigError(f"{where}: not valid YAML (a value is not of its type)") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: the file must hold sections, not a {type(raw).__name__}")
    return raw


def _check_depth(text: str, where: str) -> None:
    """Refuse what the library would take minutes for: the square of the open brackets."""
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += 1 if match.group() in "[{" else -1
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{where}: nested deeper than {_MAX_DEPTH} levels")


def _yaml_place(error: yaml.YAMLError) -> str:
    """Say where, never quoting the line: it may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "cannot be parsed"
    return problem if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that is given a file with all settings, merged."""
    return {
        name: value
        for name, value in environ.items()
        if name != CONFIG_VARIABLE and not _is_setting(name)
    }


def _is_setting(name: str) -> bool:
    return name.startswith(ENV_PREFIX) and "__" in name


def read_environ(environ: Mapping[str, str], root: type[BaseModel]) -> Source:
    """Take ISTHMUS_SECTION__FIELD variables; lists are comma-separated."""
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for name, text in environ.items():
        if not _is_setting(name):
            continue
        section, _, field = name[len(ENV_PREFIX) :].lower().partition("__")
        key = f"{section}.{field}"
        values[key] = _split_list(key, text, root)
        origins[key] = f"environment variable {name}"
    return Source(values, origins)


def _split_list(key: str, text: str, root: type[BaseModel]) -> object:
    info = find_field(root, key)
    if info is not None and get_origin(info.annotation) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def merge_sources(sources: Sequence[Source]) -> Source:
    """Lay later sources over earlier ones, key by key."""
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for source in sources:
        values.update(source.values)
        origins.update(source.origins)
    return Source(values, origins)


def validate(source: Source, root: type[_Model]) -> _Model:
    """Build the model; text from the environment is converted to the field's type."""
    try:
        return root.model_validate(_nest(source.values))
    except ValidationError as error:
        raise ConfigError(_explain(error, source, root)) from None


def _validate_json(source: Source, root: type[BaseModel]) -> None:
    # Strict JSON mode is right for YAML: lists become tuples, but "5" does not become 5.
    # Rules across sections are judged once, on the merged whole.
    text = json.dumps(_nest(source.values), default=str)
    try:
        root.model_validate_json(text, strict=True)
    except ValidationError as error:
        if any(item["loc"] for item in error.errors(include_url=False)):
            raise ConfigError(_explain(error, source, root)) from None


def _nest(flat: Mapping[str, object]) -> dict[str, dict[str, object]]:
    nested: dict[str, dict[str, object]] = {}
    for dotted, value in flat.items():
        section, _, field = dotted.partition(".")
        nested.setdefault(section, {})[field] = value
    return nested


def _explain(error: ValidationError, source: Source, root: type[BaseModel]) -> str:
    """One line per key: origin, what is wrong. Values are not quoted: one may be secret."""
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False, include_input=False, include_context=False):
        key = ".".join(str(part) for part in item["loc"][:2])
        if key in lines:
            continue  # what follows from the first fault, or another element of a list
        if item["type"] == "extra_forbidden":
            lines[key] = _explain_unknown(key, source, root)
            continue
        message = item["msg"].removeprefix("Value error, ")
        origin = source.origins.get(key)
        where = f" ({origin})" if origin else ""
        lines[key] = f"{key}: {message}{where}" if key else f"{message}{where}"
    return "\n".join(lines.values())


def _explain_unknown(key: str, source: Source, root: type[BaseModel]) -> str:
    section, _, field = key.partition(".")
    origin = source.origins.get(key) or next(
        (o for k, o in source.origins.items() if k.startswith(f"{section}.")), "configuration"
    )
    if section not in root.model_fields:
        hint = did_you_mean(section, list(root.model_fields))
        return f"{section}: unknown section ({origin}){hint}"
    names = [doc.key.partition(".")[2] for doc in iter_fields(root) if doc.key.startswith(section)]
    return f"{key}: unknown key ({origin}){did_you_mean(field, names)}"


def did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; known: {', '.join(sorted(known))}"


def find_field(root: type[BaseModel], key: str) -> FieldInfo | None:
    """Look up the declaration of a dotted key."""
    section, _, field = key.partition(".")
    info = root.model_fields.get(section)
    if info is None or not isinstance(info.annotation, type):
        return None
    if not issubclass(info.annotation, BaseModel):
        return None
    return info.annotation.model_fields.get(field)


def iter_fields(root: type[BaseModel]) -> Iterator[FieldDoc]:
    """Every setting in file order."""
    for section, section_info in root.model_fields.items():
        section_type = section_info.annotation
        assert isinstance(section_type, type)
        assert issubclass(section_type, BaseModel)
        for name, info in section_type.model_fields.items():
            yield _field_doc(f"{section}.{name}", info)


def _field_doc(key: str, info: FieldInfo) -> FieldDoc:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    annotation = info.annotation
    plain = annotation in (int, float, bool) or _is_closed_choice(annotation)
    return FieldDoc(
        key=key,
        type_name=_type_name(annotation),
        unit=str(extra.get("unit", "")),
        default=json.dumps(info.default, default=str),
        description=info.description or "",
        is_public=plain or bool(extra.get("public", False)),
    )


def _is_closed_choice(annotation: object) -> bool:
    """Literals, and tuples of them, cannot hold anything secret."""
    if get_origin(annotation) is tuple:
        args = get_args(annotation)
        return bool(args) and _is_closed_choice(args[0])
    return get_origin(annotation) is Literal


def _type_name(annotation: object) -> str:
    if annotation is SecretStr:
        return "secret text"
    args = get_args(annotation)
    if get_origin(annotation) is tuple:
        return f"list of {_type_name(args[0])}"
    if _is_closed_choice(annotation):
        return " | ".join(str(arg) or '""' for arg in args)
    names: dict[object, str] = {
        int: "integer",
        float: "number",
        bool: "true | false",
        str: "text",
    }
    return names.get(annotation, str(annotation))


def public_values(config: BaseModel) -> dict[str, object]:
    """Dotted key -> value for people; what is not marked public shows only whether it is set."""
    shown: dict[str, object] = {}
    for doc in iter_fields(type(config)):
        section, _, field = doc.key.partition(".")
        value = getattr(getattr(config, section), field)
        shown[doc.key] = value if doc.is_public else ("[redacted]" if value else "")
    return shown


def dump_yaml(config: BaseModel) -> str:
    """Write the whole configuration, secrets included: only for a file of mode 0600."""
    nested: dict[str, dict[str, object]] = {}
    for doc in iter_fields(type(config)):
        section, _, field = doc.key.partition(".")
        value = getattr(getattr(config, section), field)
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        nested.setdefault(section, {})[field] = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(nested, sort_keys=False)
