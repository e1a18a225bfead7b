from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from services.autoscaler.observation import (
    Observation,
    Reading,
    Replica,
    ReplicaState,
    StepSeen,
)
from services.autoscaler.policy import PolicySpec
from services.autoscaler.signals import (
    LEASE_GRACE_S,
    RouterCounts,
    SignalBook,
    Sources,
    WorkerCounts,
    parse_word,
)
from services.common.log_histogram import LogHistogram
from services.router.signals import RouterSignals, Waits
from tests.support.scaling_policy import make_policy

READY, STARTING, DRAINING = ReplicaState.READY, ReplicaState.STARTING, ReplicaState.DRAINING


def counted(*seconds: float) -> LogHistogram:
    histogram = LogHistogram()
    histogram.add(seconds)
    return histogram


def word(at: float, router_id: str = "r0", life: str = "1", **fields: Any) -> RouterCounts:
    return RouterCounts(router_id, life, at, **fields)


def worker(worker_id: str, role: str, at: float = 0.0, **fields: Any) -> WorkerCounts:
    return WorkerCounts(worker_id, role, 1, at, **fields)


class Rig:
    """A book, and replicas that are old and ready unless a test says otherwise."""

    def __init__(self) -> None:
        self.spec: PolicySpec = make_policy().spec
        self.book = SignalBook()
        self.replicas: Mapping[str, tuple[Replica, ...]] = {
            "prefill": (Replica("p0", READY, -1e6),),
            "decode": (Replica("d0", READY, -1e6),),
        }
        self.workers: tuple[WorkerCounts, ...] = (worker("p0", "prefill"), worker("d0", "decode"))

    def look(self, now: float, *routers: RouterCounts) -> Observation:
        return self.book.observe(self.spec, Sources(routers, self.workers, self.replicas), now)


def ttft(seen: Observation) -> Reading | None:
    return seen.pools["prefill"].readings.get("TTFT")


def test_what_a_router_writes_is_what_is_read() -> None:
    signals = RouterSignals(last_request_at=0.0)
    signals.arrived(100, 1.0)
    signals.first_token("p0", 0.2)
    signals.gaps([0.03] * 4)
    signals.ended(100, 60)
    told = parse_word("r0", signals.word(255, Waits(2, 1, {"prefill": 7}, 0.5), 4.0), 9.0)
    assert told == RouterCounts(
        router_id="r0", life="ff", measured_at=9.0, num_requests=1, prompt_tokens=100,
        ended_prompt_tokens=100, ended_cached_tokens=60, output_tokens=5, num_open=2, num_held=1,
        queued_tokens={"prefill": 7}, longest_s=0.5, idle_s=0.0, ttft=told.ttft if told else {},
        itl=told.itl if told else LogHistogram(),
    )  # fmt: skip
    assert told.ttft["p0"].counts == counted(0.2).counts
    assert told.itl.counts == counted(0.03).counts


@pytest.mark.parametrize(
    "hostile",
    ["", "[]", "{}", '{"life": 1}', "x" * 100, "[" * 100_000],
    ids=["empty", "list", "no fields", "few fields", "no JSON", "deep"],
)
def test_words_that_are_none_are_not_read(hostile: str) -> None:
    assert parse_word("r0", hostile, 0.0) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("requests", -1), ("requests", 1 << 70), ("idle_s", "soon"), ("itl", {"9999": 1}),
     ("ttft", []), ("queued", {"prefill": -4})],
)  # fmt: skip
def test_words_with_figures_that_cannot_be_are_not_read(field: str, value: object) -> None:
    good = json.loads(RouterSignals(last_request_at=0.0).word(1, Waits(), 0.0))
    assert parse_word("r0", json.dumps(good), 0.0) is not None
    assert parse_word("r0", json.dumps({**good, field: value}), 0.0) is None


def test_latency_is_that_of_the_window_and_not_of_the_past() -> None:
    rig = Rig()
    slow = counted(*[5.0] * 50)
    rig.look(0.0, word(0.0, ttft={"p0": slow}))
    both = counted(*[5.0] * 50, *[0.1] * 50)
    reading = ttft(rig.look(10.0, word(10.0, ttft={"p0": both})))
    assert reading is not None
    assert reading.value == pytest.approx(0.1, rel=0.03)
    assert reading.measured_at == 10.0


def test_latencies_of_several_routers_are_one_distribution() -> None:
    """The percentile of percentiles would be that of the quick router here."""
    rig = Rig()
    rig.look(0.0, word(0.0, "r0"), word(0.0, "r1"))
    seen = rig.look(
        5.0,
        word(5.0, "r0", ttft={"p0": counted(*[0.1] * 80)}),
        word(4.0, "r1", ttft={"p0": counted(*[2.0] * 20)}),
    )
    reading = ttft(seen)
    assert reading is not None
    assert reading.value == pytest.approx(2.0, rel=0.03)
    assert reading.measured_at == 4.0  # as old as the oldest part of it


