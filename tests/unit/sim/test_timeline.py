"""Virtual time: order, plans that replace others, and what is told between two events."""

from __future__ import annotations

import pytest

from services.sim import timeline
from services.sim.timeline import Timeline


def test_events_of_one_instant_happen_in_the_order_they_were_planned() -> None:
    time, seen = Timeline(), []
    time.at(2.0, lambda: seen.append("late"))
    time.at(1.0, lambda: seen.append("first"))
    time.at(1.0, lambda: seen.append("second"))
    time.run()
    assert (seen, time.now, time.num_events) == (["first", "second", "late"], 2.0, 3)


def test_a_key_has_one_plan_and_void_ones_are_no_events() -> None:
    time, seen = Timeline(), []
    time.replan(7, 3.0, lambda: seen.append(("7", time.now)))
    time.replan(7, 1.0, lambda: seen.append(("7", time.now)))
    time.replan(7, 2.0, lambda: seen.append(("7", time.now)))
    time.replan(8, 4.0, lambda: seen.append(("8", time.now)))
    time.at(2.5, lambda: time.cancel(8))
    time.cancel(9)
    time.run()
    assert (seen, time.num_events) == ([("7", 2.0)], 2)


def test_what_is_planned_again_for_the_same_instant_keeps_its_turn() -> None:
    time, seen = Timeline(), []
    time.replan(7, 1.0, lambda: seen.append("as planned first"))
    time.at(1.0, lambda: seen.append("other"))
    time.replan(7, 1.0, lambda: seen.append("again"))
    time.run()
    assert (seen, time.num_events) == (["as planned first", "other"], 2)


def test_a_key_may_plan_the_next_from_within_its_event() -> None:
    time, seen = Timeline(), []

    def happen() -> None:
        seen.append(time.now)
        if len(seen) < 3:
            time.replan(7, time.now, happen)

    time.replan(7, 1.0, happen)
    time.run()
    assert seen == [1.0, 1.0, 1.0]


def test_reports_are_made_at_their_instants_before_the_next_event() -> None:
    """Whoever decides at an event knows all that was told until then, and nothing later."""
    time, seen = Timeline(), []

    def tell() -> None:
        seen.append(("told", time.now))
        if time.now < 3.0:
            time.report_at(time.now + 0.5, tell)

    time.at(1.0, lambda: time.report_at(1.25, tell))
    time.at(2.25, lambda: seen.append(("event", time.now)))
    time.run()
    assert seen == [("told", 1.25), ("told", 1.75), ("told", 2.25), ("event", 2.25)]
    assert (time.now, time.num_events, time.num_reports) == (2.25, 2, 3)


@pytest.mark.parametrize("is_report", [False, True])
def test_a_run_without_end_is_ended(monkeypatch: pytest.MonkeyPatch, is_report: bool) -> None:
    monkeypatch.setattr(timeline, "MAX_EVENTS", 100)
    time = Timeline()
    plan = time.report_at if is_report else time.at

    def again() -> None:
        plan(time.now, again)

    again()
    time.at(1.0, lambda: None)
    with pytest.raises(RuntimeError, match="does not end"):
        time.run()
