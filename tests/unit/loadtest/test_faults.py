"""What a fault did to requests, and what makes a run with faults fail."""

from __future__ import annotations

import pytest

from loadtest.analysis import Origin, analyse
from loadtest.faults import BroughtFault, outcomes
from loadtest.records import RequestRecord, Status
from loadtest.report.page import report_page
from loadtest.result import RunResult
from loadtest.run_log import RunLog
from loadtest.scenario import Scenario, parse_scenario
from loadtest.slo import Slo
from loadtest.summary import summary
from loadtest.target import TargetFacts
from services.common.errors import ConfigError
from tests.support.load_records import make_record

VALUES = {
    "name": "hurt",
    "arrivals": {"kind": "constant", "rate_rps": 10},
    "workload": {"kind": "fixed", "isl": 100, "osl": 11},
    "slo": {"ttft_s": 1.0},
    "phases": {"measure_s": 60},
    "faults": [
        {"at_s": 10, "action": "kill", "process": "decode"},
        {"at_s": 40, "action": "freeze", "process": "router-0", "for_s": 2},
    ],
}


def _scenario() -> Scenario:
    return parse_scenario(VALUES, "test")


def _brought() -> list[BroughtFault]:
    kill, freeze = _scenario().faults
    return [
        BroughtFault(freeze, 40.0, "router-0", back_s=2.1),
        BroughtFault(kill, 10.0, "decode-1", back_s=4.0),
    ]


def _records() -> list[RequestRecord]:
    """Ten a second; those due 0 to 7 s after the first fault are late, five fail then."""
    records = [make_record(n, n / 10) for n in range(600)]
    for number in range(100, 170):
        records[number] = make_record(number, number / 10, ttft_s=3.0)
    for number in range(100, 105):
        records[number].status = Status.ERROR
    return records


def _run(records: list[RequestRecord], faults: list[BroughtFault]) -> RunResult:
    log = RunLog(TargetFacts("grpc", "here"), "2026-11-30T12:00:00+00:00", records)
    log.duration_s, log.faults = 61.0, faults
    return analyse(log, _scenario(), Origin({}, "abc"))


def test_each_fault_has_the_requests_until_the_next_one() -> None:
    first, second = outcomes(_brought(), _records(), Slo(ttft_s=1.0), 61.0)

    assert (first.action, first.process, first.for_s, first.back_s) == ("kill", "decode-1", None, 4)
    assert first.recovery_s == 10.0  # two slices of five seconds
    # Two that were open when it came, and thirty seconds of them.
    assert (first.num_requests, first.num_failed) == (302, 5)
    assert (second.action, second.for_s, second.recovery_s) == ("freeze", 2.0, 0.0)
    assert (second.num_requests, second.num_failed) == (202, 0)


def test_a_run_tells_errors_recovery_and_tokens() -> None:
    run = _run(_records(), _brought())

    assert run.figures["error_share"] == pytest.approx(5 / 600)
    assert run.figures["fault_recovery_s"] == 10.0
    assert (run.figures["tokens_lost"], run.figures["tokens_repeated"]) == (0, 0)
    assert {check.name: check.is_ok for check in run.checks} | {"tokens": True, "faults": True} == {
        check.name: check.is_ok for check in run.checks
    }
    page = report_page(run)
    assert "kill decode-1" in page
    assert "freeze router-0 for 2 s" in page
    told = summary(run)
    assert "the longest" in told
    assert "* kill decode-1 at 10 s: ready again after 4 s, SLO held again after 10 s; 5 of" in told


def test_a_lost_token_fails_the_run_with_or_without_faults() -> None:
    records = [make_record(n, n / 10) for n in range(600)]
    records[7].num_lost, records[8].num_repeated = 2, 1
    for faults in ([], _brought()):
        run = _run(records, faults)
        assert run.verdict == "FAILED"
        assert run.verdict_reason == "2 tokens lost and 1 repeated in whole answers"


def test_a_fault_that_was_not_brought_fails_the_run() -> None:
    faults = _brought()
    faults[1].failure = "no decode was ready"
    run = _run(_records(), faults)

    assert run.verdict == "FAILED"
    assert "1 of 2 faults brought; kill decode-1: no decode was ready" in run.verdict_reason


def test_faults_name_what_is_wrong_with_them() -> None:
    with pytest.raises(ConfigError, match="every at_s must be before the end"):
        parse_scenario({**VALUES, "phases": {"measure_s": 20}}, "test")
    with pytest.raises(ConfigError, match=r"faults\.0\.action"):
        parse_scenario(
            {**VALUES, "faults": [{"at_s": 1, "action": "burn", "process": "x"}]}, "test"
        )


def test_results_without_faults_keep_their_digest() -> None:
    """Stored results are compared by it."""
    plain = {key: value for key, value in VALUES.items() if key != "faults"}
    scenario = parse_scenario(plain, "test")
    assert scenario.digest == "d7d1b4da7450f73b"
    assert _scenario().digest != scenario.digest
