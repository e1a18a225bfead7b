"""Simulated clusters as targets: turns in order, prefixes shared, everything by the seed."""

from __future__ import annotations

import pytest

from loadtest.launch import TargetSpec, run_schedule, schedule_of
from loadtest.options import read_scenario
from loadtest.records import Piece, PlannedRequest, Prompt, Status
from loadtest.run_log import RunLog
from loadtest.scenario import Phases
from loadtest.sim_target import SimTarget, read_spec
from loadtest.target import TargetUnusable


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
