"""The SLA planner of the simulator against published cases of Dynamo's.

Source: ai-dynamo/dynamo, tests/planner/test_replica_calculation.py and
tests/planner/unit/test_sla_planner_scaling.py: formulas and inputs are theirs, with the throughput
of a replica given as there, or profiled.
"""

from __future__ import annotations

import math

import pytest

from services.sim.autoscaling.planner import (
    Constant,
    Interval,
    Planner,
    PlannerConfig,
    Trend,
    corrected_itl_s,
    decode_replicas,
    prefill_replicas,
)
from services.sim.autoscaling.profile import Profile
from services.sim.cluster import DECODE, PREFILL
from services.sim.controller import Observation, PoolState
from services.sim.performance import DecodePace, PerformanceModel, PrefillPace, default_model


@pytest.mark.parametrize(
    ("num_requests", "tokens_s", "correction", "wanted"),
    [
        (10, 40_000, 1.0, 1),  # test_prefill_replica_calculation_basic
        (500, 40_000, 1.0, 1),  # test_scaling_scenario_low_to_high_load
        (10, 40_000, 2.5, 1),  # test_prefill_correction_factor_clamping
        (20, 2 * 40_000, 1.0, 1),  # test_multi_gpu_engines
        (5000, 40_000, 1.0, 7),  # test_disagg_scale_up, at their profile's round rate
        (5000, 40_000, 2.5, 7),
        (5000, 40_000, 0.5, 4),
    ],
)
def test_prefill_replicas(
    num_requests: float, tokens_s: float, correction: float, wanted: int
) -> None:
    found = prefill_replicas(num_requests, 3000, 60, tokens_s=tokens_s, correction=correction)
    assert found == wanted


@pytest.mark.parametrize(
    ("num_requests", "tokens_s", "wanted"),
    [
        (10, 10_000, 1),  # test_decode_replica_calculation_basic
        (500, 1000, 2),  # test_scaling_scenario_low_to_high_load
        (20, 4 * 5000, 1),  # test_multi_gpu_engines
        (5000, 10_000, 2),  # test_disagg_scale_up, at their profile's round rate
    ],
)
def test_decode_replicas(num_requests: float, tokens_s: float, wanted: int) -> None:
    assert decode_replicas(num_requests, 150, 60, tokens_s=tokens_s) == wanted


@pytest.mark.parametrize(
    ("correction", "wanted"), [(1.0, 10.0), (2.0, 5.0), (0.0, 10.0), (-1.0, 10.0)]
)
def test_a_correction_that_cannot_be_is_left_out(correction: float, wanted: float) -> None:
    """test_decode_correction_factor_zero_handling."""
    assert corrected_itl_s(10.0, correction) == wanted


def fast() -> PerformanceModel:
    """Make 40,000 prompt tokens a second; steps of 10 ms and 0.1 ms for each answer of 3,000."""
    return default_model().model_copy(
        update={
            "prefill": PrefillPace(token_s=1 / 40_000),
            "decode": DecodePace(fixed_s=0.01, token_s=1e-4 / 3075, max_batch=256),
        }
    )


def test_the_profile_is_looked_up_at_the_target() -> None:
    profile = Profile(fast())
    assert profile.prefill_tokens_s(3000) == pytest.approx(40_000)
    # 100 answers a step of 20 ms.
    assert profile.decode_tokens_s(0.0200001, 3075) == pytest.approx(5000)
    assert profile.decode_tokens_s(0.001, 3075) == pytest.approx(1 / 0.0101)
    assert profile.itl_s(100, 3075) == pytest.approx(0.02)
    assert profile.decode_tokens_s(10.0, 3075) == pytest.approx(256 / 0.0356)


def planner(*, has_correction: bool = False) -> Planner:
    """Make one of a minute."""
    config = PlannerConfig(0.5, 0.05, has_correction=has_correction)
    return Planner(config, Profile(fast()), Constant())


def interval(num_requests: float, ttft_s: float = 0.4, itl_s: float = 0.03) -> Interval:
    """Measure as there: 3,000 tokens in, 150 out."""
    return Interval(num_requests, 3000, 150, ttft_s, itl_s, 20.0)


def test_follows_load_up_and_down() -> None:
    """test_disagg_scale_up, test_disagg_scale_down: least one; the formulas' sizes at 5,000."""
    one = planner()
    tokens_s = one.profile.decode_tokens_s(0.05, 3075)
    most = {PREFILL: 7, DECODE: math.ceil(5000 * 150 / 60 / tokens_s)}
    assert one.plan(interval(10), 1) == {PREFILL: 1, DECODE: 1}
    assert one.plan(interval(5000), 1) == most
    assert one.plan(interval(10), 1) == {PREFILL: 1, DECODE: 1}


def test_corrections_compare_what_is_measured_with_the_profile() -> None:
    one = planner(has_correction=True)
    expected_s = one.profile.ttft_s(3000)
    assert one.plan(interval(5000, ttft_s=expected_s / 2), 1)[PREFILL] == 4
    assert one.plan(interval(5000, ttft_s=expected_s * 9), 1)[PREFILL] == 7
    at_once = 5000 * 20.0 / 60
    as_profiled = one.profile.itl_s(at_once, 3075)
    usual = one.plan(interval(5000, itl_s=as_profiled), 1)[DECODE]
    assert one.plan(interval(5000, itl_s=as_profiled * 2), 1)[DECODE] > usual


def test_a_trend_is_carried_on() -> None:
    trend = Trend()
    assert trend.next() == 0.0
    for value in range(0, 200, 10):
        trend.add(float(value))
    assert trend.next() == pytest.approx(200.0, abs=2.0)
    trend.add(0.0)
    trend.add(0.0)
    assert trend.next() == 0.0


def test_as_a_controller_it_needs_a_request_to_go_by() -> None:
    pools = {pool: PoolState(1, 0, 0, 0, 0, 0, 0, 1) for pool in (PREFILL, DECODE)}
    assert planner().orders(Observation(60.0, pools, 0, ())).sizes == {}
