"""What users of other autoscalers complain of: each is a test that fails without its guard here."""

from __future__ import annotations

from itertools import pairwise

import pytest

from services.autoscaler.decide import decide
from services.autoscaler.observation import Observation, PoolSeen, Reading, Replica, ReplicaState
from services.autoscaler.state import State
from tests.support.autoscaling import (
    ITL,
    KV,
    NOW,
    QUEUED,
    TTFT,
    World,
    behavior,
    make_policy,
    make_replicas,
    make_seen,
    of_pool,
    sizes,
    steps_of,
)

SHORT = {"startup": {"expectedSeconds": 30}}


def test_cold_replicas_do_not_make_the_others_look_weak() -> None:
    """A capacity model poisoned by cold samples: decode pools far larger than needed."""
    policy = make_policy(
        {**SHORT, "maxReplicas": 40}, {**SHORT, "maxReplicas": 40},
        predictive={"mode": "Forecast", "predictor": {"type": "Constant"}, "intervalSeconds": 5,
                    "lookAheadSeconds": 30},
    )  # fmt: skip
    world = World(
        policy, lambda t: 800.0 if t < 300 else 6000.0, lambda t: 800.0, cold_s=25.0,
        seed_sizes=(1, 2),
    ).run(900)  # fmt: skip

    needed = 6.0  # busy all the time; 1.2 times as many leave the headroom asked for
    assert world.desired("prefill")[-1] >= 1.2 * needed
    assert max(world.desired("prefill")) <= 1.5 * needed


def test_replica_that_never_comes_up_stops_no_decision() -> None:
    """A pod that stays pending froze the planner for more than an hour."""
    policy = make_policy(
        {"metrics": [QUEUED, TTFT],
         "startup": {"expectedSeconds": 30, "failureDeadlineSeconds": 120}},
        SHORT,
    )  # fmt: skip
    world = World(
        policy, lambda t: 500.0 if t < 60 else 2500.0, lambda _: 200.0,
        never_comes_up=lambda replica_id: replica_id in ("prefill-new-1", "prefill-new-2"),
    ).run(600)  # fmt: skip

    given_up = [r for d in world.history for r in of_pool(d, "prefill").cancel]
    assert {"prefill-new-1", "prefill-new-2"} <= set(given_up)
    # Four carry the load; others were asked for long before the first two were given up.
    first_up = next(i for i, ready in enumerate(world.ready_history) if ready[0] >= 4)
    assert world.history[first_up].at - NOW <= 60 + 120
    assert world.queued == 0


def test_overdue_replica_is_not_waited_for() -> None:
    """A pod that stays pending froze the planner: a latency asks for one more beside it."""
    policy = make_policy({"metrics": [TTFT], "startup": {"expectedSeconds": 30}})
    seen = make_seen({"TTFT": 0.6}, ready=(2, 2))
    for age_s, expected in ((20.0, 3), (46.0, 4)):
        late = Replica("late", ReplicaState.STARTING, NOW - age_s)
        prefill = PoolSeen((*make_replicas("prefill", 2), late), seen.pools["prefill"].readings)
        pools = {**seen.pools, "prefill": prefill}

        decision, _ = decide(policy, Observation(pools, seen.load), State(), NOW)

        assert of_pool(decision, "prefill").desired == expected


@pytest.mark.parametrize("on_violation", ["RaiseLower", "CapHigher"])
def test_pools_do_not_drift_apart(on_violation: str) -> None:
    """Coupled pools: prefill never scales, and the ratio drifts."""
    ratio = {"mode": "Range", "minPrefillPerDecode": "0.5", "maxPrefillPerDecode": "2",
             "onViolation": on_violation}  # fmt: skip
    policy = make_policy({"behavior": behavior()}, {"behavior": behavior()}, ratio=ratio)
    # Decode alone asks for more: 8 of them for 2 of prefill.
    seen = make_seen(decode={"KVUtilization": 3.0}, ready=(2, 2))

    decision, _ = decide(policy, seen, State(), NOW)

    expected = {"RaiseLower": (4, 8), "CapHigher": (2, 4)}
    assert sizes(decision) == expected[on_violation]
    condition = next(c for c in decision.conditions if c.type == "RatioLimited")
    assert condition.is_true


