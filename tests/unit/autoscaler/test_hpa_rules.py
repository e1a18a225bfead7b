"""The rules that are the Kubernetes HPA's, by tables of what it publishes and computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.autoscaler.decide import decide
from services.autoscaler.policy import PolicySpec
from services.autoscaler.state import Change, PoolState, State
from tests.support.autoscaling import NOW, behavior, make_policy, make_seen, of_pool, steps_of

BACKLOG = "backlog_bytes"


def decode_policy(
    kind: str, amount: object, rules: dict[str, Any] | None = None, **changes: Any
) -> PolicySpec:
    """Return a policy whose decode pool follows one metric."""
    field = {"Value": "value", "AverageValue": "averageValue", "Utilization": "averageUtilization"}
    metric: dict[str, Any] = {
        "type": "KVUtilization",
        "target": {"type": kind, field[kind]: amount},
    }
    if kind != "Utilization":
        metric |= {"type": "External", "external": {"metric": {"name": BACKLOG}}}
    pool = {"metrics": [metric], "behavior": rules or behavior(), "maxReplicas": 1000, **changes}
    return make_policy(decode=pool)


def desired(policy: PolicySpec, value: float, ready: int, starting: int = 0) -> int:
    """Return the size of the decode pool after one tick."""
    figures = {BACKLOG: value, "KVUtilization": value}
    seen = make_seen(decode=figures, ready=(2, ready), starting=(0, starting))
    decision, _ = decide(policy, seen, State(), NOW)
    return of_pool(decision, "decode").desired


@pytest.mark.parametrize(
    ("kind", "target", "value", "ready", "starting", "expected"),
    [
        # A mean over replicas: ceil(replicas x value / target).
        ("Utilization", 30, 0.5, 3, 0, 5),
        ("Utilization", 50, 0.28, 5, 0, 3),
        ("Utilization", 100, 2.0, 1, 0, 2),
        ("Utilization", 100, 0.5, 4, 0, 2),
        # Within the tolerance, to its very edge.
        ("Utilization", 100, 1.05, 3, 0, 3),
        ("Utilization", 100, 1.051, 3, 0, 4),
        ("Utilization", 100, 0.90, 20, 0, 20),
        ("Utilization", 100, 0.89, 20, 0, 18),
        # Those that start count as if they had nothing to do.
        ("Utilization", 30, 0.6, 2, 1, 4),
        ("Utilization", 40, 0.4, 1, 2, 3),
        ("Utilization", 50, 0.7, 2, 1, 3),
        ("Utilization", 50, 0.6, 1, 3, 4),
        # A figure of the pool as a whole.
        ("Value", "4400", 8600, 1, 0, 2),
        ("Value", "14334", 8600, 5, 0, 3),
        ("Value", "8888", 8600, 3, 0, 3),
        # A total, against so much for each.
        ("AverageValue", "2150", 8600, 3, 0, 4),
        ("AverageValue", "2867", 8600, 5, 0, 3),
        ("AverageValue", "2867", 8600, 3, 0, 3),
        ("AverageValue", "100m", 0.6, 1, 0, 6),
    ],
)
def test_proposals(
    kind: str, target: object, value: float, ready: int, starting: int, expected: int
) -> None:
    assert desired(decode_policy(kind, target), value, ready, starting) == expected


def test_tolerances_of_a_pool_replace_the_defaults() -> None:
    tolerant = decode_policy("Utilization", 100, tolerance={"scaleUp": "0.5", "scaleDown": "0.5"})

    assert desired(tolerant, 1.5, 4) == 4
    assert desired(tolerant, 1.6, 4) == 7
    assert desired(tolerant, 0.5, 4) == 4
    assert desired(tolerant, 0.4, 4) == 2


def test_largest_of_several_metrics_wins() -> None:
    metrics = [
        {"type": "KVUtilization", "target": {"type": "Utilization", "averageUtilization": 50}},
        {"type": "External", "external": {"metric": {"name": BACKLOG}},
         "target": {"type": "AverageValue", "averageValue": "10"}},
    ]  # fmt: skip
    policy = make_policy(decode={"metrics": metrics, "behavior": behavior()})

    seen = make_seen(decode={"KVUtilization": 0.25, BACKLOG: 65.0}, ready=(2, 2))
    decision, _ = decide(policy, seen, State(), NOW)

    pool = of_pool(decision, "decode")
    assert [(p.metric, p.replicas) for p in pool.proposals] == [("KVUtilization", 1), (BACKLOG, 7)]
    assert pool.desired == 7


def limited(
    rules: dict[str, Any], size: int, changes: dict[float, int], wanted: int
) -> tuple[int, list[str]]:
    """Return the size after a tick in which metrics want `wanted`, and the steps that changed it.

    `changes` are earlier ones by how many seconds ago they were.
    """
    past = tuple(Change(NOW - ago, delta) for ago, delta in sorted(changes.items(), reverse=True))
    state = State(at=NOW - 5, pools={"decode": PoolState(size=size, changes=past)})
    policy = decode_policy("AverageValue", "1", rules, minReplicas=1)
    seen = make_seen(decode={BACKLOG: float(wanted)}, ready=(2, size))
    pool = of_pool(decide(policy, seen, state, NOW)[0], "decode")
    return pool.desired, steps_of(pool)


def rates(select: str, *policies: tuple[str, int, int]) -> dict[str, Any]:
    """Return one direction's rules without a stabilisation window."""
    listed = [{"type": t, "value": v, "periodSeconds": s} for t, v, s in policies]
    return {"stabilizationWindowSeconds": 0, "selectPolicy": select, "policies": listed}


