"""The comparison of ways to size pools, on short loads."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from services.bench import autoscaler as bench
from services.bench import autoscaler_cases, autoscaler_run
from services.bench.autoscaler import ROWS, as_table, run_loads
from services.bench.autoscaler_cases import DENSE, FAST, SINE, STEP, Case, shipped_policy, traced
from services.bench.autoscaler_run import (
    GOAL,
    Outcome,
    hpa,
    needed_for_step,
    oracle,
    ours,
    run,
)
from services.bench.result import BenchFailed
from services.cli import exits
from services.cli.main import run as cli
from services.common.progress import silent
from services.sim.autoscaling.recorder import Recorder
from services.sim.cluster import PREFILL
from services.sim.controller import Observation, Orders
from services.sim.varying import Sine, Step

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0000000,4000,10
2023-11-16 18:15:47.0000000,3000,10
2023-11-16 18:15:48.0000000,5000,10
2023-11-16 18:20:50.0000000,2000,10
2023-11-16 18:21:10.0000000,2000,10
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Five requests in five minutes."""
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of two minutes, and oracles with less choice."""
    monkeypatch.setattr(autoscaler_run, "_SHARES", (0.9, 0.4))
    monkeypatch.setattr(autoscaler_cases, "_SINE", Sine(0.3, 1.5, 120.0))
    monkeypatch.setattr(autoscaler_cases, "_SINE_ENDS_S", 120.0)
    monkeypatch.setattr(autoscaler_cases, "_STEP", Step(0.5, 4.0, 10.0, 70.0))
    monkeypatch.setattr(autoscaler_cases, "_STEP_ENDS_S", 80.0)


def test_shipped_policies_have_no_fault() -> None:
    found = [p.name for p in (files("services.bench") / "policies").iterdir()]
    assert sorted(found) == ["bursts.yaml", "bursts_fast.yaml", "steps.yaml", "waves.yaml"]
    for name in found:
        assert shipped_policy(name).spec.pools


@pytest.mark.usefixtures("short")
def test_every_way_is_run_on_drawn_loads_and_shown_in_a_row() -> None:
    result = run_loads((SINE, STEP), None, 0, silent)
    drawn = [row for row in ROWS if not row.endswith("_equal_hours")]
    head, _, *rows = as_table(result).splitlines()
    assert head.startswith("| load | policy | attainment |")
    assert [row.split(" | ")[:2] for row in rows] == [
        [f"| {load}", who] for load in (SINE, STEP) for who in drawn
    ]
    assert result.figures[f"{SINE}.oracle.hours_to_oracle"] == 1.0
    assert {bar.name.split(", ")[0] for bar in result.bars if STEP in bar.name} == {
        "in time once settled", "turns within a window", "overshoot",
    }  # fmt: skip


@pytest.mark.usefixtures("short")
def test_equal_seeds_give_equal_outcomes() -> None:
    outcomes = [run(case, ours(case), 0) for case in (autoscaler_cases.sine(s) for s in (1, 1, 2))]
    assert outcomes[0] == outcomes[1] != outcomes[2]


def test_recorded_load_brings_the_peers_at_equal_hours(trace: Path) -> None:
    result = run_loads((FAST,), trace, 0, silent)
    assert result.figures[f"{FAST}.requests"] == 5
    assert [row.split(" | ")[1] for row in as_table(result).splitlines()[2:]] == list(ROWS)
    late = [bar for bar in result.bars if bar.name.startswith("violating")]
    assert len(late) == 2
    assert all(bar.bar < 1 for bar in late)  # as many is not fewer


def test_a_dense_trace_has_ten_of_each_and_a_fast_one_a_tenth_of_the_time(trace: Path) -> None:
    dense, fast = traced(DENSE, trace, 0), traced(FAST, trace, 0)
    assert [len(case.workload.arrivals) for case in (dense, fast)] == [50, 5]
    assert fast.workload.arrivals[-1].at_s == pytest.approx(32.4)
    assert dense.workload.arrivals[-1].at_s == pytest.approx(324.5, abs=0.6)


def test_no_trace_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="cannot replay"):
        traced(FAST, tmp_path / "none.csv", 0)


@pytest.mark.usefixtures("short")
def test_the_oracle_plans_as_tightly_as_the_goal_allows() -> None:
    case = autoscaler_cases.sine(0)
    found = oracle(case, 0)
    assert found.attainment >= GOAL
    assert found.worker_hours <= run(case, ours(case), 0).worker_hours * 1.5


def test_a_step_is_judged_by_those_let_in_once_it_should_be_dealt_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody who grows too late escapes: what is refused counts, and overshoot has a measure."""
    monkeypatch.setattr(autoscaler_cases, "_STEP", Step(1.0, 25.0, 5.0, 65.0))
    monkeypatch.setattr(autoscaler_cases, "_STEP_ENDS_S", 70.0)
    case = autoscaler_cases.step(0)
    assert needed_for_step(case) == 3  # 50,000 tokens a second, of which one computes 20,000

    class Idle:
        tick_s = 5.0

        def orders(self, seen: Observation) -> Orders:
            return Orders({PREFILL: 1})

    idle, mine = run(case, Idle(), 0), run(case, ours(case), 0)
    assert idle.refused_share > mine.refused_share
    assert idle.attainment < mine.attainment
    assert idle.overshoot == 2 / 3  # the two it began with
    assert mine.settled is not None
    assert mine.settled >= GOAL


def test_peers_keep_to_the_bounds_of_the_policy(trace: Path) -> None:
    case = traced(FAST, trace, 0)
    pool = case.policy.spec.pools[0]
    recorder = Recorder(hpa(case, 1e-6))  # wants all there are
    run(case, recorder, 0)
    assert max(s.wanted[PREFILL] for s in recorder.trail) <= pool.max_replicas
    assert min(s.wanted[PREFILL] for s in recorder.trail) >= pool.min_replicas


def test_the_search_for_equal_hours_ends_at_the_nearest_found(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, asked = traced(FAST, trace, 0), []
    some = Outcome(1.0, 1.0, 8.0, 0.0, 0, None, None, 0.0)

    def at(case: Case, times: float, _seed: int) -> Outcome:
        asked.append(times)
        return replace(some, worker_hours=8.0 / times)

    monkeypatch.setattr(bench, "run", at)
    found = bench._at_hours(case, lambda _, times: times, some, 2.0, 0)  # type: ignore[arg-type, return-value]
    assert asked[:2] == [8.0, pytest.approx(8.0**0.5)]
    assert found.worker_hours == pytest.approx(2.0, rel=0.2)
    assert len(asked) <= 6
    asked.clear()
    assert bench._at_hours(case, lambda _, times: times, some, 8.1, 0) == some  # type: ignore[arg-type, return-value]
    assert not asked


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--loads", "square"), "is none of sine, step"),
        (("--loads", "sine,trace-fast"), "need a --trace"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["bench", "autoscaler", *words]) == exits.USAGE
    assert told in capsys.readouterr().err
