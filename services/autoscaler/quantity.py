"""Quantities of a policy file, written as Kubernetes writes them: "400m", "8192", "512Mi".

A whole number needs no quotes. One with a point does: it would not be read exactly.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

_SUFFIXES = {
    "": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
}  # fmt: skip
_QUANTITY = re.compile(r"(?P<digits>[0-9]{1,18}(?:\.[0-9]{1,9})?)(?P<suffix>[a-zA-Z]{0,2})")
# The same for those who check a file without this code.
_PATTERN = rf"^[0-9]{{1,18}}(\.[0-9]{{1,9}})?({'|'.join(s for s in _SUFFIXES if s)})?$"


def parse_quantity(text: str) -> Decimal:
    """Return the number a quantity stands for; ValueError if it is none."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match["suffix"] not in _SUFFIXES:
        known = " ".join(suffix for suffix in _SUFFIXES if suffix)
        raise ValueError(f"{text!r} is no quantity: digits, maybe a point, and one of {known}")
    return Decimal(match["digits"]) * _SUFFIXES[match["suffix"]]


def _quoted(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        raise ValueError(f'write it in quotes, "{value}", so that it is read exactly')
    return value


def _checked(text: str) -> str:
    parse_quantity(text)
    return text


Quantity = Annotated[
    str,
    BeforeValidator(_quoted),
    AfterValidator(_checked),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}], "pattern": _PATTERN}),
]


def _positive(text: str) -> str:
    if not parse_quantity(text):
        raise ValueError("must be above 0")
    return text


PositiveQuantity = Annotated[Quantity, AfterValidator(_positive)]
