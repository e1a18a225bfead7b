"""The KPA of the simulator against published cases of Knative's.

Source: knative/serving, pkg/autoscaler/scaling/autoscaler_test.go; a test names its case.
"""

from __future__ import annotations

from typing import Any

import pytest

from services.sim.autoscaling.hpa import in_flight
from services.sim.autoscaling.kpa import Kpa, KpaConfig, KpaPools
from services.sim.cluster import DECODE, PREFILL
from services.sim.controller import Observation, PoolState


def kpa(target: float, **changes: Any) -> Kpa:
    """Make one as those cases have it: ten times up or down at most."""
    changes = {"max_scale_up_rate": 10.0, "max_scale_down_rate": 10.0} | changes
    return Kpa(KpaConfig(target=target, **changes))


@pytest.mark.parametrize(
    ("target", "rates", "ready", "stable", "panic", "wanted"),
    [
        (10, {}, 1, 0, 0, 0),  # AutoscalerNoDataAtZeroNoAutoscale
        (181, {}, 1, 21, 26, 1),  # AutoscalerStableModeUnlimitedTBC
        (10, {}, 1, 50, 49, 5),  # Autoscaler0TBC
        (10, {}, 1, 50, 50, 5),  # AutoscalerStableModeNoChange
        (10, {}, 5, 50, 50, 5),  # AutoscalerStableModeNoChangeAlreadyScaled
        (1, {"max_scale_up_rate": 1.1}, 2, 3, 3.1, 3),  # ...IncreaseWithSmallScaleUpRate
        (10, {"max_scale_down_rate": 1.1}, 100, 1, 1, 90),  # ...DecreaseWithSmallScaleDownRate
        (10, {}, 1, 50, 100, 10),  # AutoscalerPanicModeDoublePodCount
        (10, {}, 1, 50, 10, 5),  # TestAutoscalerStableModeIncreaseWithConcurrencyDefault
        (10, {}, 1, 100, 10, 10),
        (10, {}, 8, 100, 100, 10),  # TestAutoscalerStableModeDecrease
        (10, {}, 8, 50, 50, 5),
        (10, {}, 1, 1, 0, 1),  # TestAutoscalerStableModeNoTrafficScaleToZero
        (10, {}, 1, 1000, 1001, 10),  # TestAutoscalerRateLimitScaleUp
        (10, {}, 10, 1000, 1001, 100),
        (10, {}, 100, 1, 1, 10),  # TestAutoscalerRateLimitScaleDown
        (10, {}, 10, 1, 1, 1),
        (10, {}, 0, 1000, 888, 10),  # TestAutoscalerUseOnePodAsMinimumIfEndpointsNotFound
    ],
)
def test_one_look(
    target: float, rates: dict[str, float], ready: int, stable: float, panic: float, wanted: int
) -> None:
    assert kpa(target, **rates).desired(100.0, ready, stable, panic) == wanted


@pytest.mark.parametrize(("stable", "panic", "wanted"), [(50, 30, 50), (20, 30, 30)])
def test_in_panic_the_larger_window_counts(stable: float, panic: float, wanted: int) -> None:
    """AutoscalerPanicStableLargerThanPanic, AutoscalerPanicStableLessThanPanic."""
    one = kpa(1)
    one.panicked_at, one.panic_size = 95.0, 5
    assert one.desired(100.0, 5, stable, panic) == wanted


def test_panic_ends_after_a_slow_increase() -> None:
    """TestAutoscalerUnpanicAfterSlowIncrease."""
    one = kpa(1)
    assert one.desired(0.0, 10, 11, 25) == 25
    assert one.panicked_at == 0.0
    assert one.desired(30.0, 40, 30, 41) == 41
    assert one.panicked_at == 0.0
    assert one.desired(62.0, 55, 50, 56) == 50
    assert one.panicked_at is None


def test_panic_goes_on_while_load_surges() -> None:
    """TestAutoscalerExtendPanicWindow."""
    one = kpa(1)
    assert one.desired(0.0, 10, 11, 25) == 25
    assert one.desired(30.0, 40, 30, 80) == 80
    assert one.panicked_at == 30.0


def test_follows_load_that_grows_by_its_square() -> None:
    """TestAutoscalerPanicModeExponentialTrackAndStabilize."""
    one = kpa(1)
    sizes = []
    for now, ready, load in ((0, 1, 6), (0, 6, 36), (1, 36, 216), (1, 216, 1296), (2, 1296, 1296)):
        sizes.append(one.desired(float(now), ready, load, load))
    assert sizes == [6, 36, 216, 1296, 1296]


def test_nothing_shrinks_in_panic_and_all_at_once_after_it() -> None:
    """TestAutoscalerPanicThenUnPanicScaleDown."""
    one = kpa(10)
    assert one.desired(0.0, 1, 100, 100) == 10
    assert one.desired(0.0, 10, 100, 1000) == 100
    assert one.desired(30.0, 10, 1, 1) == 100
    assert one.desired(61.0, 10, 1, 1) == 1


def test_a_delay_holds_the_largest_of_its_window() -> None:
    """TestAutoscalerScaleDownDelay, simple and gradual."""
    one = kpa(10, panic_threshold=100.0, scale_down_delay_s=300.0, max_scale_down_rate=1e9)
    steps = [
        (2, 40, 4), (300, 0, 4), (302, 0, 0),
        (540, 40, 4), (600, 30, 4), (660, 0, 4), (840, 0, 3), (900, 0, 0),
    ]  # fmt: skip
    for now, load, wanted in steps:
        assert one.desired(float(now), 1, load, load) == wanted, now


@pytest.mark.parametrize(("num_ready", "is_panic"), [(0, False), (1, False), (2, True)])
def test_begins_in_panic_with_more_than_one(num_ready: int, is_panic: bool) -> None:
    """TestStartInPanicMode."""
    one = kpa(100)
    one.begin(5.0, num_ready)
    assert (one.panicked_at == 5.0, one.panic_size) == (is_panic, num_ready)


def state(in_queue: int, num_live: int) -> PoolState:
    """Describe a pool."""
    return PoolState(num_live, 0, 0, 0, in_queue, 0, 0, 1)


def test_as_a_controller_it_averages_over_both_windows() -> None:
    one = Kpa(KpaConfig(target=10.0, max_replicas=12))
    pools, sizes = KpaPools({PREFILL: (one, in_flight)}), []
    for i in range(40):
        load = 0 if i < 30 else 200
        seen = Observation(2.0 * i, {PREFILL: state(load, 1), DECODE: state(0, 1)}, 0, ())
        sizes.append(pools.orders(seen).sizes[PREFILL])
    assert set(sizes[:30]) == {1}
    # The first of three samples of the panic window asks for 200 / 3 / 10, the second for 14.
    assert sizes[30:33] == [7, 12, 12]
