"""Forecast and capacity: what is expected, what a replica can do, and the floor they set."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from math import pi, sin
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.autoscaler.capacity import rated, tokens_per_second
from services.autoscaler.decide import decide
from services.autoscaler.observation import Load, Observation, PoolSeen, Replica, ReplicaState
from services.autoscaler.policy import CapacityModel, Kalman, PolicySpec, Predictive
from services.autoscaler.predictors import advance_level, check_predictor
from services.autoscaler.state import Capacity, PoolState, Series, State
from services.common.errors import ConfigError
from tests.support.autoscaling import (
    KV,
    NOW,
    Fields,
    World,
    behavior,
    make_policy,
    make_seen,
    of_pool,
    steps_of,
)

FREE: Fields = {"behavior": behavior()}
THOUSAND = Capacity(100_000.0, 100.0)  # tokens a second


def predictive(**changes: Any) -> Fields:
    """Return what forecasts from points of a tick each."""
    fields: Fields = {"mode": "Forecast", "intervalSeconds": 10, "lookAheadSeconds": 180}
    return {**fields, **changes}


def constant(**changes: Any) -> PolicySpec:
    """Return a policy by which load goes on as it is."""
    return make_policy(FREE, FREE, predictive=predictive(predictor={"type": "Constant"}, **changes))


def loaded(prompt_tokens: int, output_tokens: int, at: float, span_s: float = 10.0) -> Observation:
    """Return pools that ask for nothing, and what came in."""
    quiet = make_seen({"QueuedTokens": 0.0}, {"KVUtilization": 0.0}, ready=(1, 1), at=at)
    return replace(quiet, load=Load(5, prompt_tokens, output_tokens, at, span_s))


def test_constant_load_needs_what_it_needs_now() -> None:
    state = State(pools={"prefill": PoolState(size=1, capacity=THOUSAND),
                         "decode": PoolState(size=1, capacity=THOUSAND)})  # fmt: skip

    decision, _ = decide(constant(), loaded(35_000, 21_000, NOW), state, NOW)

    prefill, decode = of_pool(decision, "prefill"), of_pool(decision, "decode")
    assert (prefill.forecast, prefill.desired) == (4, 4)  # 3,500 a second
    assert (decode.forecast, decode.desired) == (3, 3)
    assert steps_of(prefill)[0] == "forecast"
    assert next(c for c in decision.conditions if c.type == "Predicting").is_true


def test_prefill_keeps_the_headroom_of_the_consolidation_check() -> None:
    rules = behavior(down={"consolidationCheck": {"enabled": True, "headroomPercent": 20}})
    policy = make_policy(
        {"behavior": rules}, FREE, predictive=predictive(predictor={"type": "Constant"})
    )
    state = State(pools={"prefill": PoolState(size=1, capacity=THOUSAND)})

    decision, _ = decide(policy, loaded(35_000, 0, NOW), state, NOW)

    assert of_pool(decision, "prefill").forecast == 5  # 4.2


def test_dry_run_of_the_forecast_is_only_shown() -> None:
    state = State(pools={"prefill": PoolState(size=1, capacity=THOUSAND)})

    decision, _ = decide(constant(mode="ForecastDryRun"), loaded(35_000, 0, NOW), state, NOW)

    prefill = of_pool(decision, "prefill")
    assert (prefill.forecast, prefill.desired) == (4, 1)


def test_no_forecast_without_capacity_or_load() -> None:
    quiet = loaded(35_000, 0, NOW)

    no_capacity, _ = decide(constant(), quiet, State(), NOW)
    state = State(pools={"prefill": PoolState(size=1, capacity=THOUSAND)})
    no_load, _ = decide(constant(), replace(quiet, load=None), state, NOW)

    assert of_pool(no_capacity, "prefill").forecast is None
    assert of_pool(no_load, "prefill").forecast is None
    assert not next(c for c in no_load.conditions if c.type == "Predicting").is_true


def test_load_is_counted_once_and_gathered_into_points() -> None:
    policy = constant()
    state = State(pools={"prefill": PoolState(size=1, capacity=THOUSAND)})
    half = loaded(10_000, 0, NOW, span_s=5.0)

    _, state = decide(policy, half, state, NOW)
    _, state = decide(policy, half, state, NOW + 1)  # the same figures again
    assert state.pools["prefill"].series.num_points == 0
    _, state = decide(policy, loaded(20_000, 0, NOW + 5, span_s=5.0), state, NOW + 5)

    series = state.pools["prefill"].series
    assert series.num_points == 1
    assert series.ahead == 3000.0


def followed(points: list[float], kalman: Kalman, gaps: dict[int, int] | None = None) -> Series:
    """Return a series after points one interval apart, or more."""
    series = Series()
    for i, point in enumerate(points):
        series = advance_level(series, kalman, point, (gaps or {}).get(i, 1))
        series = replace(series, num_points=series.num_points + 1)
    return series


def test_kalman_finds_level_and_trend_of_a_ramp() -> None:
    series = followed([100.0 + 7 * i for i in range(60)], Kalman())

    assert series.level == pytest.approx(100 + 7 * 59, rel=1e-3)
    assert series.trend == pytest.approx(7.0, rel=1e-3)


def test_kalman_counts_time_that_nobody_measured() -> None:
    points = [100.0 + 7 * i for i in range(40)]
    with_gap = followed([*points, 100.0 + 7 * 49], Kalman(), {40: 10})

    assert with_gap.level == pytest.approx(100 + 7 * 49, rel=1e-3)
    assert with_gap.trend == pytest.approx(7.0, rel=1e-3)


def test_kalman_is_the_textbook_filter() -> None:
    """By hand: P = F P F' + Q, K = P H' / (H P H' + r), with F = [[1, 1], [0, 1]], H = [1, 0]."""
    start = Series(num_points=3, level=10.0, trend=2.0, covariance=(4.0, 1.0, 2.0))

    after = advance_level(start, Kalman(q_level="1", q_trend="500m", r="3"), 15.0, 1)

    # P: level 4 + 2 + 2 + 1 = 9, cross 1 + 2 = 3, trend 2.5; S = 12; K = (0.75, 0.25).
    assert after.level == pytest.approx(12 + 0.75 * 3)
    assert after.trend == pytest.approx(2 + 0.25 * 3)
    assert after.covariance == pytest.approx((2.25, 0.75, 1.75))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    points=st.lists(st.floats(0, 1e7), min_size=6, max_size=40),
    scale=st.sampled_from([1e-3, 10.0, 1e4]),
)
def test_kalman_has_no_unit(points: list[float], scale: float) -> None:
    one = followed(points, Kalman())
    other = followed([p * scale for p in points], Kalman())

    assert other.level == pytest.approx(one.level * scale, rel=1e-6, abs=1e-6 * scale)
    assert other.trend == pytest.approx(one.trend * scale, rel=1e-6, abs=1e-6 * scale)


