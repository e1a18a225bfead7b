"""The real decisions in virtual time, on a slice of a real trace and on small groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.kv.layout import BLOCK_TOKENS
from services.router.policy import LOCAL, REMOTE, STAY, PolicyConfig
from services.sim.cluster import AGGREGATED, DECODE, ClusterSpec, Group
from services.sim.groups import GroupLoad, group_workload
from services.sim.mooncake import read_trace
from services.sim.performance import (
    DecodePace,
    Network,
    PerformanceModel,
    PrefillPace,
    default_model,
)
from services.sim.placement import AFFINITY, OURS, PLAIN_COST, POLICIES, RANDOM, ROUND_ROBIN
from services.sim.report import OK, REFUSED, SimReport
from services.sim.simulate import simulate
from services.sim.workers import Worker
from services.sim.workload import Arrival, Workload, ideal_hit
from services.sim.world import World

SLICE = Path(__file__).parents[2] / "data" / "mooncake_conversation_first_120.jsonl.gz"
GROUPS = GroupLoad(10.0, 300, num_groups=20, num_users=3)


@pytest.fixture(scope="module")
def trace() -> Workload:
    """A slice of the conversation trace."""
    return read_trace(SLICE)


def model(cache_tokens: int, token_s: float = 5e-5) -> PerformanceModel:
    """Change the default model."""
    pace = default_model().prefill.model_copy(update={"token_s": token_s})
    return default_model().model_copy(
        update={"prefill": pace, "kv_blocks": cache_tokens // BLOCK_TOKENS}
    )


def workers_of(world: World) -> list[Worker]:
    """Return all there ever were."""
    return [member.worker for member in world.fleet.members]


def finished(workload: Workload, spec: ClusterSpec, policy: str, seed: int = 0) -> World:
    """Run a world to its end and check what must hold of every one."""
    world = World(workload, spec, policy, PolicyConfig(), seed)
    world.run()
    assert [r.number for r in sorted(world.requests, key=lambda r: r.number)] == list(
        range(len(workload.arrivals))
    )
    world.check_integrity()
    return world


@pytest.mark.parametrize("policy", POLICIES)
def test_every_prompt_is_computed_once_and_nothing_stays_reserved(
    trace: Workload, policy: str
) -> None:
    world = finished(trace, ClusterSpec(num_prefill=3, num_decode=2, num_routers=2), policy)
    computed = sum(worker.work_tokens for worker in workers_of(world))
    owed = sum(r.facts.num_tokens - r.cached_tokens for r in world.requests)
    assert computed == owed
    hits = sum(r.cached_units for r in world.requests)
    total = sum(len(r.arrival.units) for r in world.requests)
    assert 0 < hits <= ideal_hit(trace) * total


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_decides_everything(trace: Workload, policy: str) -> None:
    spec = ClusterSpec(num_prefill=3, num_decode=2, num_routers=2)
    runs = [finished(trace, spec, policy, seed=3) for _ in range(2)]
    told = [[(r.number, r.prefill_slot, r.first_token_at) for r in run.requests] for run in runs]
    assert told[0] == told[1]


def test_lost_hints_are_told_again_and_late_ones_cost_little(trace: Workload) -> None:
    """A gap in a worker's publishes makes it join anew and tell all it holds."""
    hits = {}
    for loss, lag_s in ((0.0, 0.01), (0.3, 0.01), (0.0, 5.0)):
        spec = ClusterSpec(num_prefill=3, num_decode=2, hint_loss=loss, hint_lag_s=lag_s)
        world = finished(trace, spec, OURS)
        assert (world.fleet.num_resyncs > 0) == (loss > 0)
        hits[loss, lag_s] = sum(r.cached_units for r in world.requests)
    assert min(hits.values()) > 0.9 * max(hits.values())


def test_prompts_go_where_the_argmin_of_all_modes_says() -> None:
    """Whose prompt a decode worker holds but for little needs no prefill worker."""
    load = GroupLoad(2.0, 200, num_groups=4, num_users=2)
    world = finished(group_workload(load, 0), ClusterSpec(2, 2, model=model(2000 * 64)), OURS)
    modes = {r.mode for r in world.requests}
    assert {REMOTE, LOCAL} <= modes
    for request in world.requests:
        assert request.prefill_worker.startswith(DECODE) == (request.mode == LOCAL)


def test_one_worker_finds_the_ideal_hit_where_nothing_is_evicted(trace: Workload) -> None:
    world = finished(trace, ClusterSpec(num_prefill=1, model=model(100_000 * 512)), AFFINITY)
    hits = sum(r.cached_units for r in world.requests)
    assert hits == round(ideal_hit(trace) * sum(len(r.arrival.units) for r in world.requests))


