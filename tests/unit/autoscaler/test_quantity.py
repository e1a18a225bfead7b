from __future__ import annotations

from decimal import Decimal

import pytest

from services.autoscaler.quantity import parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8192", Decimal(8192)),
        ("400m", Decimal("0.4")),
        ("0.05", Decimal("0.05")),
        ("512Mi", Decimal(512 * 2**20)),
        ("1.5k", Decimal(1500)),
        ("2G", Decimal(2_000_000_000)),
    ],
)
def test_a_quantity_is_read_exactly(text: str, value: Decimal) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text", ["", "m", "-1", "1e3", "1 k", "1kb", "0x10", "nan", "1.", ".5", "1K", "٣"]
)
def test_what_is_no_quantity_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="no quantity"):
        parse_quantity(text)