def zero_pool(**changes: object) -> dict[str, object]:
    """Return what lets a pool have no replica."""
    zero = {"enabled": True, "idleSeconds": 60}
    return {"minReplicas": 0, "scaleToZero": zero, "behavior": behavior(), **changes}


def idle(**changes: object) -> Observation:
    """Return two pools of one that have had nothing to do for long."""
    seen = make_seen({"QueuedTokens": 0.0}, {"KVUtilization": 0.0}, ready=(1, 1), at=NOW)
    fields = {"idle_s": 120.0, "load": None, **changes}
    return Observation(seen.pools, **fields)  # type: ignore[arg-type]  # fields by name


def test_no_pool_goes_to_zero_alone() -> None:
    """One pool at zero while the other runs."""
    policy = make_policy(zero_pool(), zero_pool())
    quiet = make_seen({"QueuedTokens": 0.0}, {"KVUtilization": 0.0}, ready=(1, 1))
    no_load = quiet.load
    assert no_load is not None
    none_came = type(no_load)(0, 0, 0, NOW, 5.0)

    both, _ = decide(policy, idle(load=none_came), State(), NOW)
    # Decode still holds answers of a request that came long ago.
    pools = {
        "prefill": quiet.pools["prefill"],
        "decode": PoolSeen(make_replicas("decode", 2), {"KVUtilization": Reading(0.7, NOW)}),
    }
    one, _ = decide(policy, Observation(pools, none_came, idle_s=120.0), State(), NOW)

    assert sizes(both) == (0, 0)
    assert sizes(one) == (1, 2)


def test_square_waves_do_not_start_and_stop_replicas() -> None:
    """Flapping after a queue drains. RB-106."""
    for period in (20, 30, 60, 90):
        policy = make_policy({**SHORT, "metrics": [QUEUED, TTFT]}, {**SHORT, "metrics": [KV, ITL]})
        world = World(
            policy,
            lambda t, p=period: 3000.0 if int(t) // p % 2 == 0 else 0.0,  # type: ignore[misc]
            lambda t, p=period: 2000.0 if int(t) // p % 2 == 0 else 0.0,  # type: ignore[misc]
        ).run(1200)

        for pool in ("prefill", "decode"):
            steps = [b - a for a, b in pairwise(world.desired(pool)) if a != b]
            turns = sum(1 for a, b in pairwise(steps) if a * b < 0)
            assert turns <= 1200 / 300


def test_drained_queue_is_no_reason_to_shrink() -> None:
    """Flapping after a queue drains: those that work it off are all at work."""
    no_window = behavior(down={"consolidationCheck": {"enabled": True, "headroomPercent": 20}})
    policy = make_policy({**SHORT, "behavior": no_window}, SHORT)
    world = World(policy, lambda _: 2200.0, lambda _: 200.0, seed_sizes=(3, 1)).run(600)

    assert set(world.desired("prefill")[1:]) == {3}
    assert world.queued == 0


def test_idle_pool_shrinks_though_latencies_are_missing() -> None:
    """Slow scale-down: with no requests there are no latencies, and that is known."""
    policy = make_policy({"metrics": [TTFT, QUEUED], "behavior": behavior()})
    busy = make_seen({"QueuedTokens": 0.0}, ready=(3, 2))
    assert busy.load is not None
    none_came = type(busy.load)(0, 0, 0, NOW, 5.0)

    quiet, _ = decide(policy, Observation(busy.pools, none_came, idle_s=60.0), State(), NOW)
    unknown, _ = decide(policy, Observation(busy.pools, busy.load, idle_s=0.0), State(), NOW)

    assert of_pool(quiet, "prefill").desired == 2
    assert of_pool(unknown, "prefill").desired == 3
    assert steps_of(of_pool(unknown, "prefill")) == ["stale"]


