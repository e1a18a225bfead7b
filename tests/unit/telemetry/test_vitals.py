"""What probes are told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.telemetry.vitals import LOOP_PATIENCE_S, Reading, Verdict, Vitals

_WHY = st.sampled_from(["", "a reason"])
_AGES_S = st.floats(0, 4 * LOOP_PATIENCE_S)


def test_a_process_that_starts_lives_and_is_not_ready() -> None:
    """RB-113: a worker that loads a model for minutes is not killed for it."""
    vitals = Vitals()
    assert vitals.is_live(1e6) == Verdict(is_good=True, reason="starting")
    assert vitals.is_ready(1e6) == Verdict(is_good=False, reason="starting")


@given(_WHY, _WHY, _AGES_S)
def test_ready_is_live_and_more(why_dead: str, why_not_ready: str, age_s: float) -> None:
    vitals = Vitals()
    vitals.tell(Reading(100.0, why_dead, why_not_ready))
    live, ready = vitals.is_live(100.0 + age_s), vitals.is_ready(100.0 + age_s)
    stands_still = (100.0 + age_s) - 100.0 > LOOP_PATIENCE_S
    assert live.is_good is (not why_dead and not stands_still)
    assert ready.is_good is (live.is_good and not why_not_ready)
    assert all((verdict.reason == "ok") is verdict.is_good for verdict in (live, ready))


def test_a_loop_that_goes_on_is_forgiven() -> None:
    vitals = Vitals()
    vitals.tell(Reading(0.0))
    assert vitals.is_live(10.0).reason == "the event loop has stood still for 10.0 s"
    vitals.tell(Reading(10.0))
    assert vitals.is_live(10.0).is_good