def test_kalman_says_nothing_before_its_points() -> None:
    policy = make_policy(FREE, FREE, predictive=predictive())
    state = State(pools={"prefill": PoolState(size=1, capacity=THOUSAND)})
    forecasts = []
    for i in range(6):
        at = NOW + 10 * i
        decision, state = decide(policy, loaded(20_000, 0, at), state, at)
        forecasts.append(of_pool(decision, "prefill").forecast)

    assert forecasts == [None, None, None, None, 2, 2]


def test_ramp_is_met_by_replicas_that_are_ready_in_time() -> None:
    """The floor is of the look-ahead, so that starts end before their load comes."""
    rules: Fields = {"startup": {"expectedSeconds": 60}, "maxReplicas": 20}
    forecast = {"mode": "Forecast", "intervalSeconds": 10, "lookAheadSeconds": 90}

    def wait(**changes: Any) -> float:
        policy = make_policy(rules, rules, **changes)
        world = World(policy, lambda t: 500 + 12 * t, lambda _: 200.0, startup_s=60.0)
        waits = []
        for _ in range(240):
            world.tick()
            waits.append(world.queued / (1000.0 * world.num_ready("prefill")))
        return sum(waits[60:]) / len(waits[60:])

    assert wait(predictive=forecast) < 0.2 * wait()


def test_capacity_of_prefill_is_its_pace_while_busy() -> None:
    world = World(make_policy(), lambda _: 300.0, lambda _: 100.0, seed_sizes=(2, 2)).run(300)

    pools = world.state.pools
    assert tokens_per_second(pools["prefill"].capacity, None) == pytest.approx(1000, rel=0.01)
    # Decode was never half as full as its target: nobody knows.
    assert tokens_per_second(pools["decode"].capacity, None) is None


def test_capacity_of_decode_is_what_it_makes_at_its_target() -> None:
    world = World(make_policy(), lambda _: 300.0, lambda _: 1000.0, seed_sizes=(2, 2)).run(300)

    pace = tokens_per_second(world.state.pools["decode"].capacity, None)
    assert pace == pytest.approx(750, rel=0.01)


def test_tick_with_a_cold_replica_teaches_nothing() -> None:
    policy = make_policy(FREE, FREE)
    state = State(at=NOW - 5, pools={"prefill": PoolState(size=2, capacity=THOUSAND)})
    seen = make_seen({"QueuedTokens": 2000.0})
    for age_s, is_taught in ((29.0, False), (30.0, True)):
        replicas = (
            Replica("old", ReplicaState.READY, NOW - 900),
            Replica("young", ReplicaState.READY, NOW - age_s),
        )
        prefill = replace(seen.pools["prefill"], replicas=replicas, work_tokens=50, busy_s=5.0)

        _, after = decide(
            policy, replace(seen, pools={**seen.pools, "prefill": prefill}), state, NOW
        )

        capacity = after.pools["prefill"].capacity
        assert (capacity != THOUSAND) == is_taught


