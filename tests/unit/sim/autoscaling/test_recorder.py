"""How sizes go up and down."""

from __future__ import annotations

import pytest

from services.sim.autoscaling.recorder import (
    Recorder,
    Sizes,
    direction_changes,
    most_within,
    peak,
)
from services.sim.cluster import PREFILL
from services.sim.controller import Change, Observation, PoolState, Schedule


def trail(*sizes: int) -> list[Sizes]:
    """Make one size a second."""
    return [Sizes(float(at), {PREFILL: size}, {PREFILL: size}) for at, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "turns"),
    [
        ((1, 2, 3, 3), []),
        ((1, 2, 2, 1), [3.0]),
        ((3, 2, 3, 2), [2.0, 3.0]),
        ((2, 2, 2), []),
        ((), []),
    ],
)
def test_a_turn_is_where_growth_follows_shrinking_or_the_other_way(
    sizes: tuple[int, ...], turns: list[float]
) -> None:
    assert direction_changes(trail(*sizes), PREFILL) == turns


def test_the_fullest_window_counts() -> None:
    assert most_within([1.0, 5.0, 10.9, 11.0, 30.0], 10.0) == 3
    assert most_within([], 10.0) == 0


def test_the_largest_size_is_the_peak() -> None:
    assert peak(trail(1, 4, 2), PREFILL) == 4
    assert peak([], PREFILL) == 0


def test_what_another_wants_is_passed_on_and_written_down() -> None:
    recorder = Recorder(Schedule((Change(0.0, PREFILL, 3),), tick_s=7.0))
    seen = Observation(1.0, {PREFILL: PoolState(1, 1, 0, 0, 0, 0, 0, 1)}, 0, ())
    assert recorder.orders(seen).sizes == {PREFILL: 3}
    assert recorder.tick_s == 7.0
    assert recorder.trail == [Sizes(1.0, {PREFILL: 1}, {PREFILL: 2})]
