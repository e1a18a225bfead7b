"""Pools that change while they serve: starts, drains, deaths, and workers of unequal speed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.router.admission import AdmissionConfig
from services.router.policy import PolicyConfig
from services.router.view import DRAINING, LIVE
from services.sim import timeline
from services.sim.cluster import AGGREGATED, DECODE, PREFILL, ClusterSpec, Group
from services.sim.controller import Change, Controller, Failure, Observation, Orders, Schedule
from services.sim.fleet import GONE, STARTING
from services.sim.performance import PerformanceModel, default_model
from services.sim.placement import OURS, POLICIES, ROUND_ROBIN
from services.sim.report import LOST, OK, REFUSED, SimReport
from services.sim.synthetic import PlainLoad, plain_workload
from services.sim.workload import Arrival, Workload
from services.sim.world import MAX_LOSSES, World

LOAD = plain_workload(PlainLoad(2000, 200, 10.0, spread=0.5), 150, seed=1)  # 15 s of it


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that does not end fails soon."""
    monkeypatch.setattr(timeline, "MAX_EVENTS", 100_000)


def kind(**changes: Any) -> PerformanceModel:
    """Change the default model; its workers start within 2 s."""
    return default_model().model_copy(update={"startup_s": 2.0, **changes})


def spec_of(num_prefill: int = 2, num_decode: int = 2, **changes: Any) -> ClusterSpec:
    """Describe two pools."""
    return replace(ClusterSpec(num_prefill, num_decode, model=kind()), **changes)


def run(
    spec: ClusterSpec,
    workload: Workload = LOAD,
    *,
    policy: str = OURS,
    controller: Controller | None = None,
    failures: tuple[Failure, ...] = (),
) -> tuple[World, SimReport]:
    """Run a world to its end and check what must hold of every one."""
    world = World(workload, spec, policy, PolicyConfig(), controller=controller, failures=failures)
    world.run()
    world.check_integrity()
    report = world.report()
    assert [r.number for r in report.requests] == list(range(len(workload.arrivals)))
    return world, report


def schedule(*changes: tuple[float, str, int]) -> Schedule:
    """Make a schedule."""
    return Schedule(tuple(Change(*change) for change in changes))


def test_a_new_worker_serves_after_its_start_and_costs_from_its_order() -> None:
    world, report = run(spec_of(1), controller=schedule((4.0, PREFILL, 2)))
    times = {r.number: r.arrived_s for r in report.requests}
    served = [times[r.number] for r in report.requests if r.prefill_worker == "prefill-1"]
    assert min(served) >= 6.0
    assert len(served) > 30
    assert [m.asked_at for m in world.fleet.members if m.pool == PREFILL] == [0.0, 4.0]
    use = report.pools[PREFILL]
    assert use.provisioned_s == pytest.approx(2 * report.duration_s - 4.0)
    assert use.peak_workers == 2


def test_a_newcomer_is_not_given_everything() -> None:
    _, report = run(spec_of(3), controller=schedule((0.0, PREFILL, 4)))
    after = [r.prefill_worker for r in report.requests if 2.0 <= r.arrived_s < 4.0]
    assert 0 < after.count("prefill-3") < 0.5 * len(after)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_drained_worker_ends_what_it_has_and_leaves(policy: str) -> None:
    """A pool that shrinks aborts no answer."""
    wanted = schedule((5.0, DECODE, 1), (5.0, PREFILL, 1))
    world, report = run(spec_of(3, 3), policy=policy, controller=wanted)
    assert {(r.status, r.num_losses) for r in report.requests} == {(OK, 0)}
    for pool in (PREFILL, DECODE):
        gone = [m for m in world.fleet.members if m.pool == pool and m.state == GONE]
        assert len(gone) == 2
        assert all(m.gone_at is not None and 5.0 <= m.gone_at < 15.0 for m in gone)
        names = {m.worker_id for m in gone}
        late = [r for r in report.requests if r.arrived_s > 5.0]
        assert not names & {r.prefill_worker for r in late}


