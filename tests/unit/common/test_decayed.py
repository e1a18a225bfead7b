from __future__ import annotations

from math import e

import pytest

from services.common.decayed import DecayedSums, Ewma


def test_the_first_sample_is_the_mean_and_later_ones_move_it_by_their_share() -> None:
    mean = Ewma(0.25)
    assert mean.value is None
    mean.add(8.0)
    mean.add(4.0)
    assert mean.value == 7.0


def test_sums_fall_with_time_and_not_with_clocks_that_go_back() -> None:
    sums = DecayedSums(2, tau_s=10.0)
    assert sums.values == [0.0, 0.0]
    sums.add(100.0, 1, 5.0)
    sums.add(110.0, 1, 0.0)
    assert sums.values == pytest.approx([1 + 1 / e, 5 / e])
    sums.add(50.0, 0, 1.0)
    assert sums.values == pytest.approx([1 + 1 / e, 5 / e + 1])
