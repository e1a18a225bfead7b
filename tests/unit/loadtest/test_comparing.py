"""Blocks of two arms in turn, and stored runs beside each other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from loadtest.analysis import Origin, analyse
from loadtest.blocks import block_of, order_of
from loadtest.cli import run as run_cli
from loadtest.compare import CompareRules
from loadtest.comparing import (
    BlockOrder,
    Side,
    compare_stored,
    compare_targets,
    read_rules,
    with_interference,
)
from loadtest.outputs import save_run
from loadtest.records import Chunk, Status
from loadtest.report.page import report_page
from loadtest.run_log import RunLog
from loadtest.scenario import Scenario, parse_scenario
from loadtest.target import TargetFacts
from services.common.errors import ConfigError
from tests.support.load_records import make_record

_RATE = 20.0


def _scenario(**more: Any) -> Scenario:
    values: dict[str, Any] = {
        "name": "pair",
        "arrivals": {"kind": "constant", "rate_rps": _RATE},
        "workload": {"kind": "fixed", "isl": 100, "osl": 11},
        "slo": {"ttft_s": 0.5},
        "phases": {"warmup_s": 1.0, "measure_s": 120.0},
    }
    return parse_scenario(values | more, "test")


class _Server:
    """Answers in 100 ms and some noise, and whatever it is slower by."""

    def __init__(self, seed: int, slower_s: float = 0.0) -> None:
        self.loads: list[Scenario] = []
        self._noise = random.Random(seed)
        self._slower_s = slower_s

    def run(self, scenario: Scenario) -> RunLog:
        self.loads.append(scenario)
        log = RunLog(TargetFacts("grpc", "127.0.0.1:1"), "2026-01-01T00:00:00Z")
        end_s = scenario.phases.end_s or 0.0
        for number in range(int(end_s * _RATE)):
            due_s = number / _RATE
            ttft_s = 0.1 + self._noise.expovariate(500) + self._slower_s
            record = make_record(number, due_s, ttft_s, phase=scenario.phases.at(due_s))
            log.records.append(record)
        log.duration_s = end_s + 0.5
        return log


def _compared(a: _Server, b: _Server, scenario: Scenario | None = None) -> Any:
    lines: list[str] = []
    result, records = compare_targets(
        Side("a", a.run), Side("b", b.run), scenario or _scenario(), CompareRules(),
        Origin({"cores": 2}, "abc"), order=BlockOrder(12), tell=lines.append,
    )  # fmt: skip
    return result, records, lines


def test_neither_arm_is_always_second() -> None:
    assert "".join(arm for _, arm in order_of(4)) == "abbaabba"
    assert [block for block, _ in order_of(3)] == [0, 0, 1, 1, 2, 2]


def test_both_arms_get_equal_loads_and_every_block_one_of_its_own() -> None:
    a, b = _Server(1), _Server(2)
    _, _, lines = _compared(a, b)
    assert a.loads == b.loads
    assert len({load.seed for load in a.loads}) == len(a.loads) == 12
    assert {load.phases.measure_s for load in a.loads} == {10.0}
    assert len(lines) == 24


def test_equal_servers_cannot_be_told_apart_and_ten_ms_can() -> None:
    result, _, _ = _compared(_Server(1), _Server(2))
    assert result.verdict == "inconclusive"
    result, records, _ = _compared(_Server(1), _Server(2, slower_s=0.01))
    assert result.verdict == "worse"
    change = next(metric for metric in result.metrics if metric.name == "ttft_p50_ms")
    assert change.low <= 10 <= change.high
    assert result.a.rates["offered_rps"] == pytest.approx(_RATE)
    assert result.a.verdict == "OK", result.a.verdict_reason
    assert {block_of(record) for record in records[0]} == set(range(12))
    assert len({record.number for record in records[0]}) == len(records[0])


def test_a_request_that_its_block_cut_off_is_not_late_by_the_later_blocks() -> None:
    class Cutting(_Server):
        def run(self, scenario: Scenario) -> RunLog:
            log = super().run(scenario)
            last = log.records[-1]
            log.duration_s = last.scheduled_s + 0.2
            last.chunks, last.done_s, last.status = [], None, Status.CENSORED
            return log

    result, _, _ = _compared(Cutting(1), Cutting(2))
    assert result.a.counts["censored"] == 12
    assert result.a.attainment.value == 1


def test_what_a_part_does_to_the_others_is_told_from_runs_with_and_without_it() -> None:
    """Long requests are in one arm only, and slow down the others there; they are not compared."""

    def arm(server: _Server, has_long: bool) -> Side:
        def run(scenario: Scenario) -> RunLog:
            log = server.run(scenario)
            for record in log.records:
                record.kind = "long" if record.number % 10 == 9 else "short"
                slower = 3.0 if record.kind == "long" else 1.5 if has_long else 1.0
                first_s = record.chunks[0].at_s
                record.chunks = [
                    Chunk(first_s + (c.at_s - first_s) * slower, c.num_tokens)
                    for c in record.chunks
                ]
            if not has_long:
                log.records = [record for record in log.records if record.kind == "short"]
            return log

        return Side("with" if has_long else "without", run)

    result, records = compare_targets(
        arm(_Server(1), False), arm(_Server(2), True), _scenario(), CompareRules(),
        Origin({"cores": 2}, "abc"), order=BlockOrder(12, but="long"), tell=lambda line: None,
    )  # fmt: skip
    result = with_interference(result, records, but="long")

    assert result.figures == {
        "tpot_p99_ms_with_long": pytest.approx(15),
        "tpot_p99_ms_without_long": pytest.approx(10),
        "interference": pytest.approx(1.5),
    }
    assert result.verdict == "worse"
    told = "TPOT p99 of the others is 15.0 ms with long and 10.0 ms without: 1.50 times"
    assert result.verdict_reason.startswith(told)
    assert "1.5 times" in report_page(result)
    assert result.a.distributions["ttft_ms"].count == result.b.distributions["ttft_ms"].count
    assert len(records[1]) > len(records[0])


def test_a_comparison_that_is_stopped_keeps_its_whole_pairs() -> None:
    class Stopping(_Server):
        def run(self, scenario: Scenario) -> RunLog:
            log = super().run(scenario)
            log.is_interrupted = len(self.loads) == 4
            return log

    _, records, lines = _compared(_Server(1), Stopping(2))
    assert {block_of(record) for record in records[0]} == {0, 1, 2}
    assert len(lines) == 6  # of the fourth pair B came first

    class Broken(_Server):
        def run(self, scenario: Scenario) -> RunLog:
            log = super().run(scenario)
            log.is_interrupted = True
            return log

    with pytest.raises(ConfigError, match="before both arms had a block"):
        _compared(Broken(1), _Server(2))


def _stored(root: Path, noise: int, slower_s: float = 0.0, **more: Any) -> Path:
    scenario = _scenario(**more)
    log = _Server(noise, slower_s).run(scenario)
    return save_run(root, analyse(log, scenario, Origin({"cores": 2}, "abc")), log.records)


def test_stored_runs_are_compared_with_their_requests(tmp_path: Path) -> None:
    a, b = _stored(tmp_path, 1), _stored(tmp_path, 2, slower_s=0.05)
    result = compare_stored(a, b, CompareRules())
    assert result.verdict == "worse"
    assert result.warnings == (
        "the runs were not interleaved: whatever changed between them counts as a difference",
    )
    other = _stored(tmp_path, 3, seed=9)
    result = compare_stored(a, other, CompareRules())
    assert "the scenarios differ" in result.warnings[0]
    assert not any(metric.is_paired for metric in result.metrics)


def test_a_start_that_a_stored_run_left_out_is_not_compared(tmp_path: Path) -> None:
    scenario = _scenario(phases={"measure_s": 120.0})
    paths = []
    for noise in (1, 2):
        log = _Server(noise).run(scenario)
        for record in log.records[:200]:  # ten seconds in which everything was slow
            record.chunks = [Chunk(c.at_s + noise, c.num_tokens) for c in record.chunks]
        result = analyse(log, scenario, Origin({"cores": 2}, "abc"))
        assert result.counts["not_measured"] == 200
        paths.append(save_run(tmp_path, result, log.records))

    found = compare_stored(paths[0], paths[1], CompareRules())
    p99 = next(metric for metric in found.metrics if metric.name == "ttft_p99_ms")
    assert p99.a is not None
    assert p99.a < 200


def test_the_command_ends_with_the_verdict(tmp_path: Path) -> None:
    a, b = str(_stored(tmp_path, 1)), str(_stored(tmp_path, 2, slower_s=0.05))
    out = ["--out", str(tmp_path / "out")]
    assert run_cli(["compare", a, b, *out]) == 1
    assert run_cli(["compare", b, a, *out]) == 0
    assert run_cli(["compare", a, a, *out]) == 2
    rules = tmp_path / "rules.yaml"
    rules.write_text("latency: {absolute: 100}\n")
    assert run_cli(["compare", a, b, "--rules", str(rules), *out]) == 2
    assert len(list((tmp_path / "out").glob("*/report.html"))) == 4


def test_what_cannot_be_compared_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert run_cli(["compare", "grpc://127.0.0.1:1", "grpc://127.0.0.1:2"]) == 2
    said = capsys.readouterr().err
    assert "result.json" in said
    assert "--scenario is missing" in said


@pytest.mark.parametrize(
    ("text", "key"), [("confidence: 2", "confidence"), ("metrics: {ttft_p50_ms: {abs: 1}}", "abs")]
)
def test_rules_that_make_no_sense_name_their_key(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=key):
        read_rules(path)