def test_what_a_drain_has_no_time_for_goes_on_elsewhere() -> None:
    wanted = schedule((5.0, DECODE, 1))
    world, report = run(spec_of(2, 3, drain_s=0.5), controller=wanted)
    assert {(r.status, r.num_losses) for r in report.requests} == {(OK, 0)}
    assert all(m.gone_at in (None, 5.5) for m in world.fleet.members)
    patient = run(spec_of(2, 3), controller=wanted)[1]
    work = [sum(use.work_tokens for use in r.pools.values()) for r in (report, patient)]
    assert work[0] > work[1]  # their prompts were computed again


def test_a_worker_that_is_not_wanted_any_more_need_not_start() -> None:
    wanted = schedule((1.0, DECODE, 4), (2.0, DECODE, 2))
    world, report = run(spec_of(), controller=wanted)
    names = {r.decode_worker for r in report.requests}
    assert names <= {"decode-0", "decode-1", "prefill-0", "prefill-1"}
    assert [m.gone_at for m in world.fleet.members if m.asked_at == 1.0] == [2.0, 2.0]


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("notice_s", [0.0, 2.0])
def test_what_a_dead_worker_had_is_answered_by_others(victim: str, notice_s: float) -> None:
    failure = Failure(5.0, victim, notice_s)
    world, report = run(spec_of(), failures=(failure,))
    assert {r.status for r in report.requests} == {OK}
    lost = [r for r in report.requests if r.num_losses]
    assert lost
    assert all(r.num_losses == 1 for r in lost)
    assert all(r.arrived_s + (r.e2e_s or 0.0) > 5.0 + notice_s for r in lost)
    (dead,) = (m for m in world.fleet.members if m.state == GONE)
    assert (dead.worker_id, dead.gone_at) == (victim, 5.0 + notice_s)


def test_a_client_keeps_the_tokens_it_has_when_its_worker_dies() -> None:
    """The answer goes on from there: what is made again is the KV, not the tokens."""
    slow = kind(decode=default_model().decode.model_copy(update={"fixed_s": 0.1}))
    one = Workload("one", 512, (Arrival(0.0, 1024, 101, (1, 2)),))
    spec = ClusterSpec(1, 2, model=slow)
    calm = run(spec, one)[1].requests[0]
    # A second is ten tokens; the prompt is cached at its prefill worker by then.
    world, report = run(spec, one, failures=(Failure(5.0, calm.decode_worker),))
    hurt = report.requests[0]
    assert hurt.ttft_s == calm.ttft_s
    assert hurt.decode_worker != calm.decode_worker
    assert calm.e2e_s is not None
    assert hurt.e2e_s == pytest.approx(calm.e2e_s, abs=0.2)
    assert sum(m.worker.work_tokens for m in world.fleet.members) < 1024 + 60


def test_pools_that_are_gone_are_done_without() -> None:
    few = replace(LOAD, arrivals=LOAD.arrivals[:60])
    deaths = tuple(Failure(2.0, f"{DECODE}-{i}") for i in range(2))
    report = run(spec_of(), few, failures=deaths)[1]
    assert {r.status for r in report.requests} == {OK}
    late = {r.decode_worker for r in report.requests if r.arrived_s > 2.0}
    assert late <= {"prefill-0", "prefill-1"}
    deaths = tuple(Failure(2.0, f"{pool}-{i}") for pool in (PREFILL, DECODE) for i in range(2))
    report = run(spec_of(), few, failures=deaths)[1]
    assert {r.status for r in report.requests if r.arrived_s > 2.0} == {REFUSED}
    assert report.attainment() < 1


def test_a_request_that_loses_too_many_workers_is_lost() -> None:
    one = Workload("one", 512, (Arrival(0.0, 512, 2000, (1,)),))
    spec = ClusterSpec(num_aggregated=9, model=kind())
    deaths: tuple[Failure, ...] = ()
    for i in range(MAX_LOSSES + 1):  # whoever has it then dies
        report = run(spec, one, failures=deaths)[1]
        assert [(r.status, r.num_losses) for r in report.requests] == [(OK, i)]
        deaths = (*deaths, Failure(1.0 + i, report.requests[0].decode_worker))
    report = run(spec, one, failures=deaths)[1]
    assert [(r.status, r.num_losses) for r in report.requests] == [(LOST, MAX_LOSSES + 1)]
    assert report.attainment() == 0


