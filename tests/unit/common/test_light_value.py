"""Values of a request's way: equal by content, as frozen ones are, and without other fields."""

from __future__ import annotations

from dataclasses import field, replace

import pytest

from services.common.light_value import light_value


@light_value
class Sample:
    name: str
    count: int = 0
    seen: object = field(default=None, compare=False)


def test_equality_and_hash_go_by_content() -> None:
    assert Sample("a", 1, seen=1) == Sample("a", 1, seen=2)
    assert len({Sample("a", 1), Sample("a", 1), Sample("b", 1)}) == 2


def test_it_is_replaced_and_not_changed() -> None:
    one = Sample("a")
    other = replace(one, count=2)
    assert (one.count, other.count) == (0, 2)


def test_the_type_checker_refuses_to_change_a_field() -> None:
    one = Sample("a")
    # Were it allowed, the checker would call the comment unused, which is an error as well.
    one.count = 2  # type: ignore[misc]
    assert one == Sample("a", 2)


def test_it_has_no_other_fields() -> None:
    with pytest.raises(AttributeError):
        Sample("a").weight = 3  # type: ignore[attr-defined]
