from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli import exits
from services.cli.main import run

SLICE = Path(__file__).parents[2] / "data" / "mooncake_conversation_first_120.jsonl.gz"
SMALL = ("--workload", "fixed:500,20,4", "--requests", "40")


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
    ],
)
def test_impossible_arguments_are_refused(words: tuple[str, ...]) -> None:
    assert sim(*words) == exits.USAGE


def test_a_profile_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    assert run(["profile", "--output", str(tmp_path / "absent" / "m.json")]) == exits.USAGE
