"""The real decisions in virtual time, on a slice of a real trace and on small groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.bench.policy import simulate
from services.router.policy import LOCAL, REMOTE, PolicyConfig
from services.sim.groups import GroupLoad, group_workload
from services.sim.mooncake import read_trace
from services.sim.placement import AFFINITY, OURS, PLAIN_COST, POLICIES, RANDOM
from services.sim.workload import Workload, ideal_hit
from services.sim.world import ClusterSpec, World

SLICE = Path(__file__).parents[2] / "data" / "mooncake_conversation_first_120.jsonl.gz"
GROUPS = GroupLoad(10.0, 300, num_groups=20, num_users=3)


@pytest.fixture(scope="module")
def trace() -> Workload:
    """A slice of the conversation trace."""
    return read_trace(SLICE)


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
    workers = (*world.prefill.values(), *world.decode.values())
    computed = sum(worker.work_tokens for worker in workers)
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
        assert (world.num_resyncs > 0) == (loss > 0)
        hits[loss, lag_s] = sum(r.cached_units for r in world.requests)
    assert min(hits.values()) > 0.9 * max(hits.values())


def test_prompts_go_where_the_argmin_of_all_modes_says() -> None:
    """Whose prompt a decode worker holds but for little needs no prefill worker."""
    load = GroupLoad(2.0, 200, num_groups=4, num_users=2)
    world = finished(group_workload(load, 0), ClusterSpec(2, 2, cache_units=2000), OURS)
    modes = {r.mode for r in world.requests}
    assert {REMOTE, LOCAL} <= modes
    for request in world.requests:
        assert (request.prefill_slot in world.decode) == (request.mode == LOCAL)


def test_one_worker_finds_the_ideal_hit_where_nothing_is_evicted(trace: Workload) -> None:
    world = finished(trace, ClusterSpec(num_prefill=1, cache_units=100_000), AFFINITY)
    hits = sum(r.cached_units for r in world.requests)
    assert hits == round(ideal_hit(trace) * sum(len(r.arrival.units) for r in world.requests))


def test_shared_state_keeps_prefixes_together_whatever_the_number_of_routers() -> None:
    workload = group_workload(GROUPS, seed=0)
    hits = {
        (policy, routers): simulate(
            workload,
            ClusterSpec(4, 2, routers, cache_units=1200, prefill_tok_s=9000.0),
            policy,
            seed=0,
            warm_up=1 / 3,
        ).token_hit
        for policy, routers in ((OURS, 1), (OURS, 8), (PLAIN_COST, 8), (RANDOM, 8))
    }
    assert hits[OURS, 1] > 0.97
    assert hits[OURS, 8] > 0.97
    assert hits[OURS, 8] >= hits[PLAIN_COST, 8] > hits[RANDOM, 8]
