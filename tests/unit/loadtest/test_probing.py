"""A whole search against a queue with a known capacity, and how it ends when it cannot go on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.analysis import Origin
from loadtest.cli import run as run_cli
from loadtest.launch import Watch
from loadtest.probing import Pools, search, search_splits, stretched
from loadtest.result import SearchResult
from loadtest.run_log import RunLog
from loadtest.scenario import Scenario, parse_scenario
from loadtest.search import SearchOrder
from loadtest.target import TargetFacts
from services.common.errors import ConfigError
from tests.support.load_records import first_come_first_served
from tests.support.load_results import make_search

ORDER = SearchOrder(target_share=0.95, start_rps=4.0, min_rps=0.5, max_rps=500.0)


def _scenario(**more: Any) -> Scenario:
    values: dict[str, Any] = {
        "name": "queue",
        "arrivals": {"kind": "poisson", "rate_rps": 1.0},
        "workload": {"kind": "fixed", "isl": 100, "osl": 1},
        "slo": {"ttft_s": 0.5},
        "phases": {"warmup_s": 5.0, "measure_s": 60.0},
    }
    return parse_scenario(values | more, "test")


def _served(scenario: Scenario, watch: Watch | None = None) -> RunLog:
    """Four servers of 100 ms: 40 requests a second."""
    log = RunLog(TargetFacts("mock", "queue"), "2026-01-01T00:00:00Z")
    end_s = scenario.phases.end_s or 0.0
    rng = random.Random(scenario.model_dump_json(exclude={"faults"}))
    due = []
    for at_s in scenario.arrivals.instants(rng):  # type: ignore[union-attr]  # they are open
        if at_s >= end_s:
            break
        due.append(at_s)
    for record in first_come_first_served(due, 0.1, 4):
        record.phase = scenario.phases.at(record.scheduled_s)
        log.records.append(record)
    log.duration_s = end_s + 1.0
    return log


def _search(run: Callable[[Scenario, Watch | None], RunLog], **more: Any) -> SearchResult:
    lines: list[str] = []
    result = search(
        _scenario(), ORDER, Origin({"cores": 2}, "abc"), run,
        budget_s=more.get("budget_s", 1e9), now=more.get("now", lambda: 0.0), tell=lines.append,
    )  # fmt: skip
    assert len(lines) == len(result.probes)
    return result


def test_the_capacity_of_a_queue_is_found_within_ten_percent() -> None:
    loads: list[Scenario] = []

    def run(scenario: Scenario, watch: Watch | None) -> RunLog:
        loads.append(scenario)
        return _served(scenario)

    result = _search(run)
    assert result.verdict == "FOUND", result.verdict_reason
    assert len({load.seed for load in loads[-4:]}) == 4  # three re-runs, and what came before
    assert result.best_rps is not None
    assert 36 <= result.best_rps <= 40
    assert len(result.verified) == 3
    assert all(probe.attainment.value >= 0.95 for probe in result.verified)
    assert result.knee_rps is not None
    assert result.target_share == 0.95


def test_a_queue_that_grows_misses_although_its_answers_were_still_in_time() -> None:
    """At 42 a second of 40 the first half minute looks good."""
    scenario = _scenario(slo={"ttft_s": 30.0})
    result = search(
        scenario, ORDER, Origin({}, ""), _served, budget_s=1e9, now=lambda: 0.0, tell=lambda _: None
    )
    missed = [probe for probe in result.probes if "falls further" in probe.reason]
    assert missed
    assert all(probe.attainment.value == 1 for probe in missed if probe.offered_rps < 60)
    assert result.best_rps is not None
    assert result.best_rps < 44


def test_a_client_at_its_end_ends_the_search_with_what_is_known() -> None:
    def run(scenario: Scenario, watch: Watch | None) -> RunLog:
        log = _served(scenario)
        if scenario.arrivals.rate_rps > 10:  # type: ignore[union-attr]  # it is Poisson
            for record in log.records:
                record.sent_s = record.scheduled_s + 0.05
        return log

    result = _search(run)
    assert (result.verdict, result.best_rps) == ("UNRESOLVED", 8.0)
    assert "this client is not up to 16 requests/s" in result.verdict_reason


def test_a_search_keeps_its_budget_and_tells_who_stopped_it() -> None:
    clock = iter(range(0, 10_000, 50))
    result = _search(_served, budget_s=300.0, now=lambda: float(next(clock)))
    assert result.verdict == "UNRESOLVED"
    assert "300 s are over" in result.verdict_reason

    def stopped(scenario: Scenario, watch: Watch | None) -> RunLog:
        log = _served(scenario)
        log.is_interrupted = True
        return log

    assert _search(stopped).verdict_reason == "stopped while a probe ran"


def test_a_budget_without_time_for_one_probe_is_refused() -> None:
    with pytest.raises(ConfigError, match="one probe at 4 requests/s takes 65 s"):
        _search(_served, budget_s=60.0)


@pytest.mark.parametrize(("rate", "measure_s"), [(10.0, 60.0), (1.0, 100.0), (0.1, 300.0)])
def test_slow_rates_get_more_time(rate: float, measure_s: float) -> None:
    longer = stretched(_scenario(budget_s=70.0), rate)
    assert longer.phases.measure_s == measure_s
    assert longer.budget_s >= 5.0 + measure_s + longer.client.drain_s


SEARCHED = make_search()


@pytest.mark.parametrize("total", [2, 3, 8, 17])
@pytest.mark.parametrize("prefill_share", [0.1, 0.35, 0.5, 0.9])
def test_the_best_split_is_climbed_to(total: int, prefill_share: float) -> None:
    """The pool that is too small for its part of the work is what limits."""
    tried: list[int] = []

    def search_at(pools: Pools) -> SearchResult:
        tried.append(pools.prefill)
        capacity = min(pools.prefill / prefill_share, pools.decode / (1 - prefill_share))
        return SEARCHED.model_copy(update={"best_rps": capacity})

    best = max(min(p / prefill_share, (total - p) / (1 - prefill_share)) for p in range(1, total))
    result = search_splits(total, search_at, lambda: True)
    assert result.best_rps == pytest.approx(best)
    assert f"of {len(tried)} splits" in result.verdict_reason
    assert len(tried) == len(set(tried)) <= 8
    placed = {(probe.prefill_workers, probe.decode_workers) for probe in result.probes}
    assert placed == {(prefill, total - prefill) for prefill in tried}
    assert len(result.probes) == len(tried) * len(SEARCHED.probes)


def test_the_best_of_splits_is_not_sure_once_time_is_over() -> None:
    tried: list[int] = []

    def search_at(pools: Pools) -> SearchResult:
        tried.append(pools.prefill)
        return SEARCHED

    result = search_splits(8, search_at, lambda: len(tried) < 2)
    assert len(tried) == 2
    assert result.verdict == "UNRESOLVED"
    assert "there was no time for others" in result.verdict_reason


_FILE = """
name: small
arrivals: {kind: constant, rate_rps: 1}
workload: {kind: fixed, isl: 2000, osl: 8}
slo: {ttft_s: 0.5}
phases: {measure_s: 2}
"""


def test_the_command_searches_a_simulation_and_its_best_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "small.yaml"
    scenario.write_text(_FILE)
    flags = ["--start", "8", "--precision", "0.5", "--verify", "1", "--out", str(tmp_path / "out")]
    search_it = ["search", str(scenario), *flags, "--json"]
    assert run_cli([*search_it, "--target", "sim:prefill=1,decode=2"]) == 0
    two = SearchResult.model_validate_json(capsys.readouterr().out)
    assert run_cli([*search_it, "--target", "sim:prefill=1,decode=1", "--split", "3"]) == 0
    best = SearchResult.model_validate_json(capsys.readouterr().out)
    assert best.best_rps is not None
    assert best.best_rps >= (two.best_rps or 0.0)
    assert {(p.prefill_workers, p.decode_workers) for p in best.probes} == {(1, 2), (2, 1)}
    pages = sorted((tmp_path / "out").glob("small-search-*/report.html"))
    assert len(pages) == 2
    texts = [(page.parent / "summary.md").read_text() for page in pages]
    assert ["| 1 + 2 |" in text for text in texts] == [False, True]


def test_a_search_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "small.yaml"
    scenario.write_text(_FILE.replace("slo: {ttft_s: 0.5}", ""))
    target = ["search", str(scenario), "--target", "http://127.0.0.1:1"]
    assert run_cli(target) == 2
    assert "no slo to search for" in capsys.readouterr().err
    assert run_cli([*target, "--ttft-s", "1", "--split", "4"]) == 2
    assert "--split needs a sim: target" in capsys.readouterr().err
    assert run_cli([*target, "--ttft-s", "1", "--start", "0.01"]) == 2
    assert "0 < min <= start <= max" in capsys.readouterr().err
