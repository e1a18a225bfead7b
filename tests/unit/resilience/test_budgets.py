from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.resilience.retry_budget import RetryBudget
from services.resilience.token_bucket import TokenBucket


@given(st.lists(st.booleans(), max_size=400), st.floats(0, 1), st.floats(1, 20))
def test_retries_stay_within_ratio_and_reserve(
    steps: list[bool], ratio: float, reserve: float
) -> None:
    """Retries never exceed reserve + ratio x requests, whatever the order."""
    budget, requests, retries = RetryBudget(ratio, reserve), 0, 0
    for is_request in steps:
        if is_request:
            budget.note_request()
            requests += 1
        elif budget.take():
            retries += 1
        assert 0 <= budget.balance <= reserve
    assert retries <= reserve + ratio * requests + 1e-6


def test_reserve_refills_by_requests_only() -> None:
    budget = RetryBudget(ratio=0.5, reserve=1)
    assert budget.take()
    assert not budget.take()
    budget.note_request()
    assert not budget.take()
    budget.note_request()
    assert budget.take()


@given(
    st.floats(0.1, 100),
    st.floats(1, 50),
    st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 60)), max_size=80),
)
def test_bucket_never_gives_more_than_rate_and_burst(
    rate: float, burst: float, steps: list[tuple[float, float]]
) -> None:
    bucket, now, taken = TokenBucket(rate, burst, 0.0), 0.0, 0.0
    for delay, amount in steps:
        now += delay
        wait = bucket.take(amount, now)
        if wait == 0.0:
            taken += amount
        elif wait != float("inf"):
            assert wait > 0
        else:
            assert amount > burst
        assert taken <= burst + rate * now + 1e-6


@given(st.floats(0.5, 50), st.floats(1, 20))
def test_bucket_gives_after_the_wait_it_named(rate: float, burst: float) -> None:
    bucket = TokenBucket(rate, burst, 0.0)
    assert bucket.take(burst, 0.0) == 0.0
    wait = bucket.take(burst / 2, 0.0)
    assert bucket.take(burst / 2, wait + 1e-9) == pytest.approx(0.0)


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="ratio"):
        RetryBudget(ratio=2)
    with pytest.raises(ValueError, match="rate"):
        TokenBucket(0, 1, 0)
