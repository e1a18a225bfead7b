"""How a campaign tells the running step from the rest of the time to free."""

from __future__ import annotations

import pytest

from services.bench.cancel import Look
from services.chaos.handoff import Freed, _freed


def looks(*seen: tuple[float, int, bool]) -> list[Look]:
    return [Look(at, steps, 0, is_free) for at, steps, is_free in seen]


def _judged(seen: dict[str, list[Look]], start: float) -> Freed:
    judged = _freed(seen, start)
    assert judged is not None
    return judged


def test_step_and_rest_are_those_of_the_worker_that_was_last() -> None:
    judged = _judged(
        {
            "prefill-0": looks(
                (9.9, 3, False), (10.02, 3, False), (10.05, 4, False), (10.2, 5, True)
            ),
            "decode-0": looks((9.9, 7, False), (10.01, 8, False), (10.03, 9, True)),
            "decode-1": looks((9.9, 1, True), (10.01, 1, True)),
        },
        start=10.0,
    )
    assert judged.free_ms == {"prefill": pytest.approx(200.0), "decode": pytest.approx(30.0)}
    assert judged.step_ms == pytest.approx(50.0)
    assert judged.total_ms == pytest.approx(200.0)
    assert judged.rest_ms == pytest.approx(150.0)


def test_a_worker_of_a_pool_that_is_later_counts_for_its_pool() -> None:
    judged = _judged(
        {
            "decode-0": looks((9.9, 7, False), (10.01, 8, True)),
            "decode-1": looks((9.9, 1, True), (10.02, 2, False), (10.04, 3, True)),
        },
        start=10.0,
    )
    assert judged.free_ms == {"prefill": 0.0, "decode": pytest.approx(40.0)}


def test_a_cancel_that_found_nothing_tells_nothing() -> None:
    assert _freed({"decode-0": looks((9.9, 1, True), (10.01, 1, True))}, start=10.0) is None
