"""What a result leaves on disk, and what programs and people read of it."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest

from loadtest import results
from loadtest.junit import junit
from loadtest.metrics_file import metrics_file
from loadtest.outputs import save_compare, save_run, save_search
from loadtest.plots import numbers
from loadtest.raw_file import read_records
from loadtest.records import PoolSize, Sample
from loadtest.report.run_page import run_page
from loadtest.report_command import report
from loadtest.result import Check, RunResult
from loadtest.summary import summary
from services.common.errors import ConfigError
from tests.support.load_results import make_compare, make_records, make_run, make_search

FILES = ["junit.xml", "metrics.prom", "report.html", "result.json", "summary.md"]


@pytest.fixture(scope="module")
def run() -> RunResult:
    told = {"verdict": "OK", "verdict_reason": "every check passed"}
    return make_run(make_records(300)).model_copy(update=told)


def test_a_run_is_saved_with_everything_and_read_back(tmp_path: Path) -> None:
    records = make_records(40)
    run = make_run(records)
    directory = save_run(tmp_path / "results", run, records)
    assert directory.name == "chat_rt-20261130T120000Z"
    assert sorted(p.name for p in directory.iterdir()) == sorted([*FILES, "requests.jsonl.gz"])
    loaded = results.load_result(directory)
    assert isinstance(loaded, RunResult)
    written = loaded.model_copy(update={"raw_file": "", "raw_sha256": ""})
    assert written.model_dump_json() == run.model_dump_json()
    assert results.check_raw_file(loaded, directory) is None
    assert read_records(directory / loaded.raw_file) == records


def test_what_an_autoscaler_told_is_a_line_for_each_look_and_pool(tmp_path: Path) -> None:
    first = (PoolSize("prefill", 2, 1, 1, 0, "rate"), PoolSize("decode", 1, 1, 0, 0))
    second = (PoolSize("prefill", 2, 2, 0, 0), PoolSize("decode", 1, 1, 0, 0))
    looks = (((), 0.1), (first, 0.2), (first, 0.3), (second, 1.25))
    samples = [Sample(at, 3, queued=1, pools=pools) for pools, at in looks]
    directory = save_run(tmp_path, make_run(make_records(5)), make_records(5), samples)
    assert (directory / "pools.csv").read_text() == (
        "at_s,in_flight,queued,pool,desired,ready,pending,draining,limited_by\n"
        "0.2,3,1,prefill,2,1,1,0,rate\n"
        "0.2,3,1,decode,1,1,0,0,\n"
        "1.25,3,1,prefill,2,2,0,0,\n"
        "1.25,3,1,decode,1,1,0,0,\n"
    )


def test_a_raw_file_that_was_changed_is_noticed(tmp_path: Path) -> None:
    records = make_records(5)
    directory = save_run(tmp_path, make_run(records), records)
    loaded = results.load_result(directory)
    assert isinstance(loaded, RunResult)
    raw = directory / loaded.raw_file
    raw.write_bytes(gzip.compress(gzip.decompress(raw.read_bytes()).replace(b"acme", b"acne")))
    assert "its SHA-256 differs" in str(results.check_raw_file(loaded, directory))
    raw.unlink()
    assert "No such file" in str(results.check_raw_file(loaded, directory))


def test_nothing_is_ever_overwritten(tmp_path: Path) -> None:
    for _ in range(3):
        save_search(tmp_path, make_search())
    names = sorted(path.name for path in tmp_path.iterdir())
    first = "chat_rt-search-20261130T120000Z"
    assert names == [first, f"{first}-2", f"{first}-3"]


def test_a_directory_that_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written there: No such file"):
        results.write_directory(tmp_path, "x", {"a": b"1", "no/such/folder": b"2"})
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_keeps_the_raw_files_of_both_arms(tmp_path: Path) -> None:
    records = (make_records(5, 1), make_records(5, 2))
    directory = save_compare(tmp_path, make_compare(), records)
    loaded = results.load_result(directory / "result.json")
    assert loaded.kind == "compare"
    assert results.check_raw_file(loaded.a, directory) is None
    assert read_records(directory / loaded.b.raw_file) == records[1]


def test_names_of_directories_hold_nothing_that_a_path_could_mean() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert results.directory_name("../a b/Ü", at) == "a-b-20260102T030405Z"
    assert results.directory_name("..", at) == "run-20260102T030405Z"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Invalid JSON"),
        ("{}", "Unable to extract tag"),
        ('{"kind":"run"}', "run.scenario: Field required"),
    ],
)
def test_what_is_no_result_is_refused_with_its_place(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(results.ResultUnreadable, match=message):
        results.load_result(tmp_path)


def test_a_result_of_a_later_program_is_refused(run: RunResult, tmp_path: Path) -> None:
    told = run.model_dump(mode="json") | {"schema_version": 2}
    (tmp_path / "result.json").write_text(json.dumps(told))
    with pytest.raises(results.ResultUnreadable, match="schema_version"):
        results.load_result(tmp_path)


def test_limits_and_checks_are_test_cases(run: RunResult) -> None:
    checks = {check.name: check for check in run.checks}
    failed = checks["littles_law"].model_copy(
        update={"is_ok": False, "message": 'off by 9 % & "more"'}
    )
    bad = run.model_copy(update={"checks": (failed, checks["dispatch"]), "verdict": "UNSTEADY"})
    suite = ElementTree.fromstring(junit(bad)).find("testsuite")
    assert suite is not None
    outcomes = {
        str(case.get("name")): [part.tag for part in case] for case in suite.iter("testcase")
    }
    assert outcomes == {
        "verdict": ["failure"],
        "check littles_law": ["failure"],
        "check dispatch": ["system-out"],
        "slo": ["system-out"],
        "slo TTFT p95": ["system-out"],
        "slo TPOT p95": ["system-out"],
    }
    assert suite.get("failures") == "2"
    failure = suite.find("testcase[@name='check littles_law']/failure")
    assert failure is not None
    assert failure.get("message") == 'off by 9 % & "more"'


def test_a_check_that_had_nothing_to_look_at_has_not_passed(run: RunResult) -> None:
    unseen = Check(name="steady", is_ok=True, value=None, limit=None, message="3 answers only")
    told = run.model_copy(update={"checks": (unseen,)})
    case = ElementTree.fromstring(junit(told)).find(".//testcase[@name='check steady']")
    assert case is not None
    assert [child.tag for child in case] == ["skipped"]
    assert "* not judged: 3 answers only" in summary(told)
    assert ">not judged</span>" in run_page(told)


def test_a_limit_that_the_sample_cannot_judge_is_skipped_and_one_missed_fails() -> None:
    few = ElementTree.fromstring(junit(make_run(make_records(30))))
    assert [part.tag for part in few.findall(".//testcase[@name='slo TTFT p95']/*")] == ["skipped"]
    slow = ElementTree.fromstring(junit(make_run(make_records(300, slower=9.0))))
    found = slow.find(".//testcase[@name='slo TTFT p95']/failure")
    assert found is not None
    assert "at most 450 ms wanted" in str(found.get("message"))


def test_searches_and_comparisons_are_test_cases() -> None:
    search = ElementTree.fromstring(junit(make_search()))
    assert [suite.get("failures") for suite in search] == ["0"]
    compare = ElementTree.fromstring(junit(make_compare()))
    assert [(suite.get("failures"), suite.get("skipped")) for suite in compare] == [("3", "1")]


def test_texts_that_xml_cannot_hold_are_replaced(run: RunResult) -> None:
    odd = run.model_copy(update={"verdict_reason": "a\x00\x1b\ufffe]]><b>"})
    case = ElementTree.fromstring(junit(odd)).find(".//testcase/system-out")
    assert case is not None
    assert case.text == "a\ufffd\ufffd\ufffd]]><b>"


def test_metrics_are_gauges_in_seconds(run: RunResult) -> None:
    text = metrics_file(run).decode()
    labels = 'scenario="chat_rt",target="127.0.0.1:50051"'
    p50 = next(
        p.value for p in run.distributions["ttft_ms"].percentiles if p.share == 0.5 and p.value
    )
    told = f'isthmus_loadtest_latency_seconds{{name="ttft",quantile="0.5",{labels}}} {p50 / 1e3}'
    assert told in text.splitlines()
    assert 'quantile="0.99"' not in [line for line in text.splitlines() if 'name="ttft"' in line]
    measured = labels.replace(",", ',status="measured",')
    assert f"isthmus_loadtest_requests{{{measured}}} 300.0" in text.splitlines()
    best = f"isthmus_loadtest_search_best_rps{{{labels}}} 12.0"
    assert best in metrics_file(make_search()).decode().splitlines()
    assert b"isthmus_loadtest_duration_seconds" in metrics_file(make_compare())


def test_the_summary_has_the_figures_and_lets_no_text_be_markdown(run: RunResult) -> None:
    odd = run.model_copy(update={"errors": {"a|b\n# <img>": 3}, "notes": ("cut *short*",)})
    lines = summary(odd).splitlines()
    assert lines[0] == r"# chat\_rt: OK"
    assert r"| error a\|b \# \<img\> | 3 |" in lines
    assert any(line.startswith("* ok: ") for line in lines)
    assert r"* note: cut \*short\*" in lines
    (ttft,) = (line for line in lines if line.startswith("| TTFT | "))
    found = run.distributions["ttft_ms"]
    assert ttft.endswith(f"| {numbers.milliseconds(found.maximum or 0)} |")
    assert "| 12/s |" in summary(make_search())
    assert "| missed | the interval is below 95 % |" in summary(make_search())
    assert summary(make_compare()).startswith("# slower prefill against main: worse\n")


def test_a_report_is_made_anew_from_a_stored_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_search(tmp_path, make_search())
    page = directory / "report.html"
    content = page.read_bytes()
    page.unlink()
    report(directory)
    assert page.read_bytes() == content
    assert capsys.readouterr().out == f"{page}\n"
    report(directory / "result.json", out=tmp_path / "other.html")
    assert (tmp_path / "other.html").read_bytes() == content
    assert sorted(p.name for p in directory.iterdir()) == FILES


def test_a_report_says_that_raw_figures_are_others_and_that_there_is_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_run(tmp_path, make_run(make_records(5)), make_records(5))
    (directory / "requests.jsonl.gz").write_bytes(b"other")
    report(directory)
    assert "is not the file the figures were computed from" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="No such file"):
        report(tmp_path / "none.json")