def test_shared_state_keeps_prefixes_together_whatever_the_number_of_routers() -> None:
    workload = group_workload(GROUPS, seed=0)
    hits = {
        (policy, routers): simulate(
            workload,
            ClusterSpec(4, 2, num_routers=routers, model=model(1200 * 64, token_s=1 / 9000)),
            policy=policy,
        )
        .skip(1 / 3)
        .token_hit
        for policy, routers in ((OURS, 1), (OURS, 8), (PLAIN_COST, 8), (RANDOM, 8))
    }
    assert hits[OURS, 1] > 0.97
    assert hits[OURS, 8] > 0.97
    assert hits[OURS, 8] >= hits[PLAIN_COST, 8] > hits[RANDOM, 8]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_pool_does_both_and_hands_nothing_off(trace: Workload, policy: str) -> None:
    world = finished(trace, ClusterSpec(num_aggregated=5), policy)
    report = world.report()
    assert {r.mode for r in report.requests} == {STAY}
    assert all(r.decode_worker in (r.prefill_worker, "") for r in report.requests)
    assert (set(report.pools), report.handoff_bytes) == ({AGGREGATED}, 0)
    use = report.pools[AGGREGATED]
    assert use.provisioned_s == 5 * report.duration_s
    assert min(use.prefill_busy_s, use.decode_busy_s) > 0
    assert use.busy_s <= use.provisioned_s


def alone(spec: ClusterSpec, *arrivals: Arrival) -> SimReport:
    """Run a few prompts that share nothing."""
    world = finished(Workload("few", 512, arrivals), spec, RANDOM)
    return world.report()


def test_one_request_takes_what_the_model_says() -> None:
    kind = PerformanceModel(
        format=1, name="k", source="test",
        prefill=PrefillPace(fixed_s=0.1, token_s=1e-3, context_s=1e-6),
        decode=DecodePace(fixed_s=0.01, request_s=0.002, token_s=1e-5),
        chunk_tokens=512, kv_blocks=1000, startup_s=0,
        network=Network(token_bytes=1000, bytes_s=1e6, latency_s=0.5),
    )  # fmt: skip
    (served,) = alone(ClusterSpec(1, 1, model=kind), Arrival(0.0, 1024, 11, (1, 2))).requests
    prefill_s = 0.1 + 1024 * (1e-3 + 1e-6 * 512)
    assert served.ttft_s == pytest.approx(prefill_s)
    # Half of the KV crosses only when the prefill is over, and the line is free before that.
    handoff_s = 512 * 1000 / 1e6 + 0.5
    step_s = 0.01 + 0.002 + 1e-5 * (1024 + 11)
    assert served.tpot_s == pytest.approx((handoff_s + 10 * step_s) / 10)


def test_answers_beyond_the_batch_and_kv_beyond_the_pool_wait() -> None:
    kind = default_model()
    pair = [Arrival(0.0, 512, 101, (1,)), Arrival(0.0, 512, 101, (2,))]
    ends = {}
    for name, batch, blocks in (("free", 2, 1000), ("batch", 1, 1000), ("kv", 2, 40)):
        pace = kind.decode.model_copy(update={"max_batch": batch})
        narrow = kind.model_copy(update={"decode": pace, "kv_blocks": blocks})
        ends[name] = [
            r.e2e_s or 0.0 for r in alone(ClusterSpec(1, 1, model=narrow), *pair).requests
        ]
    assert max(ends["free"]) < 1.5
    for name in ("batch", "kv"):
        assert max(ends[name]) > min(ends[name]) + 1.2


def test_what_no_worker_can_hold_is_refused_and_counts_as_missed() -> None:
    tiny = model(1024)
    fits, does_not = Arrival(0.0, 512, 10, (1,)), Arrival(0.0, 1024, 10, (2, 3))
    for spec in (ClusterSpec(1, 1, model=tiny), ClusterSpec(num_aggregated=1, model=tiny)):
        report = alone(spec, fits, does_not)
        assert [r.status for r in report.requests] == [OK, REFUSED]
        assert (report.attainment(), report.requests[1].ttft_s) == (0.5, None)


def test_a_line_carries_one_handoff_after_the_other() -> None:
    slow = Network(token_bytes=1000, bytes_s=1e6)
    kind = default_model().model_copy(update={"network": slow})
    spec = ClusterSpec(2, 1, model=kind)
    together = [Arrival(0.0, 1024, 2, (1, 2)), Arrival(0.0, 1024, 2, (3, 4))]
    report = simulate(Workload("few", 512, tuple(together)), spec, policy=ROUND_ROBIN)
    gaps = sorted(r.tpot_s or 0.0 for r in report.requests)
    assert gaps[0] == pytest.approx(1.024, abs=0.05)
    assert gaps[1] == pytest.approx(2.048, abs=0.05)
    assert report.handoff_bytes == 2 * 1024 * 1000
    assert report.handoff_wait_s == pytest.approx(1.024, abs=0.06)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_prefill": 0},
        {"num_prefill": -1},
        {"num_prefill": 0, "num_decode": 0},
        {"num_aggregated": 2, "groups": (Group(DECODE, 1, default_model()),)},
        {"num_routers": 0},
    ],
)
def test_an_impossible_cluster_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"worker|router"):
        ClusterSpec(**bad)