def test_load_gone_is_replicas_gone_by_window_and_rate() -> None:
    """Slow scale-down: what is not needed leaves one a minute after the window of 300 s."""
    policy = make_policy({**SHORT, "metrics": [QUEUED, TTFT]}, {**SHORT, "metrics": [KV, ITL]})
    world = World(
        policy, lambda t: 3000.0 if t < 300 else 0.0, lambda t: 2000.0 if t < 300 else 0.0,
        seed_sizes=(4, 4),
    ).run(300 + 300 + 4 * 60 + 30)  # fmt: skip

    assert sizes(world.history[-1]) == (1, 1)


def test_end_of_panic_does_not_undo_what_it_did() -> None:
    """Panic ends, and the plan made in it is undone at once."""
    panicky = behavior(panic=True)
    policy = make_policy({"behavior": panicky}, {"behavior": behavior()})
    state, found = State(), []
    for at, queued, ready in ((0.0, 5000, 2), (5.0, 1000, 5), (30.0, 1000, 5), (70.0, 1000, 5)):
        seen = make_seen({"QueuedTokens": float(queued)}, ready=(ready, 2), at=NOW + at)
        decision, state = decide(policy, seen, state, NOW + at)
        found.append(of_pool(decision, "prefill").desired)

    # 60 s from the last tick that asked for twice what works.
    assert found == [5, 5, 5, 1]


def test_those_that_start_leave_before_those_that_serve() -> None:
    """Running replicas are killed and starting ones kept. RB-104."""
    policy = make_policy({"behavior": behavior()}, {"behavior": behavior()})
    start = make_seen({"QueuedTokens": 6000.0}, ready=(2, 2))
    first, state = decide(policy, start, State(), NOW)
    assert of_pool(first, "prefill").start == 4

    later = make_seen({"QueuedTokens": 2000.0}, ready=(2, 2), starting=(4, 0), at=NOW + 5)
    decision, _ = decide(policy, later, state, NOW + 5)

    pool = of_pool(decision, "prefill")
    assert pool.desired == 2
    assert sorted(pool.cancel) == [f"prefill-starting-{i}" for i in range(4)]
    assert pool.drain == ()


def test_least_kv_leaves_first_and_stays_chosen() -> None:
    """Victims: least KV first, and not another at each tick."""
    policy = make_policy({"behavior": behavior()}, {"behavior": behavior()})

    def seen(held: dict[str, int], at: float) -> Observation:
        replicas = tuple(
            Replica(name, ReplicaState.READY, NOW - 900, kv) for name, kv in held.items()
        )
        decode = PoolSeen(replicas, {"KVUtilization": Reading(0.4, at)})
        return Observation({**make_seen(at=at).pools, "decode": decode}, make_seen(at=at).load)

    first, state = decide(policy, seen({"a": 50, "b": 10, "c": 30}, NOW), State(), NOW)
    # It was not acted on yet, and now another one holds least.
    again, _ = decide(policy, seen({"a": 50, "b": 40, "c": 5}, NOW + 5), state, NOW + 5)

    assert of_pool(first, "decode").drain == ("b",)
    assert of_pool(again, "decode").drain == ("b",)


def test_accelerators_are_counted_by_the_policy() -> None:
    """Accelerators that no resource of a pod tells of: the policy says what a replica takes."""
    policy = make_policy(
        {"behavior": behavior(), "acceleratorsPerReplica": 1},
        {"behavior": behavior(), "acceleratorsPerReplica": 4},
        budget={"maxAccelerators": 14},
    )
    seen = make_seen({"QueuedTokens": 6000.0}, {"KVUtilization": 1.5}, ready=(2, 2))

    decision, _ = decide(policy, seen, State(), NOW)

    prefill, decode = sizes(decision)
    assert (prefill, decode) == (6, 2)
    assert prefill + 4 * decode <= 14
