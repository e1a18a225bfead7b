"""Simulated clusters as targets: turns in order, prefixes shared, everything by the seed."""

from __future__ import annotations

import statistics
from itertools import accumulate
from pathlib import Path

import pytest

from loadtest.arrivals import Concurrency
from loadtest.launch import TargetSpec, run_schedule, schedule_of
from loadtest.options import read_scenario
from loadtest.records import Piece, PlannedRequest, Prompt, Status
from loadtest.run_log import RunLog
from loadtest.scenario import Phases, Scenario
from loadtest.sim_target import SimTarget, read_spec
from loadtest.target import TargetUnusable
from services.sim.performance import default_model


def simulated(name: str, spec: str) -> RunLog:
    scenario, base = read_scenario(name, quick=True, rate=None, seed=None)
    return run_schedule(schedule_of(scenario, base), TargetSpec(f"sim:{spec}"))


@pytest.mark.parametrize("name", ["chat_rt", "agents"])
def test_sessions_run_in_order_and_the_same_each_time(name: str) -> None:
    log = simulated(name, "prefill=2,decode=2")

    assert log.records
    assert {record.status for record in log.records} == {Status.OK}
    assert log.records == simulated(name, "prefill=2,decode=2").records
    begins = [record.scheduled_s for record in log.records]
    assert begins == sorted(begins)
    by_number = {record.number: record for record in log.records}
    scenario, _ = read_scenario(name, quick=True, rate=None, seed=None)
    assert max(begins) < (scenario.phases.end_s or 0.0)
    followed = 0
    for number, record in by_number.items():
        if number % 256:
            head = by_number[number - number % 256]
            assert head.done_s is not None
            assert record.scheduled_s >= head.done_s
            followed += 1
    assert followed


def ask(number: int, at_s: float, *pieces: Piece) -> PlannedRequest:
    return PlannedRequest(number, Prompt(pieces), max_tokens=9, at_s=at_s)


def test_equal_beginnings_are_cached_and_others_are_not() -> None:
    """Units are cut across pieces: an equal piece after another beginning is no hit."""
    target = SimTarget(read_spec("aggregated=1"), Phases())
    shared, own, other = Piece(1, 1000), Piece(2, 64), Piece(3, 64)

    records = target.run(
        [
            ask(0, 0.0, shared, own),
            ask(1, 5.0, shared, other),
            ask(2, 10.0, other, shared),
        ]
    )

    assert [record.cached_tokens for record in records] == [0, 960, 0]
    assert [record.isl for record in records] == [1064, 1064, 1064]
    assert [record.osl for record in records] == [9, 9, 9]
    assert all(record.max_stall_s is None for record in records)
    assert not any(record.itls_s for record in records)


def test_samples_tell_what_is_open() -> None:
    log = simulated("chat_rt", "prefill=1,decode=1")

    assert {tuple(sample.replicas.items()) for sample in log.samples} == {
        (("prefill", 1), ("decode", 1))
    }
    assert log.samples[-1].in_flight == 0
    assert max(sample.in_flight for sample in log.samples) > 0
    assert log.duration_s == max(record.done_s or 0.0 for record in log.records)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("foo=2", "'foo' is not known"),
        ("prefill=x", "prefill=x is no number up to 4096"),
        ("aggregated=1000000", "aggregated=1000000 is no number up to 4096"),
        ("prefill=1,decode=-1", "decode=-1 is no number"),
        ("routers=65", "routers=65 is no number up to 64"),
        ("prefill=2", "each of two pools needs a worker"),
        ("prefill=1,decode=1,aggregated=1", "give prefill and decode workers, or aggregated ones"),
        ("policy=best", "there is no policy 'best'"),
        ("model=none.json", "none.json"),
    ],
)
def test_what_is_no_cluster_is_said(spec: str, message: str) -> None:
    with pytest.raises(TargetUnusable, match=message):
        read_spec(spec)


def closed(
    arrivals: dict[str, object],
    spec: str,
    measure_s: float | None = 20.0,
    max_in_flight: int = 2_048,
) -> RunLog:
    """Simulate a closed loop of fixed prompts."""
    scenario = Scenario.model_validate(
        {
            "name": "closed",
            "arrivals": arrivals,
            "workload": {"kind": "fixed", "isl": 500, "osl": 50},
            "phases": {"measure_s": measure_s} if measure_s else {},
            "client": {"max_in_flight": max_in_flight},
        }
    )
    return run_schedule(schedule_of(scenario, Path()), TargetSpec(f"sim:{spec}"))


