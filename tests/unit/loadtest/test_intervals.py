"""Wilson intervals, trends and settling against exact enumeration and closed forms."""

from __future__ import annotations

from itertools import permutations, product
from math import factorial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.intervals import rise_p_value, settled_from, wilson


@given(count=st.integers(1, 2_000), data=st.data())
def test_wilson_bounds_are_the_shares_that_the_observation_is_just_unlikely_under(
    count: int, data: st.DataObject
) -> None:
    successes = data.draw(st.integers(0, count))
    interval = wilson(successes, count, 0.95)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    for bound in (interval.low, interval.high):
        if 0 < bound < 1:  # the score test's own equation
            z = (interval.value - bound) / (bound * (1 - bound) / count) ** 0.5
            assert abs(z) == pytest.approx(1.959964, rel=1e-4)


def test_wilson_knows_nothing_without_trials() -> None:
    assert (wilson(0, 0, 0.95).low, wilson(0, 0, 0.95).high) == (0.0, 1.0)


def test_p_values_of_a_rise_are_those_of_all_orders() -> None:
    p_values = [rise_p_value(order) for order in permutations(range(6))]
    for level in sorted(set(p_values)):
        assert sum(p <= level for p in p_values) / factorial(6) == pytest.approx(level)
    assert min(p_values) == pytest.approx(1 / factorial(6))


def test_constant_and_falling_series_do_not_rise() -> None:
    assert rise_p_value([3.0] * 12) == 1
    assert rise_p_value([float(-i) for i in range(12)]) == 1
    assert rise_p_value([float(i) for i in range(12)]) < 1e-8


@pytest.mark.parametrize("count", [1, 61])
def test_a_trend_of_too_few_or_many_points_is_an_error(count: int) -> None:
    with pytest.raises(ValueError, match="a trend is asked of"):
        rise_p_value([0.0] * count)


@given(st.lists(st.integers(-3, 3), min_size=25, max_size=120), st.integers(-1000, 1000))
def test_settling_is_where_the_error_of_the_rest_is_least(noise: list[int], base: int) -> None:
    series = [float(base + value) for value in noise]
    batches = [sum(series[i : i + 5]) / 5 for i in range(0, len(series) - 4, 5)]

    def error(at: int) -> float:
        rest = batches[at:]
        mean = sum(rest) / len(rest)
        return sum((value - mean) ** 2 for value in rest) / len(rest) ** 2

    starts = range(len(batches) - 4)
    assert error(settled_from(series) // 5) == pytest.approx(min(map(error, starts)), abs=1e-9)


@pytest.mark.parametrize(("cold", "value"), list(product([10, 40], [0.0, 1e6])))
def test_a_cold_start_is_left_out_and_no_more(cold: int, value: float) -> None:
    series = [value + 100.0] * cold + [value + 0.1 * (i % 3) for i in range(200)]
    assert settled_from(series) == cold
    assert settled_from([value] * 200) == 0
