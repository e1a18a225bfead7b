"""From the rounds of `isthmus bench attach` to its figures and bars."""

from __future__ import annotations

from services.bench.attach import PLANES, POLICIES, Measured, Series, result_of


def _measured(attach_s: float) -> Measured:
    measured: Measured = {}
    for policy in POLICIES:
        measured["attach", policy, 64] = Series([attach_s] * 3, [attach_s / 2] * 3, [1e-4] * 3)
        measured["memfd", policy, 64] = Series([0.004] * 3, [0.003, 0.002, 0.004])
    return measured


def test_gain_and_memory_are_those_of_the_rounds() -> None:
    result = result_of(_measured(0.002), num_wrong=0)
    figures = result.figures
    assert figures["plain_64_whole_memfd_to_attach"] == 2.0
    assert figures["verified_64_doorbell_memfd_to_attach"] == 3.0
    assert figures["attach_plain_64_move_us_per_block"] == 100.0
    assert figures["plain_64_saved_kib"] == 64 * 360
    assert "memfd_plain_64_move_us_per_block" not in figures
    assert result.exit_code == 0
    assert set(PLANES) == {"attach", "memfd"}


def test_a_slower_plane_and_a_wrong_block_miss_their_bars() -> None:
    assert [bar.is_met for bar in result_of(_measured(0.01), num_wrong=0).bars] == [False, True]
    assert [bar.is_met for bar in result_of(_measured(0.002), num_wrong=1).bars] == [True, False]
