"""When a second prefill is worth it."""

from __future__ import annotations

import pytest

from services.router.hedge import HedgeClock, HedgeConfig

ON = HedgeConfig(enabled=True, min_samples=20, min_delay_s=0.02)


def learnt(config: HedgeConfig, *ratios: float) -> HedgeClock:
    clock = HedgeClock(config)
    for ratio in ratios:
        clock.note(0.1, 0.1 * ratio)
    return clock


def test_off_or_without_experience_there_is_no_second_prefill() -> None:
    assert learnt(HedgeConfig(), *[1.0] * 50).delay_s(0.1) is None
    assert learnt(ON, *[1.0] * 19).delay_s(0.1) is None


def test_the_delay_is_what_all_but_the_slowest_take_of_their_prediction() -> None:
    clock = learnt(ON, *[1.0] * 90, *[3.0] * 6, *[50.0] * 4)
    assert clock.delay_s(0.1) == pytest.approx(0.3)
    assert clock.delay_s(2.0) == pytest.approx(6.0)


def test_the_delay_has_a_floor_and_predictions_of_nothing_do_no_harm() -> None:
    clock = learnt(ON, *[1.0] * 20)
    assert clock.delay_s(0.001) == 0.02
    clock.note(0.0, 0.5)
    assert clock.delay_s(0.0) == 0.02


def test_only_the_newest_count() -> None:
    clock = learnt(HedgeConfig(enabled=True, window=20), *[90.0] * 100, *[2.0] * 20)
    assert clock.delay_s(1.0) == pytest.approx(2.0)
