"""Simulated pools under the autoscaler's own decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.autoscaler.capacity import tokens_per_second
from services.autoscaler.observation import ReplicaState
from services.autoscaler.policy import PoolAutoscalingPolicy
from services.autoscaler.policy_file import parse_policy
from services.router.policy import PolicyConfig
from services.sim.autoscaling.decided import WINDOW_S, DecidedPools
from services.sim.autoscaling.profile import Profile
from services.sim.cluster import DECODE, PREFILL, ClusterSpec
from services.sim.controller import Observation, PoolState, WorkerState
from services.sim.performance import default_model, shipped_model
from services.sim.placement import OURS
from services.sim.report import OK, Served
from services.sim.varying import Step, VaryingLoad, varying_workload
from services.sim.world import World

MODEL = default_model().model_copy(update={"startup_s": 5.0})


def policy(mode: str = "Auto") -> PoolAutoscalingPolicy:
    """Make one for both pools."""
    pool: dict[str, Any] = {
        "minReplicas": 1,
        "maxReplicas": 6,
        "startup": {"expectedSeconds": 5, "warmUpSeconds": 0},
        "behavior": {
            "scaleDown": {
                "stabilizationWindowSeconds": 20,
                "policies": [{"type": "Pods", "value": 4, "periodSeconds": 10}],
            }
        },
    }
    queue = {
        "type": "QueuedTokens",
        "target": {"type": "AverageValue", "averageValue": "10000"},
    }
    kv = {"type": "KVUtilization", "target": {"type": "Utilization", "averageUtilization": 80}}
    document = {
        "apiVersion": "autoscaling.isthmus.dev/v1alpha1",
        "kind": "PoolAutoscalingPolicy",
        "metadata": {"name": "test"},
        "spec": {
            "clusterRef": {"name": "test"},
            "mode": mode,
            "slo": {
                "ttft": {"percentile": "p90", "targetMilliseconds": 2000},
                "itl": {"percentile": "p50", "targetMilliseconds": 40},
            },
            "pools": [
                {"name": "prompts", "role": "Prefill", "metrics": [queue], **pool},
                {"name": "answers", "role": "Decode", "metrics": [kv], **pool},
            ],
        },
    }
    return parse_policy(document, "test")


def worker(name: str, **changes: Any) -> WorkerState:
    """Describe a worker that has been there from the beginning."""
    plain = WorkerState(name, "live", 0.0, 1000, 0, 0, 0, 0.01, 0, 0.0, 0.0, 0.0)
    return replace(plain, **changes)


def pool(*workers: WorkerState, queued_tokens: int = 0) -> PoolState:
    """Describe a pool."""
    live = [w for w in workers if w.state == "live"]
    room = sum(w.kv_tokens for w in live)
    return PoolState(len(live), 0, 0, queued_tokens, 0, 0, 0, room, workers)


def seen(now: float, prefill: PoolState, decode: PoolState, **more: Any) -> Observation:
    """Describe a moment."""
    known: dict[str, Any] = {"num_arrived": 0, "ended": ()} | more
    return Observation(now, {PREFILL: prefill, DECODE: decode}, **known)


def test_measures_as_signals_do() -> None:
    decided = DecidedPools(policy(), Profile(MODEL))
    decided.observe(seen(0.0, pool(worker("p")), pool(worker("d"))))
    prefill = pool(
        worker("p", prompt_tokens=500, prefill_busy_s=0.5, held_tokens=10),
        worker("q", state="starting", since=4.0),
        queued_tokens=77,
    )
    decode = pool(
        worker("d", num_answers=3, step_s=0.02, output_tokens=30.0,
               decode_busy_s=2.0, held_tokens=200),
        worker("e", num_answers=1, step_s=0.05, coming_tokens=300),
    )  # fmt: skip
    ended = Served(0, 1.0, 600, 50, OK, ttft_s=1.0)
    told = decided.observe(
        seen(5.0, prefill, decode, num_arrived=4, arrived_tokens=2400, ended=(ended,),
             ttfts_s=tuple(i / 10 for i in range(1, 11)))
    )  # fmt: skip
    assert told.load is not None
    assert (told.load.num_requests, told.load.prompt_tokens) == (4, 2400)
    assert told.load.output_tokens == 4 * 50  # as long as answers were
    assert told.load.span_s == 5.0
    prompts, answers = told.pools["prompts"], told.pools["answers"]
    assert prompts.readings["TTFT"].value == pytest.approx(0.9)  # p90
    assert prompts.readings["QueuedTokens"].value == 77
    assert (prompts.work_tokens, prompts.busy_s) == (500, 0.5)
    states = [(r.replica_id, r.state, r.kv_tokens_used) for r in prompts.replicas]
    assert states == [("p", ReplicaState.READY, 10), ("q", ReplicaState.STARTING, 0)]
    assert answers.readings["ITL"].value == 0.02  # p50 over answers, not workers
    assert answers.readings["KVUtilization"].value == pytest.approx(500 / 2000)
    assert (answers.work_tokens, answers.busy_s) == (30, 2.0)
    assert prompts.profile_tokens_s == Profile(MODEL).prefill_tokens_s(600)
    assert answers.profile_tokens_s == Profile(MODEL).decode_tokens_s(0.04, 625)


def test_old_first_tokens_are_forgotten_and_young_workers_left_out() -> None:
    decided = DecidedPools(policy(), Profile(MODEL))
    decided.observe(seen(1.0, pool(worker("p")), pool(worker("d")), ttfts_s=(0.5,)))
    later = decided.observe(seen(WINDOW_S, pool(worker("p")), pool(worker("d"))))
    assert later.pools["prompts"].readings["TTFT"].measured_at == 1.0
    latest = decided.observe(seen(WINDOW_S + 1.0, pool(worker("p")), pool(worker("d"))))
    assert "TTFT" not in latest.pools["prompts"].readings
    assert "ITL" not in latest.pools["answers"].readings
    cold = policy().model_copy(deep=True)
    startup = cold.spec.pools[0].startup.model_copy(update={"warm_up_seconds": 30})
    pools = (cold.spec.pools[0].model_copy(update={"startup": startup}), cold.spec.pools[1])
    cold = cold.model_copy(update={"spec": cold.spec.model_copy(update={"pools": pools})})
    decided = DecidedPools(cold, Profile(MODEL))
    young = pool(worker("p", since=10.0, prompt_tokens=900, prefill_busy_s=1.0))
    assert decided.observe(seen(20.0, young, pool(worker("d")))).pools["prompts"].work_tokens == 0


def burst(mode: str) -> tuple[World, DecidedPools]:
    """Let ten times as much come for a while."""
    step = Step(base=0.5, high=5.0, begins_s=10.0, ends_s=60.0)
    workload = varying_workload(VaryingLoad("burst", step, 5.0, 120.0, 16_000, 20), seed=0)
    decided = DecidedPools(policy(mode), Profile(MODEL))
    spec = ClusterSpec(1, 1, model=MODEL)
    world = World(workload, spec, OURS, PolicyConfig(), controller=decided)
    world.run()
    world.check_integrity()
    return world, decided


def test_pools_follow_a_burst_up_and_down_and_lose_nothing() -> None:
    world, decided = burst("Auto")
    report = world.report()
    assert {(r.status, r.num_losses) for r in report.requests} == {(OK, 0)}
    assert report.pools[PREFILL].peak_workers >= 4
    left = [m for m in world.fleet.members if m.pool == PREFILL and m.gone_at is None]
    assert len(left) < report.pools[PREFILL].peak_workers
    by_name = {m.worker_id: m for m in world.fleet.members}
    named = [r for d in decided.decisions for p in d.pools for r in (*p.drain, *p.cancel)]
    assert named
    assert all(by_name[name].gone_at is not None for name in named)  # type: ignore[index]


def test_a_dry_run_decides_and_changes_nothing() -> None:
    world, decided = burst("DryRun")
    assert max(d.pools[0].desired for d in decided.decisions) > 1
    assert [m.worker_id for m in world.fleet.members] == ["prefill-0", "decode-0"]


def test_a_decode_pool_with_few_answers_is_not_taken_for_a_weak_one() -> None:
    """The rate that sizes a pool is that of a replica as full as the SLO allows."""
    model = shipped_model("long_prompts.json")
    load = Step(base=12.0, high=24.0, begins_s=40.0, ends_s=80.0)
    workload = varying_workload(VaryingLoad("few", load, 24.0, 120.0, 1000, 300), seed=0)
    decided = DecidedPools(policy("DryRun"), Profile(model))
    spec = ClusterSpec(2, 1, model=model, hold=20.0)
    World(workload, spec, OURS, PolicyConfig(), controller=decided).run()

    capacity = decided.state.pools["answers"].capacity
    full = Profile(model).decode_tokens_s(0.040, 1150)
    mean_answers = capacity.steps.answers / capacity.steps.weight
    assert mean_answers < 0.5 * full * 0.040
    assert tokens_per_second(capacity, None) == pytest.approx(full, rel=0.2)
