"""How `isthmus bench cancel` reads its looks at a worker's counters."""

from __future__ import annotations

import pytest

from services.bench.cancel import Look, freed


def _look(at: float, steps: int, *, is_free: bool) -> Look:
    return Look(at, steps, 0 if is_free else 1, is_free)


BUSY = _look(9.99, 7, is_free=False)


def test_a_step_that_runs_is_told_from_what_follows_it() -> None:
    after = [
        _look(10.01, 7, is_free=False),
        _look(10.05, 8, is_free=False),
        _look(10.06, 8, is_free=True),
    ]
    assert freed(BUSY, after, 10.0) == pytest.approx((0.05, 0.06))


def test_blocks_that_are_free_before_a_step_ends_have_no_rest() -> None:
    after = [_look(10.01, 7, is_free=True), _look(10.05, 8, is_free=True)]
    assert freed(BUSY, after, 10.0) == pytest.approx((0.01, 0.01))


def test_work_that_was_under_way_counts_until_it_is_gone_too() -> None:
    before = _look(9.99, 7, is_free=True)
    after = [
        _look(10.01, 7, is_free=True),
        _look(10.02, 8, is_free=False),
        _look(10.03, 9, is_free=True),
    ]
    assert freed(before, after, 10.0) == pytest.approx((0.02, 0.03))


def test_a_worker_without_a_part_in_it_says_nothing() -> None:
    before = _look(9.99, 7, is_free=True)
    assert freed(before, [_look(10.01, 7, is_free=True)], 10.0) is None
    assert freed(before, [], 10.0) is None
