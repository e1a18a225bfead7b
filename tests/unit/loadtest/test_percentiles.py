"""Percentiles against their definition, intervals against exact binomials."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.percentiles import distribution, is_too_few, rank_interval, share_of
from services.common.quantile import rank_of


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    percent=st.sampled_from([50, 90, 95, 99]),
)
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(
    values: list[float], percent: int
) -> None:
    """No interpolation, and none where fewer than ten values lie beyond."""
    value = share_of(distribution(values, confidence=0.95), percent / 100)
    if len(values) * (100 - percent) < 1000:
        assert value is None
        return
    needed = Fraction(percent, 100) * len(values)
    fitting = [v for v in sorted(values) if sum(x <= v for x in values) >= needed]
    assert value == fitting[0]


@given(count=st.integers(1, 150), percent=st.integers(1, 99), confidence=st.sampled_from([80, 99]))
def test_ranks_hold_the_percentile_as_surely_as_they_say_and_are_the_closest_that_do(
    count: int, percent: int, confidence: int
) -> None:
    share = Fraction(percent, 100)
    tail = (1 - Fraction(confidence, 100)) / 2
    masses = [
        comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(count + 1)
    ]  # chance that k of the values lie below the percentile
    low, high = rank_interval(count, percent / 100, confidence / 100)
    if low is None:
        assert masses[0] > tail
    else:
        assert sum(masses[:low]) <= tail < sum(masses[: low + 1])
    if high is None:
        assert masses[count] > tail
    else:
        assert sum(masses[high:]) <= tail < sum(masses[high - 1 :])


def test_ranks_of_large_samples_follow_the_normal_law() -> None:
    low, high = rank_interval(1_000_000, 0.5, 0.95)
    assert low == pytest.approx(500_000 - 980, abs=2)
    assert high == pytest.approx(500_000 + 981, abs=2)


@pytest.mark.parametrize(("count", "share"), [(1000, 0.99), (100, 0.9), (200, 0.95), (20, 0.5)])
def test_ten_values_beyond_are_enough(count: int, share: float) -> None:
    assert not is_too_few(count, share)
    assert is_too_few(count - 1, share)


@pytest.mark.parametrize(("count", "share", "rank"), [(100, 0.9, 90), (100, 0.07, 7), (3, 0.5, 2)])
def test_rank_is_exact_where_floats_are_not(count: int, share: float, rank: int) -> None:
    assert rank_of(count, share) == rank


@given(pairs=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), min_size=1, max_size=120))
def test_weights_are_repetitions_but_no_further_observations(pairs: list[tuple[int, int]]) -> None:
    """The gap before a chunk is shared among its tokens, which are not independent."""
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]
    weighted = distribution(values, weights=weights, confidence=0.95, curve_steps=10)
    repeated = distribution(
        [v for v, w in pairs for _ in range(w)], confidence=0.95, curve_steps=10
    )
    assert weighted.count == repeated.count
    assert weighted.mean == pytest.approx(repeated.mean)
    assert weighted.curve == repeated.curve
    median, of_repeated = weighted.percentiles[0], repeated.percentiles[0]
    assert median.too_few == (len(pairs) < 20)
    if not median.too_few:
        assert median.value == of_repeated.value
        assert median.low is not None
        assert of_repeated.low is not None
        assert median.low <= of_repeated.low


def test_nothing_measured_is_no_number() -> None:
    empty = distribution([], confidence=0.95)
    assert (empty.count, empty.mean, empty.curve) == (0, None, ())
    assert all(p.value is None and p.too_few for p in empty.percentiles)
