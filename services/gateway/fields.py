"""Typed reading of a JSON object; a wrong type is an error that names the field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from services.common.errors import RequestError

_JSON_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def json_type(value: object) -> str:
    """Name a JSON value's type for a message."""
    return _JSON_NAMES.get(type(value), "something else")


def wrong_type(param: str, expected: str, value: object) -> NoReturn:
    """Raise for a value of the wrong type; the value itself is not repeated."""
    raise RequestError(
        "invalid_argument", f"{param} must be {expected}, not {json_type(value)}", param=param
    )


class Fields:
    """A JSON object. null means absent, as in the OpenAI API."""

    def __init__(self, body: Any) -> None:  # what a JSON parser returned
        if not isinstance(body, dict):
            raise RequestError(
                "invalid_argument", f"the body must be an object, not {json_type(body)}"
            )
        self._body: Mapping[str, Any] = {k: v for k, v in body.items() if v is not None}

    def raw(self, name: str) -> Any:
        """Give the value as parsed, None if absent."""
        return self._body.get(name)

    def text(self, name: str) -> str | None:
        """Give a string or None."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, str):
            wrong_type(name, "a string", value)
        return value

    def integer(self, name: str) -> int | None:
        """Give an integer or None; true and 1.0 are not integers."""
        value = self._body.get(name)
        if value is not None and type(value) is not int:
            wrong_type(name, "an integer", value)
        return value

    def number(self, name: str) -> float | None:
        """Give a number or None."""
        value = self._body.get(name)
        if value is None:
            return None
        if type(value) not in (int, float):
            wrong_type(name, "a number", value)
        try:
            return float(value)
        except OverflowError:
            raise RequestError("invalid_argument", f"{name} is too large", param=name) from None

    def boolean(self, name: str) -> bool | None:
        """Give a boolean or None."""
        value = self._body.get(name)
        if value is not None and type(value) is not bool:
            wrong_type(name, "a boolean", value)
        return value

    def refuse_others(self, known: Collection[str], unsupported: Collection[str]) -> None:
        """Refuse by name what this server does not implement, and what nobody knows."""
        for name in self._body:
            if name in known:
                continue
            if name in unsupported:
                refuse_unsupported(name)
            shown = name[:64]
            raise RequestError("unknown_parameter", f"unknown parameter {shown!r}", param=shown)


def refuse_unsupported(name: str, detail: str = "") -> NoReturn:
    """Raise for a parameter that exists elsewhere and is not built here."""
    message = f"{name} is not supported by this server{detail}"
    raise RequestError("unsupported_parameter", message, param=name)
