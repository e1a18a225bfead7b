from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.cli import exits
from services.cli.main import run
from services.sim import performance

SLICE = Path(__file__).parents[2] / "data" / "mooncake_conversation_first_120.jsonl.gz"
SMALL = ("--workload", "fixed:500,20,4", "--requests", "40")
PAIR = (*SMALL, "--prefill", "1", "--decode", "1")
PROTOTYPE = Path(performance.__file__).parent / "models" / "prototype.json"


def sim(*words: str) -> int:
    """Run the command."""
    return run(["sim", *words])


def test_a_trace_is_simulated_and_told_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--trace", str(SLICE), "--prefill", "3", "--decode", "2", "--policy", "all", "--json")
    assert sim(*words) == exits.OK
    told = json.loads(capsys.readouterr().out)
    assert told["workers"] == {"prefill": 3, "decode": 2, "aggregated": 0}
    assert told["performance"]["name"] == "prototype"
    ours = told["policies"]["ours"]
    assert ours["status"] == {"ok": 120}
    assert ours["ttft_s"]["p50"] <= ours["ttft_s"]["p95"] <= ours["ttft_s"]["p99"]
    assert set(ours["pools"]) == {"prefill", "decode"}
    # It arrives, is computed, handed off and answered; the loads and hints told are counted apart.
    assert ours["events_per_request"] == pytest.approx(ours["num_events"] / 120)
    assert 2.5 < ours["events_per_request"] < 4.1
    assert ours["num_reports"] > 120
    assert len(told["policies"]) == 6


def test_a_table_has_a_row_for_the_policy_and_a_line_for_the_pool(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sim(*SMALL, "--aggregated", "2") == exits.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fixed 500 in, 20 out at 4/s: 40 requests on 2 aggregated")
    assert any(line.startswith("ours ") for line in lines)
    assert any(line.startswith("aggregated (ours): 2 workers at most") for line in lines)
    assert lines[-1].endswith("40 ok")


def test_statistics_of_a_trace_need_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("--trace", str(SLICE), "--stats", "--json") == exits.OK
    told = json.loads(capsys.readouterr().out)
    assert (told["num_requests"], set(told["peak_to_mean"])) == (120, {"1", "10"})
    assert sim("--trace", str(SLICE), "--stats") == exits.OK
    assert "ideal hit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("--prefill", "1", "--decode", "1"),
        (*SMALL, "--trace", str(SLICE), "--aggregated", "1"),
        SMALL,
        (*SMALL, "--prefill", "1"),
        (*SMALL, "--prefill", "1", "--decode", "1", "--aggregated", "1"),
        (*SMALL, "--aggregated", "1", "--policy", "best"),
        ("--workload", "fixed:500", "--aggregated", "1"),
        ("--trace", str(SLICE.parent / "absent.jsonl"), "--aggregated", "1"),
        ("--trace", str(SLICE.parent / "README.md"), "--aggregated", "1"),
        (*SMALL, "--aggregated", "1", "--model-file", str(SLICE)),
        (*PAIR, "--fail", "decode-0"),
        (*PAIR, "--fail", "decode-1@3"),
        (*PAIR, "--fail", "aggregated-0@3"),
        (*PAIR, "--resize", "decode=2"),
        (*PAIR, "--resize", "aggregated=2@1"),
        (*PAIR, "--resize", "decode=9999@1"),
        (*PAIR, "--group", "decode=1"),
        (*PAIR, "--group", f"both=1:{SLICE}"),
        (*PAIR, "--group", f"decode=1:{SLICE.parent / 'absent.json'}"),
        (*PAIR, "--group", f"aggregated=1:{PROTOTYPE}"),
        (*PAIR, "--admission", "--policy", "random"),
    ],
)
def test_impossible_arguments_are_refused(words: tuple[str, ...]) -> None:
    assert sim(*words) == exits.USAGE


def test_a_profile_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    assert run(["profile", "--output", str(tmp_path / "absent" / "m.json")]) == exits.USAGE


def told(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Run the command and return what it says of our policy."""
    assert sim(*words, "--json") == exits.OK
    return json.loads(capsys.readouterr().out)["policies"]["ours"]


def test_pools_are_resized_and_workers_die_when_that_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quick = ("--resize", "decode=3@1", "--resize", "decode=1@4", "--drain-s", "5")
    resized = told(capsys, *PAIR, *quick)
    assert resized["pools"]["decode"]["peak_workers"] == 3
    assert resized["status"] == {"ok": 40}
    dead = told(capsys, *PAIR, "--fail", "prefill-0@2.5", "--fail", "decode-0@5")
    assert dead["status"]["refused"] > 0
    assert dead["refused"] == {"no_workers": dead["status"]["refused"]}
    # One that is not there yet may fail, too.
    assert told(capsys, *PAIR, *quick, "--fail", "decode-2@3")["status"] == {"ok": 40}


def test_workers_of_another_kind_join_a_pool(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim(*PAIR, "--group", f"prefill=2:{PROTOTYPE}", "--json") == exits.OK
    told = json.loads(capsys.readouterr().out)
    assert told["workers"] == {"prefill": 3, "decode": 1, "aggregated": 0}
    groups = ("--group", f"prefill=1:{PROTOTYPE}", "--group", f"decode=1:{PROTOTYPE}")
    assert sim(*SMALL, *groups) == exits.OK


def test_admission_tells_the_share_that_it_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flood = ("--workload", "fixed:4000,5,40", "--requests", "120", "--prefill", "1", "--decode")
    found = told(capsys, *flood, "1", "--admission", "--slo-ttft", "1")
    assert found["refused_share"] > 0.5
    assert set(found["refused"]) == {"ttft_slo"}
    assert found["ttft_s"]["p99"] <= 1.0
    assert sim(*flood, "1", "--admission", "--slo-ttft", "1") == exits.OK
    assert "ttft_slo)" in capsys.readouterr().out.splitlines()[-1]
