"""Watchdog: a step that hangs is noticed, a process that was frozen is not blamed for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.engine.watchdog import MAX_ASK_GAP_S, Watchdog, patience_s


def test_time_without_progress_adds_up() -> None:
    watchdog = Watchdog()
    stalled = [watchdog.stalled_s(10.0, 10.0 + 0.5 * i) for i in range(9)]
    assert stalled == [0.5 * i for i in range(9)]


def test_progress_starts_the_count_anew() -> None:
    watchdog = Watchdog()
    watchdog.stalled_s(10.0, 10.5)
    watchdog.stalled_s(10.0, 11.0)
    assert watchdog.stalled_s(11.25, 11.5) == 0.25


def test_frozen_process_does_not_take_its_engine_for_dead() -> None:
    """A worker stopped for ten seconds went down with all its requests when it went on."""
    watchdog = Watchdog()
    watchdog.stalled_s(10.0, 10.5)
    assert watchdog.stalled_s(10.0, 20.5) == 0.5 + MAX_ASK_GAP_S
    assert watchdog.stalled_s(10.0, 21.0) == 1.0 + MAX_ASK_GAP_S
    # Also when the engine had done a step since the last question.
    assert watchdog.stalled_s(21.0, 31.0) == MAX_ASK_GAP_S


@given(st.floats(0, 60), st.floats(0, 60))
def test_no_step_is_given_up_before_five_times_what_was_predicted(
    usual_s: float, predicted_s: float
) -> None:
    """RB-113: a long prefill is no fault; a frozen step is one after the bound and not later."""
    patience = patience_s(3.0, usual_s, predicted_s)
    assert patience in (3.0, 5 * usual_s, 5 * predicted_s)
    assert patience >= max(3.0, 5 * usual_s, 5 * predicted_s)
