"""Admission in virtual time: who starts, waits or is refused, by the router's own rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from services.router.admission import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, AdmissionConfig
from services.router.policy import PolicyConfig
from services.sim.cluster import PREFILL, ClusterSpec
from services.sim.controller import Observation, Orders, PoolState
from services.sim.performance import default_model
from services.sim.placement import OURS, TWO_CHOICES
from services.sim.report import OK, REFUSED, SimReport
from services.sim.simulate import simulate
from services.sim.synthetic import PlainLoad, plain_workload
from services.sim.workload import Workload
from services.sim.world import World

SLO = AdmissionConfig(slo_ttft_s=2.0)
CLUSTER = ClusterSpec(1, 4, admission=SLO)  # the prefill worker computes about 18,000 tokens/s


def load(rate: float, num_requests: int = 300) -> Workload:
    """Draw prompts of 2,000 tokens: nine a second are what a prefill worker can do."""
    return plain_workload(PlainLoad(2000, 50, rate), num_requests, seed=3)


def run(workload: Workload, spec: ClusterSpec = CLUSTER) -> SimReport:
    """Run a world to its end and check what must hold of every one."""
    world = World(workload, spec, OURS, PolicyConfig())
    world.run()
    world.check_integrity()
    return world.report()


def test_what_would_come_too_late_is_refused_and_what_is_let_in_is_in_time() -> None:
    report, flooded = run(load(30.0)), run(load(30.0), replace(CLUSTER, admission=None))
    assert flooded.attainment(2.0) < 0.5
    assert flooded.refused_share == 0
    refused = [r for r in report.requests if r.status == REFUSED]
    assert 0.3 < report.refused_share == len(refused) / 300 < 0.75
    in_time = [r for r in report.answered if r.ttft_s is not None and r.ttft_s <= 2.0]
    assert len(in_time) >= 0.98 * len(report.answered)
    assert report.attainment(2.0) > flooded.attainment(2.0) + 0.1
    assert {r.reason for r in refused} <= {"ttft_slo", "late"}
    for served in refused:
        assert served.retry_after_s is not None
        assert MIN_RETRY_AFTER_S <= served.retry_after_s <= MAX_RETRY_AFTER_S
        assert served.ttft_s is None


def test_nothing_is_refused_or_delayed_where_there_is_room() -> None:
    report, plain = run(load(3.0)), run(load(3.0), replace(CLUSTER, admission=None))
    assert [r.ttft_s for r in report.requests] == [r.ttft_s for r in plain.requests]
    assert {(r.status, r.reason) for r in report.requests} == {(OK, "")}


def test_a_queue_without_an_slo_keeps_everything_and_loses_no_work() -> None:
    """Who waits in the router costs the workers nothing."""
    patient = replace(CLUSTER, admission=AdmissionConfig())
    report, plain = run(load(30.0), patient), run(load(30.0), replace(CLUSTER, admission=None))
    assert report.refused_share == 0
    assert report.duration_s == pytest.approx(plain.duration_s, rel=0.05)


def test_a_full_queue_refuses() -> None:
    narrow = replace(CLUSTER, admission=AdmissionConfig(max_queued=3))
    report = run(load(30.0), narrow)
    reasons = Counter(r.reason for r in report.requests)
    assert set(reasons) == {"", "queue_full"}
    assert reasons["queue_full"] > 100


def test_who_has_priority_waits_less() -> None:
    mixed = load(20.0)
    arrivals = tuple(replace(a, priority=i % 2) for i, a in enumerate(mixed.arrivals))
    report = run(replace(mixed, arrivals=arrivals))
    by_priority = [[r for r in report.requests if r.number % 2 == i] for i in range(2)]
    refused = [sum(r.status == REFUSED for r in requests) for requests in by_priority]
    assert refused[1] < 0.5 * refused[0]


def test_tenants_share_and_a_flood_refuses_itself() -> None:
    flood = load(30.0)
    arrivals = tuple(
        replace(a, tenant="quiet" if i % 10 == 0 else "loud") for i, a in enumerate(flood.arrivals)
    )
    report = run(replace(flood, arrivals=arrivals))
    refused = Counter(
        "quiet" if r.number % 10 == 0 else "loud" for r in report.requests if r.status == REFUSED
    )
    assert refused["quiet"] == 0
    assert refused["loud"] > 90


class Watcher:
    """Wants nothing, and keeps what it sees of queues."""

    tick_s = 0.5

    def __init__(self) -> None:
        self.queued: list[tuple[int, PoolState]] = []

    def orders(self, seen: Observation) -> Orders:
        """Look only."""
        self.queued.append((seen.num_queued, seen.pools[PREFILL]))
        return Orders()


def test_a_controller_sees_what_waits_in_routers() -> None:
    watcher = Watcher()
    simulate(load(30.0), CLUSTER, controller=watcher)
    assert max(num for num, _ in watcher.queued) > 5
    for num, pool in watcher.queued:
        assert pool.queued_tokens >= 2000 * num
        assert pool.num_waiting >= num


def test_equal_seeds_give_equal_refusals_whatever_the_number_of_routers() -> None:
    spec = replace(CLUSTER, num_routers=3)
    reports = [run(load(30.0), spec) for _ in range(2)]
    assert reports[0].requests == reports[1].requests
    assert 0.3 < reports[0].refused_share < 0.8


def test_a_prompt_that_no_worker_can_hold_says_so() -> None:
    tiny = default_model().model_copy(update={"kv_blocks": 100})
    report = run(load(3.0, 2), replace(CLUSTER, model=tiny))
    assert {(r.status, r.reason, r.retry_after_s) for r in report.requests} == {
        (REFUSED, "too_large", None)
    }


def test_other_policies_have_no_admission() -> None:
    with pytest.raises(ValueError, match="admission goes with"):
        simulate(load(3.0, 2), CLUSTER, policy=TWO_CHOICES)
