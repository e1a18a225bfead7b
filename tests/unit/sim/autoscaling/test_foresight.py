"""Sizes by who knows the future."""

from __future__ import annotations

import pytest

from services.sim.autoscaling.foresight import Foreseen, by_rates, least_by_windows, schedule_of
from services.sim.cluster import DECODE, PREFILL
from services.sim.controller import Change
from services.sim.workload import Arrival


def prompts(*moments: float, num_tokens: int = 1000) -> list[Arrival]:
    """Let prompts of a second each arrive."""
    return [Arrival(at, num_tokens, 1, ()) for at in moments]


def least(arrivals: list[Arrival], goal: float = 1.0) -> tuple[int, ...]:
    """Plan windows of ten seconds for first tokens within two."""
    return least_by_windows(arrivals, tokens_s=1000.0, ttft_s=2.0, window_s=10.0, goal=goal)


def test_takes_no_more_than_keep_every_prompt_in_time() -> None:
    # Four at once: two at a time are done after two seconds.
    assert least(prompts(0.0, 0.0, 0.0, 0.0)) == (2,)
    assert least(prompts(0.0, 0.0, 0.0, 0.0, 0.0)) == (3,)
    assert least(prompts(0.0, 2.0, 4.0)) == (1,)


def test_some_may_be_late_where_the_goal_allows_it() -> None:
    assert least(prompts(0.0, 0.0, 0.0, 0.0), goal=0.5) == (1,)


def test_what_a_window_leaves_undone_weighs_on_the_next() -> None:
    # Of eleven at 9 s a single one is done before the next window; ten seconds are left over.
    first = prompts(*([9.0] * 11), num_tokens=1000)
    then = prompts(10.0)
    assert least([*first, *then], goal=0.1)[1] == 2
    assert least(then)[-1] == 1


def test_a_window_without_a_request_keeps_one() -> None:
    assert least(prompts(0.0, 0.0, 0.0, 0.0, 25.0)) == (2, 1, 1)


def test_rates_are_covered_window_by_window() -> None:
    work = [(1.0, 900.0), (2.0, 200.0), (12.0, 1000.0), (99.0, 5000.0)]
    # What comes after the end counts for the last window.
    assert by_rates(work, tokens_s=100.0, window_s=10.0, duration_s=29.0) == (2, 1, 5)


def test_more_is_asked_for_a_startup_ahead_and_less_at_once() -> None:
    plan = Foreseen(PREFILL, (2, 2, 5, 3), 60.0)
    assert plan.initial == 2
    assert plan.changes(30.0) == [Change(90.0, PREFILL, 5), Change(180.0, PREFILL, 3)]
    assert plan.changes(500.0)[0].at_s == 0.0
    both = schedule_of([plan, Foreseen(DECODE, (1, 2), 60.0)], 30.0)
    assert Change(30.0, DECODE, 2) in both.changes
    assert len(both.changes) == 3


@pytest.mark.parametrize("num_tokens", [1, 3000])
def test_a_prompt_that_takes_longer_than_the_limit_asks_for_no_end_of_replicas(
    num_tokens: int,
) -> None:
    (size,) = least(prompts(0.0, 0.0, num_tokens=num_tokens))
    assert size <= 3
