from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from services.common.errors import ERROR_TABLE
from services.resilience.breaker import (
    BreakerConfig,
    BreakerState,
    CircuitBreaker,
    Outcome,
    outcome_of,
)

CONFIG = BreakerConfig(window_s=10, min_calls=5, failure_share=0.5, open_s=2)


def opened_at(now: float) -> CircuitBreaker:
    """Make a breaker that opened just now."""
    breaker = CircuitBreaker(CONFIG)
    for _ in range(5):
        breaker.record(Outcome.FAILURE, now)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_client_errors_never_open_it() -> None:
    """RB-054: fifty requests beyond the context length say nothing about a worker."""
    breaker = CircuitBreaker(CONFIG)
    for step in range(50):
        breaker.record(outcome_of("context_length_exceeded"), step * 0.1)
        breaker.record(outcome_of("overloaded"), step * 0.1)
    assert breaker.acquire(5.0)
    assert breaker.state is BreakerState.CLOSED


def test_client_errors_neither_close_nor_reset_it() -> None:
    """RB-056: a sick worker that answers 400 to bad input still opens its breaker."""
    breaker = CircuitBreaker(CONFIG)
    for step in range(5):
        breaker.record(outcome_of("internal"), step * 0.1)
        breaker.record(outcome_of("invalid_argument"), step * 0.1)
    assert not breaker.can_call(1.0)
    assert breaker.acquire(3.0)
    breaker.record(outcome_of("invalid_argument"), 3.1)
    assert not breaker.can_call(3.1)
    breaker.record(Outcome.FAILURE, 3.2)
    assert not breaker.can_call(5.1)


def test_one_probe_at_a_time_after_the_open_time() -> None:
    breaker = opened_at(0.0)
    assert not breaker.acquire(1.9)
    assert breaker.acquire(2.0)
    assert not breaker.acquire(2.1)
    breaker.record(Outcome.SUCCESS, 2.2)
    assert breaker.acquire(2.3)
    assert breaker.state is BreakerState.CLOSED


def test_a_lost_probe_does_not_block_for_ever() -> None:
    breaker = opened_at(0.0)
    assert breaker.acquire(2.0)
    assert breaker.acquire(4.0)


def test_every_code_has_an_outcome() -> None:
    for code, spec in ERROR_TABLE.items():
        outcome = outcome_of(code)
        if spec.http_status < 500:
            assert outcome is Outcome.NEUTRAL
    assert outcome_of("worker_lost") is Outcome.FAILURE
    assert outcome_of(None) is Outcome.SUCCESS


@given(st.lists(st.tuples(st.floats(0, 3), st.sampled_from(Outcome), st.booleans()), max_size=60))
@example(
    [
        (0.0, Outcome.SUCCESS, False),
        (0.0, Outcome.SUCCESS, False),
        (2.0926318246535276, Outcome.FAILURE, False),
        (2.0926318246535276, Outcome.FAILURE, False),
        (2.0002500000000003, Outcome.FAILURE, False),
    ]
)  # where now + open_s - now is less than open_s
def test_never_stuck_open(events: list[tuple[float, Outcome, bool]]) -> None:
    """Whatever happened: `open_s` later a call may pass, and `can_call` says the same."""
    breaker, now = CircuitBreaker(CONFIG), 0.0
    for delay, outcome, calls in events:
        now += delay
        if calls:
            allowed = breaker.can_call(now)
            assert breaker.acquire(now) == allowed
        breaker.record(outcome, now)
    assert breaker.acquire(now + CONFIG.open_s)
