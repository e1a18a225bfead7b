"""Bounds on raw input, checked before it is parsed, decoded or tokenised."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from services.common.errors import RequestError

# Strings are swallowed whole (also one that never ends), so that brackets inside do not count.
# Possessive: no backtracking, the scan is linear whatever the input.
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
_MAX_CONTAINERS = 65_536  # arrays and objects of one body; each costs more memory than text


def parse_json(raw: bytes, max_depth: int) -> Any:
    """Parse a body that is already within the size limit; raise `invalid_json`."""
    check_json_shape(raw, max_depth)
    try:
        return json.loads(
            raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object
        )
    except UnicodeDecodeError as error:
        raise _invalid_json(f"the body is not valid UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise _invalid_json(f"the body is not valid JSON: {error.msg} at {where}") from None
    except (ValueError, RecursionError) as error:
        # ValueError: a number with more digits than Python turns into an int.
        reason = "a number has too many digits" if isinstance(error, ValueError) else "too deep"
        raise _invalid_json(f"the body is not valid JSON: {reason}") from None


def check_json_shape(raw: bytes, max_depth: int) -> None:
    """Refuse a body nested deeper than the limit, or made of brackets mostly."""
    if raw.count(b"[") + raw.count(b"{") <= max_depth:
        return
    depth = num_containers = 0
    for match in _STRING_OR_BRACKET.finditer(raw):
        char = match.group()
        if char in b"[{":
            depth += 1
            num_containers += 1
            if depth > max_depth:
                raise _invalid_json(f"the body is nested deeper than {max_depth} levels")
            if num_containers > _MAX_CONTAINERS:
                raise _invalid_json(f"the body has more than {_MAX_CONTAINERS} arrays and objects")
        elif char in b"]}":
            depth -= 1


def check_text(text: str, param: str) -> str:
    """Refuse text that is not Unicode (a lone surrogate written as an escape)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            "invalid_argument",
            f"{param} holds half a surrogate pair at character {error.start}",
            param=param,
        ) from None
    return text


def check_range(value: float, low: float, high: float, param: str) -> None:
    """Refuse a number outside [low, high]; NaN is outside."""
    if not low <= value <= high:
        raise RequestError(
            "invalid_argument",
            f"{param} is {_show(value)}, must be from {_show(low)} to {_show(high)}",
            param=param,
        )


def check_count(count: int, limit: int, param: str, what: str) -> None:
    """Refuse more than `limit` of something."""
    if count > limit:
        raise RequestError(
            "invalid_argument", f"{param} has {count} {what}, limit {limit}", param=param
        )


def check_body_size(size_bytes: int, limit: int) -> None:
    """Refuse a body above the limit."""
    if size_bytes > limit:
        raise RequestError("body_too_large", f"the body is larger than {limit} bytes")


def _show(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else text[:24] + "…"


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid_json(f"the body is not valid JSON: {name} is not a JSON value")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object that says something twice: whoever checked it may have read the other."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _invalid_json("the body is not valid JSON: an object has a name twice")
    return made


def _invalid_json(message: str) -> RequestError:
    return RequestError("invalid_json", message)