def test_faster_workers_of_a_pool_get_more_of_its_work() -> None:
    pace = default_model().prefill.model_copy(update={"token_s": 5e-5 / 4})
    spec = spec_of(1, 2, groups=(Group(PREFILL, 1, kind(prefill=pace)),))
    _, report = run(spec)
    slow, fast = (
        sum(r.prefill_worker == f"{PREFILL}-{i}" for r in report.requests) for i in range(2)
    )
    assert fast > 1.5 * slow


@dataclass(slots=True)
class Recorder:
    """Wants nothing, and keeps what it sees."""

    tick_s: float = 1.0
    seen: list[Observation] = field(default_factory=list)

    def orders(self, seen: Observation) -> Orders:
        """Look only."""
        self.seen.append(seen)
        return Orders()


def test_a_controller_sees_every_request_once_and_the_pools_as_they_are() -> None:
    recorder = Recorder()
    _, report = run(spec_of(), controller=recorder)
    assert [o.now for o in recorder.seen] == [float(i) for i in range(len(recorder.seen))]
    ended = [r.number for o in recorder.seen for r in o.ended]
    assert len(ended) == len(set(ended)) >= len(report.requests) - 10
    assert sum(o.num_arrived for o in recorder.seen) == len(report.requests)
    for seen in recorder.seen:
        assert (seen.pools[PREFILL].size, seen.pools[AGGREGATED].size) == (2, 0)
        assert seen.pools[DECODE].kv_tokens == 2 * default_model().kv_tokens
    assert max(o.pools[DECODE].num_running for o in recorder.seen) > 3


