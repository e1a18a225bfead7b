"""Steps of decode by their answers: the line, and what a full replica makes."""

from __future__ import annotations

import pytest

from services.autoscaler.observation import StepSeen
from services.autoscaler.state import StepLine
from services.autoscaler.step_line import Full, full_tokens_s, with_steps

FIXED_S, EACH_S = 0.010, 0.0005


def line_of(*answers: int) -> StepLine:
    """Return a line through steps that grow evenly."""
    line = StepLine()
    for num in answers:
        line = with_steps(line, [StepSeen(float(num), FIXED_S + EACH_S * num)])
    return line


SEEN = line_of(*range(6, 18))


@pytest.mark.parametrize(
    ("full", "answers"),
    [
        (Full(itl_s=0.025, most_answers=None), 30),
        (Full(itl_s=0.025, most_answers=20.0), 20),
        (Full(itl_s=None, most_answers=20.0), 20),
        (Full(itl_s=0.005, most_answers=None), 1),  # no size keeps it: one at a time
    ],
)
def test_full_replica_makes_what_its_tightest_bound_lets_it(full: Full, answers: int) -> None:
    rate = full_tokens_s(SEEN, full)
    assert rate == pytest.approx(answers / (FIXED_S + EACH_S * answers))


def test_line_is_not_followed_far_beyond_what_was_seen() -> None:
    furthest = 4 * SEEN.answers / SEEN.weight
    rate = full_tokens_s(SEEN, Full(itl_s=None, most_answers=1e6))
    assert rate == pytest.approx(furthest / (FIXED_S + EACH_S * furthest))


@pytest.mark.parametrize(
    ("line", "full"),
    [
        (line_of(6, 10, 17), Full(0.025, 20.0)),  # few steps
        (line_of(*[10] * 30), Full(0.025, 20.0)),  # of one size
        (SEEN, Full(None, None)),  # nothing bounds a replica
    ],
)
def test_without_grounds_there_is_no_rate(line: StepLine, full: Full) -> None:
    assert full_tokens_s(line, full) is None


def test_steps_that_shrink_with_answers_are_taken_as_even() -> None:
    line = StepLine()
    for num in range(6, 18):
        line = with_steps(line, [StepSeen(float(num), 0.02 - 0.0001 * num)])
    rate = full_tokens_s(line, Full(0.025, 20.0))
    assert rate == pytest.approx(20 / (line.seconds / line.weight))


def test_old_steps_count_ever_less() -> None:
    line = SEEN
    for i in range(2000):
        num = 6 + i % 12
        line = with_steps(line, [StepSeen(float(num), 2 * (FIXED_S + EACH_S * num))])
    assert full_tokens_s(line, Full(None, 20.0)) == pytest.approx(20 / 0.04, rel=1e-3)