def test_first_look_knows_no_latency() -> None:
    """What happened before is of no known time: better no figure than a wrong one."""
    rig = Rig()
    seen = rig.look(0.0, word(0.0, ttft={"p0": counted(9.0)}))
    assert ttft(seen) is None
    assert seen.load is None


def test_restarted_router_is_counted_from_its_start() -> None:
    rig = Rig()
    rig.look(0.0, word(0.0, num_requests=1000))
    rig.look(5.0, word(5.0, num_requests=1010))
    load = rig.look(10.0, word(10.0, life="2", num_requests=4)).load
    assert load is not None
    assert (load.num_requests, load.span_s) == (4, 5.0)


def test_nobody_waits_where_nobody_asks() -> None:
    """An idle cluster has figures, else it could never shrink."""
    rig = Rig()
    rig.look(0.0, word(0.0))
    seen = rig.look(5.0, word(5.0, idle_s=5.0))
    assert ttft(seen) == Reading(0.0, 5.0)
    assert seen.pools["decode"].readings["ITL"] == Reading(0.0, 5.0)
    assert seen.idle_s == 5.0


def test_requests_that_get_no_first_token_at_all_are_seen() -> None:
    rig = Rig()
    rig.look(0.0, word(0.0, num_open=3, longest_s=1.0))
    assert ttft(rig.look(5.0, word(5.0, num_open=3, longest_s=6.0))) == Reading(6.0, 5.0)


def test_answers_that_stand_still_have_no_gap_rather_than_a_small_one() -> None:
    rig = Rig()
    rig.workers = (worker("p0", "prefill"), worker("d0", "decode", num_running=4))
    rig.look(0.0, word(0.0))
    assert "ITL" not in rig.look(5.0, word(5.0)).pools["decode"].readings


def test_first_tokens_of_replicas_that_warm_up_are_left_out() -> None:
    rig = Rig()
    rig.replicas = {**rig.replicas, "prefill": (*rig.replicas["prefill"], Replica("p1", READY, 0))}
    rig.workers = (*rig.workers, worker("p1", "prefill"))
    rig.look(0.0, word(0.0))
    cold = {"p0": counted(*[0.1] * 10), "p1": counted(*[8.0] * 10)}
    reading = ttft(rig.look(5.0, word(5.0, ttft=cold)))
    assert reading is not None
    assert reading.value == pytest.approx(0.1, rel=0.03)


def test_queued_tokens_are_those_of_routers_and_workers() -> None:
    rig = Rig()
    rig.workers = (worker("p0", "prefill", 5.0, queued_tokens=30), worker("d0", "decode", 5.0))
    seen = rig.look(
        5.0, word(3.0, "r0", queued_tokens={"prefill": 500}),
        word(4.0, "r1", queued_tokens={"prefill": 70, "decode": 1}),
    )  # fmt: skip
    assert seen.pools["prefill"].readings["QueuedTokens"] == Reading(600.0, 3.0)
    assert seen.pools["decode"].readings["QueuedTokens"] == Reading(1.0, 3.0)


def test_without_a_router_there_is_no_figure_of_what_waits() -> None:
    seen = Rig().look(5.0)
    assert set(seen.pools["prefill"].readings) == set()
    assert seen.load is None
    assert seen.idle_s == 0.0  # nobody says that nobody asked


def test_kv_utilization_counts_what_waits_for_room() -> None:
    rig = Rig()
    rig.workers = (
        worker("d0", "decode", 5.0, kv_tokens_used=800, kv_tokens_total=1000, resident_tokens=800,
               num_running=8, num_waiting=4),
    )  # fmt: skip
    readings = rig.look(5.0, word(5.0)).pools["decode"].readings
    assert readings["KVUtilization"] == Reading(1.2, 5.0)


def test_steps_of_decode_and_how_many_answers_fit_are_seen() -> None:
    rig = Rig()
    rig.workers = (
        worker("d0", "decode", 5.0, kv_tokens_used=800, kv_tokens_total=1000, num_running=8,
               step_s=0.02),
        worker("p0", "prefill", 5.0, kv_tokens_used=800, kv_tokens_total=1000, num_running=8,
               step_s=0.02),
    )  # fmt: skip
    pools = rig.look(5.0, word(5.0)).pools
    assert pools["decode"].steps == (StepSeen(8.0, 0.02),)
    assert pools["decode"].most_answers == 10.0
    assert (pools["prefill"].steps, pools["prefill"].most_answers) == ((), None)