@dataclass(frozen=True, slots=True)
class ByQueue:
    """Wants a prefill worker for each 4,000 tokens that wait."""

    tick_s: float = 1.0

    def orders(self, seen: Observation) -> Orders:
        """Grow only."""
        state = seen.pools[PREFILL]
        return Orders({PREFILL: max(state.size, min(6, state.queued_tokens // 4000))})


def test_a_controller_that_grows_a_short_pool_keeps_more_requests_in_time() -> None:
    short = plain_workload(PlainLoad(4000, 20, 10.0), 300, seed=2)
    fixed = run(spec_of(1), short)[1]
    grown = run(spec_of(1), short, controller=ByQueue())[1]
    assert grown.attainment(2.0) > fixed.attainment(2.0) + 0.3
    assert grown.pools[PREFILL].peak_workers > 1


def test_a_controller_sees_first_tokens_work_and_every_worker() -> None:
    recorder = Recorder()
    world, report = run(spec_of(), controller=recorder)
    ttfts = [ttft for seen in recorder.seen for ttft in seen.ttfts_s]
    assert len(ttfts) >= len(report.requests) - 10
    assert Counter(ttfts) <= Counter(r.ttft_s for r in report.requests)
    arrived = sum(r.num_tokens for r in report.requests)
    assert sum(seen.arrived_tokens for seen in recorder.seen) == arrived  # nothing is cached
    last = recorder.seen[-1].pools
    assert [w.name for w in last[DECODE].workers] == ["decode-0", "decode-1"]
    assert sum(w.prompt_tokens for w in last[PREFILL].workers) == arrived
    made = sum(m.worker.output_tokens for m in world.fleet.members)
    # The first token of an answer is its prefill's.
    assert made == pytest.approx(sum(r.output_tokens - 1 for r in report.requests))
    busiest = max(recorder.seen, key=lambda seen: seen.pools[DECODE].num_running)
    steps = [w.step_s for w in busiest.pools[DECODE].workers if w.num_answers]
    assert steps
    assert all(step >= default_model().decode.fixed_s for step in steps)


@dataclass(slots=True)
class Planned:
    """Gives each order once, at its time."""

    plans: list[tuple[float, Orders]]
    tick_s: float = 1.0
    seen: list[Observation] = field(default_factory=list)

    def orders(self, seen: Observation) -> Orders:
        """Give the next one that is due."""
        self.seen.append(seen)
        is_due = self.plans and self.plans[0][0] <= seen.now
        return self.plans.pop(0)[1] if is_due else Orders()

    def states(self, at_s: float, pool: str) -> dict[str, str]:
        """Return the state of each worker of a pool at a moment."""
        (found,) = (o for o in self.seen if o.now == at_s)
        return {worker.name: worker.state for worker in found.pools[pool].workers}


@pytest.mark.parametrize("policy", [OURS, ROUND_ROBIN])
def test_a_worker_that_moves_ends_what_it_has_before_it_serves_in_its_new_pool(policy: str) -> None:
    """As a real one: it drains, and what is on its way to a pool counts in its size."""
    moved = Planned([(5.0, Orders({PREFILL: 2, DECODE: 2}, moves={"decode-0": PREFILL}))])
    world, report = run(spec_of(1, 2), policy=policy, controller=moved)
    assert {(r.status, r.num_losses) for r in report.requests} == {(OK, 0)}
    assert sorted(m.worker_id for m in world.fleet.members) == [
        "decode-0", "decode-1", "decode-2", "prefill-0",
    ]  # fmt: skip
    (member,) = (m for m in world.fleet.members if m.worker_id == "decode-0")
    assert (member.pool, member.gone_at) == (PREFILL, None)
    assert moved.states(6.0, DECODE)["decode-0"] == DRAINING
    assert member.since > 6.0
    mine = [r for r in report.requests if r.prefill_worker == "decode-0"]
    assert mine
    assert min(r.arrived_s for r in mine) >= member.since
    before = [r for r in report.requests if r.decode_worker == "decode-0"]
    assert before
    assert all(r.arrived_s + (r.e2e_s or 0.0) <= member.since for r in before if r not in mine)


def test_a_worker_that_is_not_idle_in_time_stays_in_its_pool() -> None:
    moved = Planned([(5.0, Orders(moves={"decode-0": PREFILL}))])
    world, report = run(spec_of(1, 2, drain_s=0.3), controller=moved)
    assert {(r.status, r.num_losses) for r in report.requests} == {(OK, 0)}
    (member,) = (m for m in world.fleet.members if m.worker_id == "decode-0")
    assert (member.pool, member.state, member.since) == (DECODE, LIVE, 5.3)
    late = {r.decode_worker for r in report.requests if r.arrived_s > 5.3}
    assert "decode-0" in late
    assert "decode-0" not in {r.prefill_worker for r in report.requests}


def test_who_is_told_to_leave_while_it_changes_its_pool_leaves() -> None:
    plans = [(5.0, Orders(moves={"decode-0": PREFILL})), (6.0, Orders(leaving=("decode-0",)))]
    world, report = run(spec_of(1, 2), controller=Planned(plans))
    assert {(r.status, r.num_losses) for r in report.requests} == {(OK, 0)}
    (member,) = (m for m in world.fleet.members if m.worker_id == "decode-0")
    assert (member.pool, member.state) == (DECODE, GONE)
    assert "decode-0" not in {r.prefill_worker for r in report.requests}


def test_those_go_first_who_are_named() -> None:
    named = Planned([(5.0, Orders({DECODE: 2}, leaving=("decode-2", "decode-9")))])
    world, _ = run(spec_of(2, 3), controller=named)
    gone = [m.worker_id for m in world.fleet.members if m.gone_at is not None]
    assert gone == ["decode-2"]


def test_one_that_leaves_is_replaced_where_the_size_stays() -> None:
    """A start that hangs for ever does not keep its place: another one is tried."""
    times = {"decode-2": math.inf, "decode-3": 4.0}
    spec = spec_of(startup=lambda name: times.get(name, 1.0))
    wanted = Planned([(1.0, Orders({DECODE: 4})), (9.0, Orders({DECODE: 4}, ("decode-2",)))])
    world, _ = run(spec, controller=wanted)
    states = {at_s: wanted.states(at_s, DECODE) for at_s in (4.0, 6.0, 11.0)}
    assert states[4.0] == {
        **dict.fromkeys(("decode-0", "decode-1"), LIVE),
        **dict.fromkeys(("decode-2", "decode-3"), STARTING),
    }
    assert [name for name, state in states[6.0].items() if state == STARTING] == ["decode-2"]
    assert sorted(states[11.0]) == ["decode-0", "decode-1", "decode-3", "decode-4"]
    assert set(states[11.0].values()) == {LIVE}
    (stuck,) = (m for m in world.fleet.members if m.worker_id == "decode-2")
    assert stuck.gone_at == 9.0


def test_pools_go_to_zero_and_requests_wait_until_they_are_back() -> None:
    load = replace(LOAD, arrivals=(*LOAD.arrivals[:30], Arrival(30.0, 600, 50, (9001, 9002))))
    none, one = Orders({PREFILL: 0, DECODE: 0}), Orders({PREFILL: 1, DECODE: 1})
    wanted = Planned([(20.0, none), (31.0, one)])
    report = run(spec_of(hold_s=60.0), load, controller=wanted)[1]
    assert {r.status for r in report.requests} == {OK}
    seen = {o.now: o for o in wanted.seen}
    assert sum(state.size for state in seen[25.0].pools.values()) == 0
    assert [seen[at_s].num_held for at_s in (25.0, 31.0)] == [0, 1]
    ttft_s = report.requests[-1].ttft_s
    assert ttft_s is not None
    assert 3.0 < ttft_s < 4.0  # a second until the tick, two of the start
    assert report.pools[PREFILL].provisioned_s < 2 * 20 + 10
    tries: list[dict[str, Any]] = [{"hold_s": 0.5}, {"hold_s": 60.0, "max_held": 0}, {}]
    for limits in tries:
        again = Planned([(20.0, none), (31.0, one)])
        late = run(spec_of(**limits), load, controller=again)[1]
        assert [r.status for r in late.requests] == [OK] * 30 + [REFUSED]


def test_a_pool_that_is_not_there_cannot_be_resized() -> None:
    with pytest.raises(ValueError, match="no aggregated pool"):
        run(spec_of(), controller=schedule((0.0, AGGREGATED, 1)))
    with pytest.raises(ValueError, match="none of"):
        schedule((0.0, "both", 1))


@dataclass(frozen=True, slots=True)
class Mover:
    """Follows a schedule, and at some moments has a worker leave or change its pool."""

    schedule: Schedule
    moves: list[tuple[int, int, bool]]
    tick_s: float = 1.0

    def orders(self, seen: Observation) -> Orders:
        """Move one at most at a moment."""
        orders = self.schedule.orders(seen)
        workers = [(pool, w.name) for pool, state in seen.pools.items() for w in state.workers]
        for at_s, which, is_move in self.moves:
            if at_s == seen.now and workers:
                pool, name = workers[which % len(workers)]
                other = {PREFILL: DECODE, DECODE: PREFILL}.get(pool)
                if is_move and other is not None:
                    return replace(orders, moves={name: other})
                return replace(orders, leaving=(name,))
        return orders


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.sampled_from([OURS, ROUND_ROBIN]),
    st.booleans(),
    st.lists(
        st.tuples(st.floats(0, 20), st.integers(0, 3), st.sampled_from((0.0, 0.7))), max_size=4
    ),
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 1), st.integers(1, 4)), max_size=4),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.booleans()), max_size=4),
    st.sampled_from((0.2, 60.0)),
    st.sampled_from((None, 0.0, 1.5)),
)
def test_whatever_dies_or_drains_every_request_ends_once_and_nothing_leaks(
    policy: str,
    is_one: bool,
    deaths: list[tuple[float, int, float]],
    sizes: list[tuple[float, int, int]],
    moves: list[tuple[int, int, bool]],
    drain_s: float,
    slo_ttft_s: float | None,
) -> None:
    pools = (AGGREGATED, AGGREGATED) if is_one else (PREFILL, DECODE)
    tight = kind(kv_blocks=600, startup_s=0.5)  # a few answers at once, so that some wait for room
    spec = replace(spec_of(), model=tight, drain_s=drain_s, hint_loss=0.1, num_routers=2)
    spec = replace(spec, hold_s=drain_s)
    if policy == OURS and slo_ttft_s is not None:
        spec = replace(spec, admission=AdmissionConfig(slo_ttft_s=slo_ttft_s))
    if is_one:
        spec = replace(spec, num_prefill=0, num_decode=0, num_aggregated=3)
    failures = tuple(Failure(at, f"{pools[i % 2]}-{i // 2}", notice) for at, i, notice in deaths)
    wanted = Mover(schedule(*((at, pools[pool], size) for at, pool, size in sizes)), moves)
    _, report = run(spec, policy=policy, controller=wanted, failures=failures)
    if not deaths:
        assert {r.num_losses for r in report.requests} == {0}
    assert all(r.ttft_s is not None and r.ttft_s > 0 for r in report.answered)
