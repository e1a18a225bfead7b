"""A value that does not show itself by accident."""

from __future__ import annotations

from typing import NoReturn


class Secret:
    """Bytes that print as ***, in a repr, an f-string, an error or a log."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        """Give the value itself, to whoever needs it for its purpose."""
        return self._value

    def __repr__(self) -> str:
        return "***"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not copied into files or other processes")