def most_at_once(log: RunLog) -> int:
    """Return the most requests that were open at one moment."""
    sent = [r for r in log.records if r.sent_s is not None]
    steps = [(r.sent_s or 0.0, 1) for r in sent] + [(r.done_s or 0.0, -1) for r in sent]
    return max(accumulate(step for _, step in sorted(steps)))


def test_so_many_sessions_are_always_under_way() -> None:
    log = closed({"kind": "concurrency", "sessions": 4}, "prefill=1,decode=1")

    assert {record.status for record in log.records} == {Status.OK}
    assert (
        log.records == closed({"kind": "concurrency", "sessions": 4}, "prefill=1,decode=1").records
    )
    assert most_at_once(log) == 4
    numbers = [record.number for record in log.records]
    assert len(numbers) == len(set(numbers)) > 40
    assert max(record.scheduled_s for record in log.records) < 20.0
    # Somebody who has an answer asks again at once.
    ends = sorted(record.done_s or 0.0 for record in log.records)
    begins = sorted(record.scheduled_s for record in log.records)[4:]
    assert begins == pytest.approx(ends[: len(begins)], abs=1e-9)


def test_users_think_between_sessions() -> None:
    users = {"kind": "users", "users": 20, "think_s": 5.0}
    log = closed(users, "prefill=1,decode=1", measure_s=100.0)

    assert 1 <= most_at_once(log) <= 20
    # 20 users, a session each 5 s and the time of an answer.
    spent_s = statistics.fmean((r.done_s or 0.0) - r.scheduled_s for r in log.records)
    assert len(log.records) == pytest.approx(20 * 100 / (5 + spent_s), rel=0.2)


def test_what_a_client_has_no_room_for_waits_and_its_times_count_from_when_it_was_due() -> None:
    users = {"kind": "concurrency", "sessions": 8}
    log = closed(users, "prefill=2,decode=2", max_in_flight=3)

    assert most_at_once(log) == 3
    sent = [r for r in log.records if r.sent_s is not None]
    assert [r.sent_s for r in sent] == sorted(r.sent_s or 0.0 for r in sent)
    assert {r.status for r in sent} == {Status.OK}
    assert max(r.sent_s or 0.0 for r in sent) < 20.0
    late = [r for r in sent if (r.dispatch_delay_s or 0.0) > 0]
    assert len(late) > len(sent) - 4
    assert all((r.ttft_s or 0.0) > (r.dispatch_delay_s or 0.0) for r in late)
    # As with a server: who waited for room at the end is counted, and in no latency.
    unsent = [r for r in log.records if r.sent_s is None]
    assert {r.status for r in unsent} == {Status.CENSORED}
    assert len(unsent) == 5
    assert log.records == closed(users, "prefill=2,decode=2", max_in_flight=3).records
    assert max(sample.in_flight for sample in log.samples) <= 3


def test_room_for_all_changes_nothing() -> None:
    users = {"kind": "concurrency", "sessions": 4}
    bound, free = (closed(users, "prefill=1,decode=1", max_in_flight=n) for n in (4, 2_048))
    assert bound.records == free.records


def test_an_offline_load_waits_for_room_as_well() -> None:
    log = closed({"kind": "offline", "sessions": 40}, "aggregated=1", None, max_in_flight=5)
    assert most_at_once(log) == 5
    assert [r.status for r in log.records] == [Status.OK] * 40


def test_a_closed_loop_of_what_is_refused_comes_to_its_end(tmp_path: Path) -> None:
    """Who is refused at once asks again, but time goes on."""
    tiny = default_model().model_copy(update={"kv_blocks": 8})
    (tmp_path / "tiny.json").write_text(tiny.model_dump_json(exclude_none=True))
    log = closed(
        {"kind": "concurrency", "sessions": 2},
        f"prefill=1,decode=1,model={tmp_path / 'tiny.json'}",
        measure_s=1.0,
    )

    assert {(record.status, record.code) for record in log.records} == {(Status.ERROR, "refused")}
    assert 1_900 < len(log.records) < 2_100


def test_turns_of_a_session_keep_their_order_in_a_closed_loop() -> None:
    scenario, base = read_scenario("chat_rt", quick=True, rate=None, seed=None)
    arrivals = Concurrency(sessions=3)
    scenario = scenario.model_copy(update={"arrivals": arrivals})
    log = run_schedule(schedule_of(scenario, base), TargetSpec("sim:prefill=2,decode=2"))

    by_session: dict[object, list[float]] = {}
    for record in sorted(log.records, key=lambda r: r.number):
        by_session.setdefault(record.session, []).append(record.scheduled_s)
    assert max(map(len, by_session.values())) > 1
    assert all(times == sorted(times) for times in by_session.values())
    assert most_at_once(log) <= 3
