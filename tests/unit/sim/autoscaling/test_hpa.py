"""The HPA of the simulator against published cases of the Kubernetes one.

Sources: the Kubernetes documentation "Horizontal Pod Autoscaling" (algorithm, behavior), and the
cases of its controller, pkg/controller/podautoscaler: replica_calculator_test.go,
horizontal_test.go (rates, stabilisation).
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from services.sim.autoscaling.hpa import Hpa, HpaConfig, HpaPools, Rate, proposal, queued_tokens
from services.sim.cluster import DECODE, PREFILL
from services.sim.controller import Observation, PoolState


@pytest.mark.parametrize(
    ("metric", "target", "current", "wanted"),
    [
        (200, 100, 1, 2),  # documentation: twice the target, twice the replicas
        (50 * 4, 100, 4, 2),  # documentation: half of it, half as many
        (109 * 10, 100, 10, 10),  # documentation: within a tenth nothing happens
        (91 * 10, 100, 10, 10),
        (111 * 10, 100, 10, 12),
        (8600, 2150, 3, 4),  # TestReplicaCalcScaleUpPerPodCMExternal
        (8600, 2867, 5, 3),  # TestReplicaCalcScaleDownPerPodCMExternal
        (0, 100, 3, 0),
    ],
)
def test_asks_for_the_metric_over_its_target(
    metric: float, target: float, current: int, wanted: int
) -> None:
    assert proposal(metric, target, current, 0.1) == wanted


def hpa(up: tuple[Rate, ...] = (), down: tuple[Rate, ...] = (), **windows: float) -> Hpa:
    """Make one with these rates and windows."""
    return Hpa(HpaConfig(target=1.0, max_replicas=10_000, up=up, down=down, **windows))  # type: ignore[arg-type]


def pods(value: int, period_s: float = 120.0) -> Rate:
    """Make a rate of replicas."""
    return Rate(False, value, period_s)


def percent(value: int, period_s: float = 120.0) -> Rate:
    """Make a rate of percent."""
    return Rate(True, value, period_s)


@pytest.mark.parametrize(
    ("rates", "changes", "current", "wish", "allowed"),
    [
        # Growing after 1 + 5 + 9 more in the last two minutes.
        ((pods(5),), (1, 5, 9), 100, 500, 100),  # 100 - 15 + 5 is less than there are
        ((pods(150),), (1, 5, 9), 100, 500, 235),  # 100 - 15 + 150
        ((percent(200),), (1, 5, 9), 100, 500, 255),  # 85 and 200 % of it
        ((), (1, 5, 9), 100, 500, 500),
        # Shrinking after that many fewer.
        ((pods(5),), (-1, -5, -9), 100, 2, 100),  # 100 + 15 - 5 is more than there are
        ((percent(50),), (-2, -4, -6), 100, 0, 56),  # half of 112
        ((percent(10),), (-10, -10, -10), 100, 0, 100),
        ((percent(1000),), (-10, -10, -10), 10, 5, 5),
        ((pods(115),), (-1, -5, -9), 100, 0, 0),
    ],
)
def test_rates_count_what_changed_within_their_period(
    rates: tuple[Rate, ...], changes: tuple[int, ...], current: int, wish: int, allowed: int
) -> None:
    """horizontal_test.go, "... with PeriodSeconds usage"."""
    one = hpa(up=rates, down=rates)
    one.changes = [(1000.0 - 60.0, more) for more in changes]
    assert one.limited(1000.0, current, wish) == allowed
    one.changes = [(1000.0 - 121.0, more) for more in changes]
    later = one.limited(1000.0, current, wish)
    assert abs(later - current) >= abs(allowed - current)


def test_the_documented_walk_from_80_to_10_replicas() -> None:
    """Documentation: a tenth, rounded up, while that is more than four; then four at a time."""
    one = hpa(down=(pods(4, 60), percent(10, 60)), down_window_s=0.0)
    sizes, size, now = [80], 80, 0.0
    while size > 10:
        now += 60.0
        size = one.desired(now, size, 10.0)
        sizes.append(size)
    assert sizes[:3] == [80, 72, 64]
    assert all(a - b == 4 for a, b in pairwise(sizes) if b > 10 and a <= 40)
    assert sizes[-1] == 10


def test_default_rates_double_or_add_four_whatever_is_more() -> None:
    """Documentation, default behavior: 100 percent or 4 pods every 15 seconds."""
    one = Hpa(HpaConfig(target=1.0, max_replicas=100))
    sizes = [1]
    for i in range(5):
        sizes.append(one.desired(15.0 * (i + 1), sizes[-1], 1000.0))
    assert sizes == [1, 5, 10, 20, 40, 80]


@pytest.mark.parametrize(
    ("up_s", "down_s", "past", "current", "wish", "stable"),
    [
        (0.0, 300.0, (), 100, 5, 5),  # empty recommendations for scaling down
        (0.0, 300.0, ((120, 4), (60, 5)), 100, 3, 5),  # simple scale down stabilization
        (150.0, 300.0, ((120, 4), (60, 5)), 1, 7, 4),  # simple scale up stabilization
        (0.0, 300.0, ((120, 1), (60, 2)), 100, 3, 3),  # no scale down stabilization
        (150.0, 300.0, ((120, 4), (60, 5)), 1, 3, 3),  # no scale up stabilization
        (0.0, 300.0, ((600, 10), (540, 9)), 100, 3, 3),  # both are too old
        (60.0, 300.0, ((600, 10), (540, 9)), 1, 100, 100),
        (0.0, 150.0, ((600, 10), (60, 4), (120, 5), (540, 9)), 100, 3, 5),
        (150.0, 300.0, ((6000, 10), (60, 6), (120, 5), (180, 9)), 1, 100, 5),
    ],
)
def test_windows_hold_wishes_back(
    up_s: float,
    down_s: float,
    past: tuple[tuple[float, int], ...],
    current: int,
    wish: int,
    stable: int,
) -> None:
    """horizontal_test.go, TestNormalizeWithConstraintsDesiredReplicas."""
    one = hpa(up_window_s=up_s, down_window_s=down_s)
    one.wishes = [(10_000.0 - ago, size) for ago, size in past]
    assert one.stabilized(10_000.0, current, wish) == stable


def test_the_size_it_finds_counts_as_asked_for() -> None:
    """Documentation: a controller that starts does not shrink before its window is over."""
    one = Hpa(HpaConfig(target=1.0))
    assert [one.desired(now, 8, 1.0) for now in (0.0, 150.0, 299.0)] == [8, 8, 8]
    assert one.desired(301.0, 8, 1.0) == 1


def test_least_and_most_bound_every_wish() -> None:
    one = Hpa(HpaConfig(target=1.0, min_replicas=2, max_replicas=6, down_window_s=0.0))
    assert one.desired(15.0, 3, 100.0) == 6
    assert one.desired(30.0, 6, 0.0) == 2


def state(queued: int, num_live: int, num_starting: int = 0) -> PoolState:
    """Describe a pool."""
    return PoolState(num_live, num_starting, 0, queued, 0, 0, 0, 1)


def test_as_a_controller_it_counts_those_that_start() -> None:
    pools = HpaPools({PREFILL: (Hpa(HpaConfig(target=1000.0)), queued_tokens)})
    seen = Observation(0.0, {PREFILL: state(4000, 1), DECODE: state(0, 1)}, 0, ())
    assert pools.orders(seen).sizes == {PREFILL: 4}
    seen = Observation(15.0, {PREFILL: state(4000, 1, 3), DECODE: state(0, 1)}, 0, ())
    assert pools.orders(seen).sizes == {PREFILL: 4}
