from __future__ import annotations

import asyncio

import pytest

from services.common.clock import ManualClock
from services.runtime.loop_lag import LOOK_S, LoopLag
from tests.support.cluster import eventually


async def test_a_loop_that_is_late_shows_it_and_forgets_it() -> None:
    clock = ManualClock(100.0)
    lag = LoopLag(clock)
    assert lag.value_s() == 0.0
    lag.start()
    clock.advance(LOOK_S + 0.3)
    assert lag.value_s() == pytest.approx(0.3)  # while it is still being late
    lag._look()
    assert lag.value_s() == pytest.approx(0.3)
    for _ in range(200):
        clock.advance(LOOK_S)
        lag._look()
    assert lag.value_s() < 1e-3
    lag.stop()
    clock.advance(10.0)
    assert lag.value_s() == 0.0


async def test_it_looks_by_itself_once_at_a_time() -> None:
    clock = ManualClock(100.0)
    lag = LoopLag(clock)
    lag.start()
    clock.advance(1.0)
    await eventually(lambda: lag._sums.values[0], 15.0)
    lag.stop()
    assert lag._sums.values[1] == pytest.approx(1.0 - LOOK_S)
    looks = lag._sums.values[0]
    await asyncio.sleep(2 * LOOK_S)
    assert lag._sums.values[0] == looks