@pytest.mark.parametrize(
    ("source", "learnt", "profile", "enabled", "expected"),
    [
        ("Online", 1000.0, 300.0, True, 1000.0),
        ("Online", None, 300.0, True, 300.0),
        ("Online", None, None, True, None),
        ("Profile", 1000.0, 800.0, True, 1000.0),
        ("Profile", 1000.0, 300.0, True, 600.0),  # at most twice what it says
        ("Profile", 1000.0, 3000.0, True, 1500.0),  # at least half
        ("Profile", 1000.0, 300.0, False, 300.0),
        ("Profile", None, 300.0, True, 300.0),
        ("Profile", 1000.0, None, True, None),
    ],
)
def test_capacity_by_source(
    source: str, learnt: float | None, profile: float | None, enabled: bool, expected: float | None
) -> None:
    model = CapacityModel.model_validate(
        {"source": source, "profileRef": {"name": "h100"}, "correction": {"enabled": enabled}}
    )
    capacity = Capacity() if learnt is None else Capacity(learnt * 100, 100.0)

    assert rated(model, capacity, profile) == expected


@pytest.mark.skipif(find_spec("statsmodels") is not None, reason="statsmodels is installed")
@pytest.mark.parametrize("predictor", ["HoltWinters", "Arima"])
def test_predictor_without_its_library_says_what_to_install(predictor: str) -> None:
    wanted = Predictive.model_validate({"mode": "Forecast", "predictor": {"type": predictor}})

    with pytest.raises(ConfigError, match=r"isthmus\[forecast\]"):
        check_predictor(wanted)
    check_predictor(wanted.model_copy(update={"predictor": Predictive().predictor}))


def test_sine_keeps_its_forecast_near_what_comes() -> None:
    """A load that swings 24-fold within 900 s, in points of 30 s, a minute ahead."""
    kalman = Kalman(q_level="1", q_trend="1", r="1")
    series, errors = Series(), []
    load = [100 * (12.5 - 11.5 * sin(2 * pi * (30 * i) / 900)) for i in range(120)]
    for i, point in enumerate(load[:-2]):
        series = advance_level(series, kalman, point, 1)
        series = replace(series, num_points=series.num_points + 1)
        if i > 30:
            errors.append(abs(series.level + 2 * series.trend - load[i + 2]))

    assert sum(errors) / len(errors) < 0.2 * 1250


def test_unknown_pool_is_not_seen() -> None:
    nothing = PoolSeen((), {})
    seen = Observation({"prefill": nothing, "decode": nothing, "other": nothing}, None)

    decision, state = decide(make_policy(), seen, State(), NOW)

    assert [p.pool for p in decision.pools] == ["prefill", "decode"]
    assert set(state.pools) == {"prefill", "decode"}


def test_time_that_no_router_told_of_goes_by() -> None:
    policy = make_policy(FREE, FREE, predictive=predictive())
    state = State(pools={"prefill": PoolState(size=1, capacity=THOUSAND)})
    for i in (*range(40), 50):
        at = NOW + 10.0 * i
        _, state = decide(policy, loaded(10 * (100 + 7 * i), 0, at), state, at)

    assert state.pools["prefill"].series.level == pytest.approx(100 + 7 * 50, rel=1e-3)
    assert state.pools["prefill"].series.trend == pytest.approx(7.0, rel=1e-3)


def test_forecast_moves_nothing_that_is_held() -> None:
    policy = make_policy(
        FREE,
        FREE,
        metrics={"onStale": "Hold"},
        predictive=predictive(predictor={"type": "Constant"}),
    )
    state = State(pools={"prefill": PoolState(size=1, capacity=THOUSAND)})
    blind = make_seen({}, ready=(1, 1))

    decision, _ = decide(policy, replace(blind, load=Load(5, 35_000, 0, NOW, 10.0)), state, NOW)

    prefill = of_pool(decision, "prefill")
    assert (prefill.forecast, prefill.desired) == (4, 1)


def test_other_figures_say_nothing_of_how_full_decode_is() -> None:
    backlog = {"type": "External", "external": {"metric": {"name": "backlog"}},
               "target": {"type": "Value", "value": "100"}}  # fmt: skip
    policy = make_policy(FREE, {**FREE, "metrics": [KV, backlog]})
    seen = make_seen(decode={"KVUtilization": 0.1, "backlog": 80.0})
    decode = replace(seen.pools["decode"], work_tokens=1000, busy_s=10.0)

    _, state = decide(policy, replace(seen, pools={**seen.pools, "decode": decode}), State(), NOW)

    assert tokens_per_second(state.pools["decode"].capacity, None) is None
