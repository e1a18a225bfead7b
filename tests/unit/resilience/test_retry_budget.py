from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.resilience.retry_budget import RetryBudget


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


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="ratio"):
        RetryBudget(ratio=2)
