"""Each step of a decision, one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.autoscaler.decide import decide
from services.autoscaler.decision import Decision, Flip
from services.autoscaler.observation import Load, Observation, PoolSeen, Replica, ReplicaState
from services.autoscaler.policy import PolicySpec
from services.autoscaler.state import Ask, Capacity, Change, Flipping, PoolState, State, from_json
from tests.support.autoscaling import (
    ITL,
    KV,
    NOW,
    QUEUED,
    TTFT,
    Fields,
    behavior,
    make_policy,
    make_replicas,
    make_seen,
    of_pool,
    sizes,
    steps_of,
)

FREE: Fields = {"behavior": behavior()}
RANGE: Fields = {"mode": "Range", "minPrefillPerDecode": "0.5", "maxPrefillPerDecode": "2"}
GROW_PREFILL = {"QueuedTokens": 4000.0}  # asks for 4


def latency_policy(**changes: Any) -> PolicySpec:
    """Return a policy whose prefill pool follows TTFT alone, at 0.4 s."""
    return make_policy({"metrics": [TTFT], "behavior": behavior(panic=True), **changes}, FREE)


def decided(policy: PolicySpec, seen: Observation, state: State | None = None) -> Decision:
    """Return the decision of one tick."""
    return decide(policy, seen, state or State(), NOW)[0]


def known(**pools: PoolState) -> State:
    """Return what is remembered of pools."""
    return State(at=NOW - 5, pools=pools)


@pytest.mark.parametrize(
    ("ttft", "ready", "starting", "expected"),
    [
        (0.40, 4, 0, 4),
        (0.42, 4, 0, 4),  # within tolerance
        (0.43, 4, 0, 5),
        (0.79, 4, 0, 5),  # one more, however far
        (0.79, 4, 1, 5),  # one is on its way
        (0.80, 4, 0, 8),  # the panic multiple
        (40.0, 4, 0, 8),  # and no more than it
        (40.0, 4, 4, 8),  # of those that work, not of those that start
        (0.37, 4, 0, 4),
        (0.30, 4, 0, 3),  # one fewer, however far
        (0.01, 4, 0, 3),
    ],
)
def test_latencies_step(ttft: float, ready: int, starting: int, expected: int) -> None:
    seen = make_seen({"TTFT": ttft}, ready=(ready, 2), starting=(starting, 0))

    assert of_pool(decided(latency_policy(), seen), "prefill").desired == expected


def test_replicas_that_warm_up_are_waited_for() -> None:
    seen = make_seen({"TTFT": 9.0}, ready=(2, 2))
    young = tuple(Replica(f"young-{i}", ReplicaState.READY, NOW - 10) for i in range(2))
    prefill = replace(seen.pools["prefill"], replicas=(*make_replicas("prefill", 2), *young))

    decision = decided(latency_policy(), Observation({**seen.pools, "prefill": prefill}, seen.load))

    # Twice the two that are warm are there already.
    assert of_pool(decision, "prefill").desired == 4


def test_latency_of_before_the_last_change_moves_nothing() -> None:
    state = known(prefill=PoolState(size=3, changed_at=NOW - 1))
    for ttft, steps in ((0.6, []), (0.1, ["latency"])):
        seen = make_seen({"TTFT": ttft}, ready=(3, 2), age_s=2.0)

        pool = of_pool(decided(latency_policy(), seen, state), "prefill")

        assert pool.desired == 3
        assert steps_of(pool) == steps


def test_ttft_includes_what_the_queue_will_take() -> None:
    """The figure is low where nothing gets through: prompts that wait have no TTFT yet."""
    state = known(prefill=PoolState(size=2, capacity=Capacity(100_000.0, 100.0)))
    seen = make_seen({"TTFT": 0.1, "QueuedTokens": 1200.0}, ready=(2, 2))

    pool = of_pool(decided(latency_policy(), seen, state), "prefill")

    assert pool.proposals[0].value == pytest.approx(0.6)  # 1,200 tokens at 2 x 1,000 a second
    assert pool.desired == 3


def test_queue_asks_for_no_more_than_the_load_needs() -> None:
    state = known(prefill=PoolState(size=2, capacity=Capacity(100_000.0, 100.0)))
    seen = make_seen({"QueuedTokens": 50_000.0}, ready=(2, 2))
    seen = replace(seen, load=Load(10, 13_000, 100, NOW, 5.0))  # 2,600 a second: 2.6 replicas

    pool = of_pool(decided(make_policy(FREE, FREE), seen, state), "prefill")

    assert pool.desired == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, None])
def test_figure_that_is_no_number_is_missing(bad: float | None) -> None:
    figures = {} if bad is None else {"QueuedTokens": bad}
    decision = decided(make_policy(FREE, FREE), make_seen(figures, ready=(3, 2)))

    pool = of_pool(decision, "prefill")
    assert pool.desired == 3
    assert pool.proposals[0].value is None
    stale = next(c for c in decision.conditions if c.type == "Stale")
    assert stale.is_true
    assert stale.reason == "prefill"


@pytest.mark.parametrize(
    ("on_stale", "queued", "expected"),
    [("HoldScaleDown", 5000.0, 5), ("HoldScaleDown", 100.0, 3), ("Hold", 5000.0, 3)],
)
def test_stale_figures_beside_fresh_ones(on_stale: str, queued: float, expected: int) -> None:
    policy = make_policy({**FREE, "metrics": [QUEUED, TTFT]}, FREE, metrics={"onStale": on_stale})

    assert of_pool(decided(policy, make_seen({"QueuedTokens": queued}, ready=(3, 2))),
                   "prefill").desired == expected  # fmt: skip


def test_figures_grow_stale_by_age() -> None:
    policy = make_policy(FREE, FREE)
    for age_s, expected in ((15.0, 1), (15.1, 3), (-15.1, 3)):
        seen = make_seen({"QueuedTokens": 1000.0}, ready=(3, 2), age_s=age_s)

        assert of_pool(decided(policy, seen), "prefill").desired == expected


def test_panic_does_not_wait_for_the_window() -> None:
    slow = behavior(up={"stabilizationWindowSeconds": 300})
    slow["scaleUp"]["panic"] = {"enabled": True, "windowSeconds": 6}
    state = known(prefill=PoolState(size=2, lows=(Ask(NOW - 10, 2),), highs=(Ask(NOW - 10, 2),)))
    policy = make_policy({"behavior": slow}, FREE)

    below = decided(policy, make_seen({"QueuedTokens": 3000.0}, ready=(2, 2)), state)
    at_twice = decided(policy, make_seen({"QueuedTokens": 4000.0}, ready=(2, 2)), state)

    assert of_pool(below, "prefill").desired == 2
    assert of_pool(at_twice, "prefill").desired == 4


def test_panic_looks_at_the_mean_of_its_window() -> None:
    slow = behavior(up={"stabilizationWindowSeconds": 300}, panic=True)
    calm = PoolState(size=2, lows=(Ask(NOW - 10, 2),), recent=(Ask(NOW - 5, 1),))
    policy = make_policy({"behavior": slow}, FREE)

    decision = decided(policy, make_seen(GROW_PREFILL, ready=(2, 2)), known(prefill=calm))

    assert of_pool(decision, "prefill").desired == 2


@pytest.mark.parametrize(
    ("utilization", "ready", "expected"),
    [
        (0.30, 4, 2),  # 0.6 of 0.75 on two, 0.72 with headroom
        (0.32, 4, 3),  # 0.64 on two: 0.768 with headroom
        (0.47, 4, 4),  # 0.63 on three: 0.752
    ],
)
def test_consolidation_leaves_headroom(utilization: float, ready: int, expected: int) -> None:
    check = behavior(down={"consolidationCheck": {"enabled": True, "headroomPercent": 20}})
    policy = make_policy(FREE, {"behavior": check})

    decision = decided(policy, make_seen(decode={"KVUtilization": utilization}, ready=(2, ready)))

    assert of_pool(decision, "decode").desired == expected


def test_first_tick_starts_what_the_policy_wants() -> None:
    policy = make_policy({**FREE, "initialReplicas": 3}, {**FREE, "minReplicas": 2})
    nothing = Observation({}, None)

    decision, state = decide(policy, nothing, State(), NOW)

    assert sizes(decision) == (3, 2)
    assert [p.start for p in decision.pools] == [3, 2]
    assert from_json(state.to_json()) == state


def test_first_tick_takes_over_what_is_there() -> None:
    policy = make_policy({**FREE, "initialReplicas": 3}, FREE)

    assert sizes(decided(policy, make_seen(ready=(5, 2)))) == (5, 2)


def test_schedules_set_limits_in_their_time_zone() -> None:
    # NOW is a Monday, 01:53:20 in Berlin.
    schedule = {"name": "night", "timeZone": "Europe/Berlin", "start": "30 1 * * 1",
                "durationSeconds": 1800, "pools": {"prefill": {"minReplicas": 3}}}  # fmt: skip
    policy = make_policy(FREE, FREE, schedules=[schedule])
    quiet = {"QueuedTokens": 0.0}

    inside, _ = decide(policy, make_seen(quiet, ready=(1, 2)), State(), NOW)
    outside, _ = decide(policy, make_seen(quiet, ready=(1, 2), at=NOW + 400), State(), NOW + 400)

    assert inside.active_schedule == "night"
    assert of_pool(inside, "prefill").desired == 3
    assert "night" in of_pool(inside, "prefill").reason
    assert outside.active_schedule is None
    assert of_pool(outside, "prefill").desired == 1


@pytest.mark.parametrize(
    ("ratio", "before", "expected"),
    [
        # prefill:decode asked for, by what their metrics want
        (RANGE, (3, 4), (3, 4)),
        (RANGE, (1, 4), (2, 4)),
        (RANGE, (5, 2), (5, 3)),
        ({"mode": "Fixed", "prefillPerDecode": "0.5"}, (2, 3), (2, 3)),
        ({"mode": "Fixed", "prefillPerDecode": "0.5"}, (1, 4), (2, 4)),
        ({"mode": "Fixed", "prefillPerDecode": "0.5"}, (3, 4), (3, 6)),
        ({"mode": "Range", "maxPrefillPerDecode": "2", "onViolation": "CapHigher"}, (5, 2), (4, 2)),
        ({"mode": "Range", "maxPrefillPerDecode": "2", "onViolation": "Warn"}, (5, 2), (5, 2)),
    ],
)  # fmt: skip
def test_ratio(ratio: Fields, before: tuple[int, int], expected: tuple[int, int]) -> None:
    policy = make_policy(FREE, FREE, ratio=ratio)

    decision = decided(policy, make_seen(ready=before))

    assert sizes(decision) == expected
    limited = next(c for c in decision.conditions if c.type == "RatioLimited")
    assert limited.is_true == (expected != before or ratio.get("onViolation") == "Warn")


def test_ratio_lowers_nothing_that_is_blind() -> None:
    ratio = {"mode": "Range", "maxPrefillPerDecode": "1", "onViolation": "CapHigher"}
    policy = make_policy(FREE, FREE, ratio=ratio)

    assert sizes(decided(policy, make_seen({}, ready=(4, 2)))) == (4, 2)


@pytest.mark.parametrize(
    ("budget", "queued", "kv", "ready", "expected"),
    [
        # Growth shares what is free in proportion to what was asked for.
        ({"maxAccelerators": 12}, 6000.0, 1.5, (2, 2), (6, 3)),
        ({"maxAccelerators": 8}, 6000.0, 1.5, (2, 2), (4, 2)),
        ({"maxAccelerators": 6}, 6000.0, 1.5, (2, 2), (2, 2)),
        # By cost: 20 an hour buy 8.
        ({"maxCostPerHour": "20", "costPerAcceleratorHour": "2.5"}, 6000.0, 1.5, (2, 2), (4, 2)),
        # One gives up two, and the other takes the accelerators of both.
        ({"maxAccelerators": 8}, 2000.0, 1.1, (4, 2), (2, 3)),
        ({"maxAccelerators": 8, "allowRebalanceAtCap": False}, 2000.0, 1.1, (4, 2), (2, 2)),
        # One gives up one, and the other would need two: neither moves.
        ({"maxAccelerators": 8}, 3000.0, 1.1, (4, 2), (4, 2)),
        # Never fewer: whoever has the smallest share of its most gets it.
        ({"minAccelerators": 9}, 1000.0, 0.4, (4, 2), (3, 3)),
        # Lowered below what there is: the one furthest above its least gives.
        ({"maxAccelerators": 6}, 6000.0, 0.75, (6, 2), (2, 2)),
    ],
)
def test_budget(
    budget: Fields, queued: float, kv: float, ready: tuple[int, int], expected: tuple[int, int]
) -> None:
    pools = ({**FREE, "acceleratorsPerReplica": 1}, {**FREE, "acceleratorsPerReplica": 2})
    policy = make_policy(*pools, budget=budget)
    seen = make_seen({"QueuedTokens": queued}, {"KVUtilization": kv}, ready=ready)

    assert sizes(decided(policy, replace(seen, can_flip=False))) == expected


def test_starts_wait_for_accelerators_that_still_drain() -> None:
    policy = make_policy(FREE, FREE, budget={"maxAccelerators": 6})
    seen = make_seen({"QueuedTokens": 4000.0}, {"KVUtilization": 0.75}, ready=(2, 2))
    draining = (*make_replicas("decode", 2), *make_replicas("decode", 0, draining=1))
    decode = replace(seen.pools["decode"], replicas=draining)

    pool = of_pool(
        decided(policy, replace(seen, pools={**seen.pools, "decode": decode})), "prefill"
    )

    assert pool.desired == 4
    assert pool.start == 1


def flip_seen(**changes: Any) -> Observation:
    """Return a prefill pool that is short by two and a decode pool of four, half idle."""
    seen = make_seen(GROW_PREFILL, {"KVUtilization": 0.3}, ready=(2, 4))
    return replace(seen, **changes)


IDLE_DECODE = PoolState(size=4, highs=(Ask(NOW - 60, 4), Ask(NOW - 31, 2)))
# As by default, but for the rate.
PATIENT: Fields = {
    "behavior": behavior(
        down={"stabilizationWindowSeconds": 300,
              "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}
    )
}  # fmt: skip


def test_idle_replica_is_flipped_before_a_new_one_is_started() -> None:
    policy = make_policy(FREE, PATIENT)

    decision, state = decide(policy, flip_seen(), known(decode=IDLE_DECODE), NOW)

    # One, by the rate; the window has 60 s to go.
    assert decision.flips == (Flip("decode-ready-0", "decode", "prefill"),)
    assert sizes(decision) == (4, 3)
    assert of_pool(decision, "prefill").start == 1
    assert of_pool(decision, "decode").drain == ()
    assert steps_of(of_pool(decision, "decode")) == ["stabilization", "flip"]
    assert state.flips == (Flipping("decode-ready-0", "decode", "prefill", NOW),)


def test_flip_on_its_way_is_neither_started_again_nor_missed() -> None:
    policy = make_policy(FREE, PATIENT)
    state = State(
        at=NOW - 5,
        pools={"prefill": PoolState(size=4), "decode": replace(IDLE_DECODE, size=3)},
        flips=(Flipping("decode-draining-0", "decode", "prefill", NOW - 5),),
    )
    seen = make_seen(GROW_PREFILL, {"KVUtilization": 0.4}, ready=(2, 3), starting=(1, 0))
    leaving = make_replicas("decode", 3, draining=1)
    pools = {**seen.pools, "decode": replace(seen.pools["decode"], replicas=leaving)}

    decision, after = decide(policy, replace(seen, pools=pools), state, NOW)
    late, forgotten = decide(policy, replace(seen, pools=pools), state, NOW + 1000)

    assert of_pool(decision, "prefill").start == 0
    assert after.flips == state.flips
    # One that takes longer than a drain and a start is no longer counted on.
    assert of_pool(late, "prefill").start >= 1
    assert forgotten.flips == ()


@pytest.mark.parametrize(
    ("decode", "changes"),
    [
        ({}, {"can_flip": False}),
        ({"acceleratorsPerReplica": 2}, {}),
    ],
)
def test_what_cannot_be_flipped_is_not(decode: Fields, changes: Fields) -> None:
    policy = make_policy(FREE, {**PATIENT, **decode})

    decision = decided(policy, flip_seen(**changes), known(decode=IDLE_DECODE))

    assert decision.flips == ()
    assert of_pool(decision, "prefill").start == 2
    assert of_pool(decision, "decode").desired == 4


def test_pool_idle_for_a_moment_gives_nothing() -> None:
    policy = make_policy(FREE, PATIENT)
    busy_just_now = PoolState(size=4, highs=(Ask(NOW - 20, 4),))

    assert decided(policy, flip_seen(), known(decode=busy_just_now)).flips == ()


def test_victims_of_an_ordinary_shrink_are_flipped_too() -> None:
    policy = make_policy(FREE, FREE)

    decision = decided(policy, flip_seen())

    assert sizes(decision) == (4, 2)
    assert [f.replica_id for f in decision.flips] == ["decode-ready-0", "decode-ready-1"]
    assert [p.start for p in decision.pools] == [0, 0]


ZERO: Fields = {**FREE, "minReplicas": 0, "scaleToZero": {"enabled": True, "idleSeconds": 60}}
NOBODY = Load(0, 0, 0, NOW, 5.0)


@pytest.mark.parametrize(
    ("idle_s", "load", "held", "expected"),
    [
        (60.0, NOBODY, 0, (0, 0)),
        (59.0, NOBODY, 0, (1, 1)),
        (60.0, None, 0, (1, 1)),  # nobody told: no proof that nothing came
        (60.0, replace(NOBODY, measured_at=NOW - 60), 0, (1, 1)),
        (60.0, NOBODY, 1, (1, 1)),
    ],
)
def test_both_pools_go_to_zero(
    idle_s: float, load: Load | None, held: int, expected: tuple[int, int]
) -> None:
    seen = make_seen({"QueuedTokens": 0.0}, {"KVUtilization": 0.0}, ready=(1, 1))
    seen = replace(seen, load=load, idle_s=idle_s, num_held=held)

    assert sizes(decided(make_policy(ZERO, ZERO), seen)) == expected


def test_held_request_brings_both_pools_back() -> None:
    policy = make_policy(ZERO, {**ZERO, "maxReplicas": 4})
    nobody = {name: PoolSeen((), {}) for name in ("prefill", "decode")}
    gone = known(prefill=PoolState(size=0), decode=PoolState(size=0))

    asleep = decided(policy, Observation(nobody, None, idle_s=5.0), gone)
    awake = decided(policy, Observation(nobody, None, num_held=1), gone)

    assert sizes(asleep) == (0, 0)
    assert sizes(awake) == (1, 1)
    assert [p.start for p in awake.pools] == [1, 1]


def test_start_that_takes_too_long_is_cancelled_and_replaced() -> None:
    policy = make_policy({**FREE, "startup": {"failureDeadlineSeconds": 300}}, FREE)
    seen = make_seen({"QueuedTokens": 3000.0}, ready=(2, 2))
    dead = Replica("dead", ReplicaState.STARTING, NOW - 300)
    prefill = replace(seen.pools["prefill"], replicas=(*make_replicas("prefill", 2), dead))
    state = known(prefill=PoolState(size=3), decode=PoolState(size=2))

    pool = of_pool(
        decided(policy, replace(seen, pools={**seen.pools, "prefill": prefill}), state), "prefill"
    )

    assert pool.desired == 3
    assert pool.cancel == ("dead",)
    assert pool.start == 1


def test_dry_run_decides_and_remembers_no_size() -> None:
    policy = make_policy(FREE, FREE, mode="DryRun")

    first, state = decide(policy, make_seen(GROW_PREFILL), State(), NOW)
    again, _ = decide(policy, make_seen(GROW_PREFILL, at=NOW + 5), state, NOW + 5)

    assert not first.is_acted_on
    assert of_pool(first, "prefill").desired == 4
    assert of_pool(again, "prefill").desired == 4
    assert state.pools["prefill"].size is None
    assert state.pools["prefill"].changes == ()


def test_paused_changes_nothing_and_says_what_metrics_want() -> None:
    policy = make_policy(FREE, FREE, mode="Paused")
    dead = Replica("dead", ReplicaState.STARTING, NOW - 9000)
    seen = make_seen(GROW_PREFILL)
    prefill = replace(seen.pools["prefill"], replicas=(*make_replicas("prefill", 2), dead))

    decision = decided(policy, replace(seen, pools={**seen.pools, "prefill": prefill}))

    pool = of_pool(decision, "prefill")
    assert not decision.is_acted_on
    assert (pool.desired, pool.start, pool.cancel, pool.drain) == (2, 0, (), ())
    assert pool.proposals[0].replicas == 4
    assert pool.limited_by == "paused"


def test_each_step_that_changes_a_size_says_so() -> None:
    rules = behavior(
        up={"policies": [{"type": "Pods", "value": 3, "periodSeconds": 60}]}, panic=False
    )
    policy = make_policy({"behavior": rules, "maxReplicas": 4}, FREE, budget={"maxAccelerators": 5})

    pool = of_pool(decided(policy, make_seen({"QueuedTokens": 9000.0})), "prefill")

    assert [(c.step, c.before, c.after) for c in pool.clamps] == [
        ("rate", 9, 5),
        ("bounds", 5, 4),
        ("budget", 4, 3),
    ]
    assert pool.limited_by == "budget"
    assert pool.desired == 3
    assert all(c.reason for c in pool.clamps)


def test_state_of_another_format_is_refused() -> None:
    stored = State().to_json().replace(b'"format":1', b'"format":2')

    with pytest.raises(ValueError, match="format"):
        from_json(stored)


def test_latency_metrics_of_decode_step_too() -> None:
    policy = make_policy(FREE, {**FREE, "metrics": [ITL, KV]})
    seen = make_seen(decode={"ITL": 0.2, "KVUtilization": 0.75}, ready=(2, 4))

    assert of_pool(decided(policy, seen), "decode").desired == 5


def test_starts_that_fail_at_once_are_made_ever_later() -> None:
    policy = make_policy(FREE, FREE)
    state, starts = State(), []
    is_there = False
    for i in range(60):
        at = NOW + 5.0 * i
        seen = make_seen({"QueuedTokens": 3000.0}, ready=(2, 2), at=at)
        # What is asked for shows once, and is gone at the tick after.
        born = (Replica(f"new-{i}", ReplicaState.STARTING, at),) if is_there else ()
        prefill = replace(
            seen.pools["prefill"], replicas=(*make_replicas("prefill", 2, at=at), *born)
        )
        decision, state = decide(
            policy, replace(seen, pools={**seen.pools, "prefill": prefill}), state, at
        )
        is_there = of_pool(decision, "prefill").start > 0
        starts += [5 * i] if is_there else []
        assert of_pool(decision, "prefill").desired == 3

    # 10, 20, 40, 80 s after each was found gone, two ticks after it was asked for.
    assert starts == [0, 20, 50, 100, 190]
    able = next(c for c in decision.conditions if c.type == "AbleToScale")
    assert not able.is_true
    assert "prefill: 5 starts" in able.reason


def test_start_that_came_up_ends_the_waiting() -> None:
    policy = make_policy(FREE, FREE)
    failing = PoolState(size=3, starting=("prefill-ready-1",), failures=4, retry_at=NOW + 100)

    seen = make_seen({"QueuedTokens": 3000.0}, ready=(2, 2))
    decision, _ = decide(policy, seen, known(prefill=failing), NOW)

    assert of_pool(decision, "prefill").start == 1


def with_starting(*ages_s: float, queued: float) -> Observation:
    """Return two of prefill that serve and others that began to start so many seconds ago."""
    seen = make_seen({"QueuedTokens": queued, "TTFT": queued / 5000})
    begun = [Replica(f"young-{i}", ReplicaState.STARTING, NOW - s) for i, s in enumerate(ages_s)]
    prefill = replace(seen.pools["prefill"], replicas=(*make_replicas("prefill", 2), *begun))
    return replace(seen, pools={**seen.pools, "prefill": prefill})


def test_overdue_starts_do_not_count_as_capacity() -> None:
    policy = make_policy(FREE, FREE)
    in_time = decided(policy, with_starting(100, 100, queued=5000.0))
    overdue = decided(policy, with_starting(271, 271, queued=5000.0))

    assert of_pool(in_time, "prefill").desired == 5
    assert of_pool(overdue, "prefill").desired == 7


def test_starts_that_do_not_show_yet_are_waited_for() -> None:
    for ago_s, expected in ((10.0, 4), (271.0, 5)):
        state = known(prefill=PoolState(size=4, changed_at=NOW - ago_s))
        pool = of_pool(decided(latency_policy(), make_seen({"TTFT": 0.6}), state), "prefill")

        assert pool.desired == expected


def test_pool_that_only_starts_is_in_no_panic() -> None:
    policy = make_policy({"behavior": behavior(panic=True)}, FREE)
    seen = make_seen({"QueuedTokens": 2000.0}, ready=(1, 2), starting=(1, 0))

    _, state = decide(policy, seen, known(prefill=PoolState(size=2)), NOW)

    assert state.pools["prefill"].panicked_at is None


def test_youngest_start_is_cancelled_first() -> None:
    pool = of_pool(
        decided(make_policy(FREE, FREE), with_starting(50, 10, 90, queued=4000.0)), "prefill"
    )

    assert pool.cancel == ("young-1",)


def test_newest_replica_leaves_first_where_the_policy_says_so() -> None:
    policy = make_policy({**FREE, "drain": {"victimPolicy": "Newest"}}, FREE)
    seen = make_seen({"QueuedTokens": 2000.0})
    replicas = tuple(
        Replica(name, ReplicaState.READY, NOW - age_s, kv)
        for name, age_s, kv in (("old", 900, 0), ("new", 100, 99), ("mid", 500, 5))
    )
    prefill = replace(seen.pools["prefill"], replicas=replicas)

    decision = decided(policy, replace(seen, pools={**seen.pools, "prefill": prefill}))

    assert of_pool(decision, "prefill").drain == ("new",)


def test_start_that_was_cancelled_is_no_failed_one() -> None:
    pools = {"prefill": PoolState(size=2, starting=("gone",), leaving=("gone",))}
    seen = make_seen({"QueuedTokens": 3000.0})

    assert of_pool(decided(make_policy(FREE, FREE), seen, known(**pools)), "prefill").start == 1


def test_pool_that_grew_within_its_window_gives_nothing() -> None:
    for ago_s, expected in ((299.0, (4, 4)), (301.0, (4, 3))):
        grown = replace(IDLE_DECODE, changes=(Change(NOW - ago_s, 1),))

        decision = decided(make_policy(FREE, PATIENT), flip_seen(), known(decode=grown))

        assert sizes(decision) == expected


def test_pool_that_has_what_it_wants_takes_nothing() -> None:
    seen = make_seen({"QueuedTokens": 4000.0}, {"KVUtilization": 0.3}, ready=(4, 4))
    state = known(prefill=PoolState(size=2), decode=IDLE_DECODE)

    assert sizes(decided(make_policy(FREE, PATIENT), seen, state)) == (4, 4)


def test_dry_run_begins_no_flip() -> None:
    policy = make_policy(FREE, FREE, mode="DryRun")

    decision, state = decide(policy, flip_seen(), State(), NOW)

    assert decision.flips
    assert state.flips == ()


def test_no_zero_on_stale_figures_or_below_the_least_of_accelerators() -> None:
    idle: Fields = {"load": NOBODY, "idle_s": 60.0}
    fresh = make_seen({"QueuedTokens": 0.0}, {"KVUtilization": 0.0}, ready=(1, 1))
    stale = make_seen({"QueuedTokens": 0.0}, {}, ready=(1, 1))
    kept = make_policy(ZERO, ZERO, budget={"minAccelerators": 1})

    assert sizes(decided(make_policy(ZERO, ZERO), replace(stale, **idle))) == (1, 1)
    assert sizes(decided(kept, replace(fresh, **idle))) == (1, 1)


@pytest.mark.parametrize(
    ("prefill", "decode", "cap", "ready", "expected"),
    [
        # The last one taken was larger than what was missing: the rest goes back.
        ({"minReplicas": 3}, {"minReplicas": 3}, 18, (5, 6), (4, 6)),
        # The least of each comes before more than the least of another.
        ({"minReplicas": 1}, {"minReplicas": 5}, 11, (3, 3), (2, 5)),
        ({"minReplicas": 1}, {"minReplicas": 2}, 7, (2, 1), (1, 2)),
        # One pool alone answers nothing.
        ({}, {}, 3, (1, 1), (0, 0)),
    ],
)
def test_budget_below_what_there_is(
    prefill: Fields, decode: Fields, cap: int, ready: tuple[int, int], expected: tuple[int, int]
) -> None:
    pools = ({**FREE, **prefill, "acceleratorsPerReplica": 3}, {**FREE, **decode})
    policy = make_policy(*pools, budget={"maxAccelerators": cap})

    assert sizes(decided(policy, make_seen({}, {}, ready=ready))) == expected
