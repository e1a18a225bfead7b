from __future__ import annotations

from services.operator.schedule import EVERY_S, LEAST_GAP_S, MAX_CLUSTERS, Key, Schedule

A, B = Key("x", "a"), Key("x", "b")


def test_what_is_told_of_is_due_at_once_and_then_not() -> None:
    schedule = Schedule()
    assert schedule.next(0.0) is None
    schedule.mark(A, 0.0)
    assert schedule.next(0.0) == A
    assert schedule.next(0.0) is None
    assert schedule.wait_s(0.0) == EVERY_S


def test_one_that_is_told_of_again_and_again_waits_its_gap() -> None:
    schedule = Schedule()
    schedule.mark(A, 0.0)
    schedule.next(0.0)
    for _ in range(3):
        schedule.mark(A, 0.1)
    assert schedule.next(0.1) is None
    assert schedule.next(LEAST_GAP_S) == A
    assert schedule.next(LEAST_GAP_S) is None


def test_one_that_waits_longest_is_next() -> None:
    schedule = Schedule()
    schedule.mark(B, 0.0)
    schedule.mark(A, 1.0)
    assert [schedule.next(2.0), schedule.next(2.0), schedule.next(2.0)] == [B, A, None]


def test_failures_are_tried_ever_later_whatever_is_told() -> None:
    """No budget of calls is spent on a cluster that cannot be served."""
    schedule, now, waits = Schedule(), 0.0, []
    schedule.mark(A, now)
    for _ in range(9):
        assert schedule.next(now) == A
        waits.append(schedule.failed(A, now))
        schedule.mark(A, now)
        assert schedule.next(now + waits[-1] - 0.5) is None
        now += waits[-1]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    schedule.next(now)
    schedule.done(A, now, None)
    assert schedule.failed(A, now) == 1.0


def test_a_pass_may_ask_to_be_made_again_soon() -> None:
    schedule = Schedule()
    schedule.mark(A, 0.0)
    schedule.next(0.0)
    schedule.done(A, 0.0, 3.0)
    assert schedule.wait_s(0.0) == 3.0
    schedule.next(3.0)
    schedule.done(A, 3.0, 0.0)
    assert schedule.wait_s(3.0) == LEAST_GAP_S


def test_one_that_is_gone_is_forgotten_and_there_is_a_bound() -> None:
    schedule = Schedule()
    keys = [Key("x", str(n)) for n in range(MAX_CLUSTERS)]
    assert all(schedule.mark(key, 0.0) for key in keys)
    assert not schedule.mark(A, 0.0)
    schedule.forget(keys[0])
    assert schedule.mark(A, 0.0)
