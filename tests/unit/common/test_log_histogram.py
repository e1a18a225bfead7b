from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.log_histogram import LogHistogram
from services.common.quantile import nearest_rank

DURATIONS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60)


def histogram(*seconds: float) -> LogHistogram:
    made = LogHistogram()
    made.add(seconds)
    return made


@given(DURATIONS, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_quantile_is_that_of_the_values_within_a_bucket(seconds: list[float], share: float) -> None:
    found = histogram(*seconds).quantile(share)
    assert found is not None
    assert found == pytest.approx(nearest_rank(seconds, share), rel=0.026)


@given(DURATIONS, DURATIONS)
def test_what_was_counted_since_is_what_was_added(before: list[float], more: list[float]) -> None:
    older, newer = histogram(*before), histogram(*before, *more)
    assert newer.since(older).counts == histogram(*more).counts
    older.merge(histogram(*more))
    assert older.counts == newer.counts


def test_nothing_counted_has_no_quantile() -> None:
    assert histogram().quantile(0.5) is None


def test_durations_beyond_the_bounds_are_counted_in_the_outermost_buckets() -> None:
    assert histogram(0.0, -1.0).quantile(1.0) == 0.0
    longest = histogram(1e9).quantile(0.5)
    assert longest is not None
    assert longest > 3600
