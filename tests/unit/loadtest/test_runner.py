"""The runner in virtual time: on schedule, bounded, and stopped cleanly."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from loadtest.records import Chunk, Phase, PlannedRequest, PoolSize, RequestRecord, Status
from loadtest.run_log import RunLog
from loadtest.runner import CLIENT_FULL, RunClock, Runner
from loadtest.scenario import parse_scenario
from loadtest.schedule import Schedule, make_schedule
from loadtest.target import ClusterLook, TargetFacts
from tests.support.virtual_time import VirtualTimeLoop, run_virtual

FACTS = TargetFacts(kind="fake", address="here")


class FakeTarget:
    """Answers each request after a time of its own."""

    def __init__(self, takes_s: float, clock: RunClock) -> None:
        self.takes_s = takes_s
        self.clock = clock
        self.most = self.num_open = 0
        self.sent: list[int] = []

    async def open(self) -> TargetFacts:
        return FACTS

    async def send(self, request: PlannedRequest, record: RequestRecord, timeout_s: float) -> None:
        self.sent.append(request.number)
        self.num_open += 1
        self.most = max(self.most, self.num_open)
        record.sent_s = self.clock()
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.num_open -= 1
        record.chunks.append(Chunk(self.clock(), request.max_tokens))
        record.done_s = self.clock()
        record.status = Status.OK

    async def close(self) -> None:
        return


def small_schedule(**values: Any) -> Schedule:
    base = {
        "name": "x",
        "arrivals": {"kind": "constant", "rate_rps": 2},
        "workload": {"kind": "fixed", "isl": 4, "osl": 2},
        "phases": {"measure_s": 10},
    }
    return make_schedule(parse_scenario(base | values, "x.yaml"), Path())


def run(takes_s: float, stop_at_s: float | None = None, **values: Any) -> tuple[RunLog, FakeTarget]:
    schedule = small_schedule(**values)
    loop = VirtualTimeLoop()
    clock = RunClock(loop.time)
    target = FakeTarget(takes_s, clock)

    async def main() -> RunLog:
        runner = Runner(schedule, target, FACTS, clock)
        if stop_at_s is not None:
            loop.call_later(stop_at_s, runner.stop)
        return await runner.run()

    return run_virtual(loop, main()), target


def times(log: RunLog) -> list[float]:
    return [record.scheduled_s for record in log.records]


def test_an_open_loop_sends_on_time_however_slow_the_server_is() -> None:
    log, target = run(takes_s=7.0)

    assert times(log) == pytest.approx([n / 2 for n in range(20)])
    assert [r.sent_s for r in log.records] == pytest.approx(times(log), abs=1e-3)
    assert {r.status for r in log.records} == {Status.OK}
    assert target.most == 14
    assert log.duration_s == pytest.approx(9.5 + 7.0)
    assert not log.is_interrupted


def test_requests_are_of_the_phase_they_are_due_in() -> None:
    log, _ = run(0.1, phases={"warmup_s": 1, "measure_s": 2, "cooldown_s": 1})

    assert [r.phase for r in log.records] == [
        *[Phase.WARMUP] * 2,
        *[Phase.MEASURE] * 4,
        *[Phase.COOLDOWN] * 2,
    ]


def test_what_is_due_beyond_the_bound_is_a_failure_of_the_client() -> None:
    log, target = run(takes_s=100.0, client={"max_in_flight": 3, "drain_s": 200})

    codes = [(r.status, r.code, r.sent_s is None) for r in log.records]
    assert codes[:3] == [(Status.OK, "", False)] * 3
    assert codes[3:] == [(Status.ERROR, CLIENT_FULL, True)] * 17
    assert (log.num_shed, target.most) == (17, 3)


def test_an_offline_load_waits_for_room_and_counts_the_wait() -> None:
    log, target = run(
        1.0,
        arrivals={"kind": "offline", "sessions": 10},
        phases={},
        client={"max_in_flight": 4},
    )

    assert target.most == 4
    assert log.num_shed == 0
    assert times(log) == [0.0] * 10
    assert [r.ttft_s for r in log.records] == pytest.approx([1] * 4 + [2] * 4 + [3] * 2)


def test_what_is_open_at_the_end_is_censored() -> None:
    log, _ = run(takes_s=50.0, client={"drain_s": 2})

    assert {r.status for r in log.records} == {Status.CENSORED}
    assert all(r.done_s is None for r in log.records)
    assert log.duration_s == pytest.approx(12.0)
    assert not log.is_interrupted


def test_stopping_ends_at_once_with_what_there_is() -> None:
    log, _ = run(takes_s=1.0, stop_at_s=4.1)

    assert log.is_interrupted
    assert [r.status for r in log.records] == [Status.OK] * 7 + [Status.CENSORED] * 2
    assert log.duration_s == pytest.approx(4.1)


def test_the_budget_ends_a_run_and_says_so() -> None:
    log, _ = run(takes_s=50.0, budget_s=11)

    assert log.is_interrupted
    assert log.notes[0] == "the budget of 11 s ended the run"
    assert log.duration_s == pytest.approx(11.0)


CHAT = {"kind": "multi_turn", "turns": 3, "user": 4, "osl": 2}


def test_turns_follow_the_end_of_the_one_before() -> None:
    log, _ = run(
        1.0,
        arrivals={"kind": "constant", "rate_rps": 0.1},
        workload=CHAT | {"think_s": 0.5},
    )

    first, second, third = log.records
    assert first.done_s is not None
    assert second.done_s is not None
    assert second.scheduled_s > first.done_s
    assert third.scheduled_s > second.done_s
    assert second.sent_s == pytest.approx(second.scheduled_s, abs=1e-3)


def test_the_end_cuts_sessions_and_says_how_many() -> None:
    log, _ = run(4.0, arrivals={"kind": "constant", "rate_rps": 0.2}, workload=CHAT)

    assert len(log.records) == 5  # of two sessions of three, one of which has time for three
    assert log.notes == ["the end of the run cut 1 session short"]


def test_branches_of_a_tree_run_side_by_side() -> None:
    tree = {"kind": "agent", "tree": [3], "system": 4, "task": 4, "tool": 4, "osl": 2,
            "tool_wait_s": 0}  # fmt: skip
    log, target = run(1.0, arrivals={"kind": "offline", "sessions": 1}, workload=tree, phases={})

    assert times(log) == pytest.approx([0, 1, 1, 1])
    assert target.most == 3


def test_a_closed_loop_keeps_its_sessions_under_way() -> None:
    log, target = run(
        1.0, arrivals={"kind": "concurrency", "sessions": 3}, phases={"measure_s": 9.5}
    )

    assert target.most == 3
    assert len(log.records) == 30
    assert times(log) == pytest.approx([n // 3 for n in range(30)], abs=1e-3)
    assert len(set(target.sent)) == 30


def test_a_closed_loop_of_more_than_the_client_may_have_open_waits_for_room() -> None:
    log, target = run(
        1.0,
        arrivals={"kind": "concurrency", "sessions": 3},
        phases={"measure_s": 9.5},
        client={"max_in_flight": 2},
    )

    assert (target.most, log.num_shed) == (2, 0)
    assert len(target.sent) == 20
    assert [r.status for r in log.records if r.sent_s is None] == [Status.CENSORED]
    assert max(r.dispatch_delay_s or 0.0 for r in log.records) >= 0.99  # it counts as lateness


def test_a_closed_loop_has_a_greatest_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.runner.MAX_REQUESTS", 6)
    log, _ = run(1.0, arrivals={"kind": "concurrency", "sessions": 3}, phases={"measure_s": 9.5})

    assert len(log.records) == 6
    assert log.notes == ["after 6 requests users began no more sessions"]


def test_users_think_between_sessions() -> None:
    log, target = run(
        1.0, arrivals={"kind": "users", "users": 5, "think_s": 3.0}, phases={"measure_s": 400}
    )

    assert target.most <= 5
    assert len(log.records) == pytest.approx(5 * 400 / 4.0, rel=0.1)


def test_a_warm_cache_is_sent_every_prefix_before_the_clock_starts() -> None:
    rag = {"kind": "prefix_groups", "groups": 20, "prefix": 8, "suffix": 2, "osl": 1}
    log, target = run(1.0, workload=rag, cache="warm")

    assert target.sent[:20] == list(range(20))
    assert target.most == 8
    assert len(log.records) == 20
    assert times(log)[0] == 0


@pytest.mark.parametrize(("stop_at_s", "budget_s"), [(2.0, 600.0), (None, 20.0)])
def test_a_cache_that_does_not_get_warm_ends_the_run(
    stop_at_s: float | None, budget_s: float
) -> None:
    rag = {"kind": "prefix_groups", "groups": 20, "prefix": 8, "suffix": 2, "osl": 1}
    log, target = run(100.0, stop_at_s, workload=rag, cache="warm", budget_s=budget_s)

    assert target.sent[:8] == list(range(8))
    assert len(target.sent) < 20
    assert target.num_open == 0
    assert log.is_interrupted
    assert log.notes[0] == "the run ended before the cache was warm"
    assert log.duration_s < 1


def test_samples_tell_what_is_open_and_how_late_the_loop_is() -> None:
    log, _ = run(takes_s=7.0)

    assert max(sample.in_flight for sample in log.samples) == 14
    assert all(sample.loop_lag_s == pytest.approx(0, abs=1e-6) for sample in log.samples)
    assert len(log.samples) == pytest.approx(16.5 / 0.11, rel=0.15)


class LookedAt(FakeTarget):
    looks = 0

    async def look(self) -> ClusterLook | None:
        self.looks += 1
        return (
            None
            if self.looks == 3
            else ClusterLook(
                {"decode": self.looks}, 0, (PoolSize("decode", 9, self.looks, 9 - self.looks, 0),)
            )
        )


class NeverSeen(FakeTarget):
    looks = 0

    async def look(self) -> ClusterLook | None:
        self.looks += 1
        return None


def run_on(kind: type[FakeTarget]) -> tuple[RunLog, FakeTarget]:
    loop = VirtualTimeLoop()
    clock = RunClock(loop.time)
    target = kind(1.0, clock)

    async def main() -> RunLog:
        return await Runner(small_schedule(), target, FACTS, clock).run()

    return run_virtual(loop, main()), target


def test_samples_tell_what_is_behind_the_target_as_last_seen() -> None:
    log, _ = run_on(LookedAt)

    seen = [sample.replicas.get("decode", 0) for sample in log.samples]
    assert seen == sorted(seen)
    assert set(seen) == {1, 2, *range(4, 12)}  # the third look failed
    assert {sample.queued for sample in log.samples} == {0}
    assert [sample.pools[0].ready for sample in log.samples if sample.pools] == [
        n for n in seen if n
    ]


def test_what_cannot_be_seen_at_first_is_not_looked_at_again() -> None:
    log, target = run_on(NeverSeen)

    assert isinstance(target, NeverSeen)
    assert target.looks == 1
    assert {sample.queued for sample in log.samples} == {None}


def test_a_fault_of_a_target_is_raised_and_no_result() -> None:
    class Broken(FakeTarget):
        async def send(
            self, request: PlannedRequest, record: RequestRecord, timeout_s: float
        ) -> None:
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        run_on(Broken)


def test_a_target_that_does_not_let_go_costs_a_note_and_not_the_run() -> None:
    class Clinging(FakeTarget):
        async def look(self) -> ClusterLook | None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1_000.0)
            await asyncio.sleep(60.0)
            return None

    log, _ = run_on(Clinging)
    assert len(log.records) == 20
    assert log.notes == ["the target did not let go of what was cancelled within 5 s"]