def test_prompt_tokens_are_less_those_that_lately_came_from_caches() -> None:
    rig = Rig()
    rig.look(0.0, word(0.0))
    told = word(5.0, num_requests=10, prompt_tokens=1000, ended_prompt_tokens=800,
                ended_cached_tokens=200, output_tokens=40)  # fmt: skip
    load = rig.look(5.0, told).load
    assert load is not None
    assert (load.num_requests, load.prompt_tokens, load.output_tokens) == (10, 750, 40)


def test_work_is_what_warm_replicas_did_since_the_tick_before() -> None:
    """Counters come from workers, and start again with a new life."""
    rig = Rig()
    done = {"prefill_tokens": 1000, "busy_s": 10.0, "decode_tokens": 0}
    rig.workers = (worker("p0", "prefill", 0.0, **done),)
    assert rig.look(0.0).pools["prefill"].work_tokens == 0
    more = {"prefill_tokens": 1600, "busy_s": 12.0, "decode_tokens": 0}
    rig.workers = (worker("p0", "prefill", 5.0, **more),)
    seen = rig.look(5.0).pools["prefill"]
    assert (seen.work_tokens, seen.busy_s) == (600, 2.0)
    rig.workers = (WorkerCounts("p0", "prefill", 2, 10.0, prefill_tokens=9000, busy_s=50.0),)
    seen = rig.look(10.0).pools["prefill"]
    assert (seen.work_tokens, seen.busy_s) == (0, 0.0)


def test_replica_is_ready_with_its_lease_and_leaves_by_the_drivers_word() -> None:
    rig = Rig()
    rig.replicas = {
        "prefill": (Replica("p0", STARTING, 1.0), Replica("p1", STARTING, 2.0)),
        "decode": (Replica("d0", DRAINING, 3.0), Replica("d1", READY, 1.0)),
    }
    rig.workers = (
        worker("p0", "prefill", kv_tokens_used=7), worker("d0", "decode"),
        worker("d1", "decode", is_draining=True),
    )  # fmt: skip
    pools = rig.look(5.0).pools
    assert pools["prefill"].replicas == (
        Replica("p0", READY, 5.0, 7), Replica("p1", STARTING, 2.0)
    )  # fmt: skip
    assert [r.state for r in pools["decode"].replicas] == [DRAINING, DRAINING]
    assert rig.look(9.0).pools["prefill"].replicas[0].since == 5.0


def test_serving_replica_whose_lease_is_missing_for_a_moment_serves_on() -> None:
    """A store that restarts empties the registry; nobody is to be cancelled for it."""
    rig = Rig()
    rig.look(0.0)
    rig.workers = ()
    assert rig.look(5.0).pools["prefill"].replicas[0].state is READY
    assert rig.look(LEASE_GRACE_S + 1.0).pools["prefill"].replicas[0].state is STARTING


def test_held_requests_of_all_routers_are_summed_and_the_busiest_says_how_idle() -> None:
    seen = Rig().look(5.0, word(5.0, "r0", num_held=2, idle_s=90.0), word(5.0, "r1", num_held=1))
    assert (seen.num_held, seen.idle_s) == (3, 0.0)


class Rounded:
    """A profile whose answers tell what was asked."""

    def prefill_tokens_s(self, isl: float) -> float:
        return isl

    def decode_tokens_s(self, itl_s: float, context: float) -> float:
        return context + itl_s


def test_profile_is_asked_for_requests_as_long_as_those_of_late() -> None:
    rig = Rig()
    rig.spec = make_policy(slo={"itl": {"percentile": "p95", "targetMilliseconds": 500}}).spec
    rig.look(0.0, word(0.0))
    later = word(
        5.0, num_requests=4, prompt_tokens=800, ended_prompt_tokens=800, ended_cached_tokens=200,
        output_tokens=400,
    )  # fmt: skip

    def paces(now: float, *routers: RouterCounts) -> tuple[float | None, float | None]:
        sources = Sources(routers, rig.workers, rig.replicas)
        pools = rig.book.observe(rig.spec, sources, now, Rounded()).pools
        return pools["prefill"].profile_tokens_s, pools["decode"].profile_tokens_s

    assert paces(5.0, later) == (150.0, 200.0 + 100.0 / 2 + 0.5)
    idle = replace(later, measured_at=200.0)
    assert paces(200.0, replace(later, measured_at=100.0)) == paces(300.0, idle)  # as before
    rig.spec = make_policy().spec
    assert paces(301.0, idle) == (150.0, None)


def test_profile_says_nothing_before_a_request_came() -> None:
    rig = Rig()
    sources = Sources((word(0.0),), rig.workers, rig.replicas)
    seen = rig.book.observe(rig.spec, sources, 0.0, Rounded())
    assert seen.pools["prefill"].profile_tokens_s is None