@pytest.mark.parametrize(
    ("select", "policies", "size", "changes", "wanted", "expected"),
    [
        ("Max", [("Pods", 4, 15), ("Percent", 100, 15)], 1, {}, 100, 5),
        ("Max", [("Pods", 4, 15), ("Percent", 100, 15)], 10, {}, 100, 20),
        ("Min", [("Pods", 4, 15), ("Percent", 100, 15)], 10, {}, 100, 14),
        ("Disabled", [("Pods", 4, 15)], 10, {}, 100, 10),
        ("Max", [("Pods", 4, 60)], 10, {}, 12, 12),
        # What was added in the period counts against it; what was before it does not.
        ("Max", [("Pods", 4, 60)], 10, {30: 3}, 100, 11),
        ("Max", [("Pods", 4, 60)], 10, {61: 3}, 100, 14),
        ("Max", [("Pods", 4, 60)], 10, {60: 3}, 100, 14),
        ("Max", [("Percent", 100, 60)], 10, {30: 4}, 100, 12),
        ("Max", [("Percent", 10, 60)], 15, {}, 100, 17),  # 16.5, rounded up
        # What was taken away in the period may come back.
        ("Max", [("Pods", 4, 60)], 10, {30: -3}, 100, 17),
        # More was added than is allowed now: nothing more, and nothing is taken back.
        ("Max", [("Pods", 2, 60)], 10, {30: 6}, 100, 10),
        # Each policy has its own period.
        ("Max", [("Pods", 1, 15), ("Percent", 50, 120)], 10, {100: 4}, 100, 11),
    ],
)
def test_growth_rates(
    select: str, policies: list[tuple[str, int, int]], size: int, changes: dict[float, int],
    wanted: int, expected: int,
) -> None:  # fmt: skip
    rules = behavior(up=rates(select, *policies))

    assert limited(rules, size, changes, wanted)[0] == expected


@pytest.mark.parametrize(
    ("select", "policies", "size", "changes", "expected"),
    [
        # The example of the documentation: 80 replicas, 10 % or 4 a minute, whichever is more.
        ("Max", [("Pods", 4, 60), ("Percent", 10, 60)], 80, {}, 72),
        ("Max", [("Pods", 4, 60), ("Percent", 10, 60)], 72, {60: -8}, 64),  # 7.2 is 8
        ("Max", [("Pods", 4, 60), ("Percent", 10, 60)], 40, {}, 36),
        ("Max", [("Pods", 4, 60), ("Percent", 10, 60)], 37, {}, 33),
        ("Min", [("Pods", 4, 60), ("Percent", 10, 60)], 80, {}, 76),
        ("Max", [("Percent", 100, 15)], 80, {}, 1),
        ("Disabled", [("Percent", 100, 15)], 80, {}, 80),
        ("Max", [("Pods", 4, 60)], 76, {30: -4}, 76),
        ("Max", [("Pods", 4, 60)], 76, {30: -1}, 73),
        ("Max", [("Pods", 4, 60)], 20, {30: 5}, 11),
        ("Max", [("Percent", 50, 60)], 10, {30: -10}, 10),
        ("Max", [("Percent", 50, 60)], 15, {30: -5}, 10),
    ],
)
def test_shrink_rates(
    select: str, policies: list[tuple[str, int, int]], size: int, changes: dict[float, int],
    expected: int,
) -> None:  # fmt: skip
    rules = behavior(down=rates(select, *policies))

    assert limited(rules, size, changes, 0)[0] == expected


def walk(rules: dict[str, Any], size: int, asks: list[tuple[float, int]]) -> list[int]:
    """Return the sizes decided at ticks (seconds, what metrics ask for)."""
    policy = decode_policy("AverageValue", "1", rules)
    state, found = State(), []
    for at, ask in asks:
        seen = make_seen(decode={BACKLOG: float(ask)}, ready=(2, size), at=NOW + at)
        decision, state = decide(policy, seen, state, NOW + at)
        size = of_pool(decision, "decode").desired
        found.append(size)
    return found


def test_shrinking_takes_the_largest_ask_of_its_window() -> None:
    rules = behavior(down={"stabilizationWindowSeconds": 300})
    asks = [(0.0, 10), (60.0, 4), (120.0, 6), (299.0, 3), (300.0, 3), (360.0, 3), (419.0, 3),
            (420.0, 3)]  # fmt: skip

    # 10 is out of the window at 300, 4 is less than the 6 after it, which leaves at 420.
    assert walk(rules, 10, asks) == [10, 10, 10, 10, 6, 6, 6, 3]


def test_growing_takes_the_smallest_ask_of_its_window() -> None:
    rules = behavior(up={"stabilizationWindowSeconds": 60})
    asks = [(0.0, 2), (15.0, 8), (30.0, 5), (59.0, 9), (60.0, 9), (90.0, 9), (119.0, 12),
            (120.0, 12)]  # fmt: skip

    assert walk(rules, 2, asks) == [2, 2, 2, 2, 5, 9, 9, 9]


def test_first_tick_of_all_does_not_shrink_at_once() -> None:
    rules = behavior(down={"stabilizationWindowSeconds": 300})

    assert walk(rules, 10, [(0.0, 1), (299.0, 1), (300.0, 1)]) == [10, 10, 1]


def test_windows_go_on_after_a_restart() -> None:
    policy = decode_policy("AverageValue", "1", behavior(down={"stabilizationWindowSeconds": 300}))
    busy = make_seen(decode={BACKLOG: 10.0}, ready=(2, 10))
    _, state = decide(policy, busy, State(), NOW)
    calm = make_seen(decode={BACKLOG: 1.0}, ready=(2, 10), at=NOW + 200)

    kept, _ = decide(policy, calm, replace(state), NOW + 200)

    assert of_pool(kept, "decode").desired == 10
    assert steps_of(of_pool(kept, "decode")) == ["stabilization"]
