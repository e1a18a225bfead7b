"""Values made for every request: frozen to the type checker, plain slots when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def light_value(cls: type[T]) -> type[T]:
    """Make a dataclass that nobody may change, in a third of a frozen one's time.

    A frozen dataclass sets each field through a call of its own, 0.08 us of it. The type checker
    refuses to assign to a field here, too, and equality and hash are the same; what is missing is
    the check while it runs. For values of a request's way alone (ADR 0042).
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
