"""Bounds on raw input."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import RequestError
from services.gateway.input_bounds import check_range, check_text, parse_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('[]{}"\\a é', max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


def depth_of(value: object) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 0


@given(JSON, st.integers(1, 4), st.booleans())
def test_depth_is_judged_as_the_parser_sees_it(value: object, limit: int, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    if depth_of(value) <= limit:
        assert parse_json(raw, limit) == value
    else:
        with pytest.raises(RequestError, match=f"deeper than {limit} levels"):
            parse_json(raw, limit)


@pytest.mark.parametrize(
    "raw",
    [
        b'"' + b'\\"' * 2_000_000,
        b'"' * 4_000_000,
        b"[" * 4_000_000,
        b'{"a":[' * 600_000,
        b"[" * 40 + b'"' + b"\\" * 4_000_000,
        b"[" * 20 + b"]" * 20 + b"[{}" + b",{}" * 1_000_000 + b"]",
    ],
)
def test_hostile_bodies_of_full_size_are_refused_in_linear_time(raw: bytes) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError) as caught:
        parse_json(raw, 32)
    assert caught.value.spec.code == "invalid_json"
    assert time.monotonic() - started < 2.0


def test_half_a_surrogate_pair_is_not_text() -> None:
    with pytest.raises(RequestError, match="stop holds half a surrogate pair at character 1"):
        check_text("a\ud83e", "stop")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 3, 10**400])
def test_numbers_outside_are_refused_with_the_bounds(value: float) -> None:
    with pytest.raises(RequestError, match="must be from 0 to 2"):
        check_range(value, 0, 2, "x")
