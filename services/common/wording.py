"""Words people read, made of numbers."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """Return "1 block", "2 blocks": for things that take an s."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
