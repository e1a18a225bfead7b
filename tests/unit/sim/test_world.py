"""The real decisions in virtual time, on a slice of a real trace and on small groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.bench.policy import simulate
from services.router.policy import PolicyConfig
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
    computed = sum(worker.work_tokens for worker in world.prefill.values())
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
