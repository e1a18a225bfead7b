"""All files of a result: the raw records, the figures, and the forms people and programs read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from loadtest.junit import junit
from loadtest.metrics_file import metrics_file
from loadtest.pools_file import POOLS_FILE, pools_file
from loadtest.raw_file import encode_records
from loadtest.records import RequestRecord, Sample
from loadtest.report.curves import scenario_name
from loadtest.report.page import report_page
from loadtest.result import CompareResult, RunResult, SearchResult
from loadtest.results import RAW_FILE, RESULT_FILE, digest, directory_name, write_directory
from loadtest.summary import summary

REPORT_FILE = "report.html"


def save_run(
    root: Path,
    result: RunResult,
    records: Sequence[RequestRecord],
    samples: Sequence[Sample] = (),
) -> Path:
    """Write a run into a directory of its own; the result there names and seals its raw file."""
    raw = encode_records(records)
    sealed = result.model_copy(update={"raw_file": RAW_FILE, "raw_sha256": digest(raw)})
    files = {RAW_FILE: raw}
    if (pools := pools_file(samples)) is not None:
        files[POOLS_FILE] = pools
    return _save(root, scenario_name(result.scenario), sealed, files)


def save_search(root: Path, result: SearchResult) -> Path:
    """Write a search into a directory of its own."""
    return _save(root, f"{scenario_name(result.scenario)}-search", result, {})


def save_compare(
    root: Path,
    result: CompareResult,
    records: tuple[Sequence[RequestRecord], Sequence[RequestRecord]] | None = None,
) -> Path:
    """Write a comparison into a directory of its own, with the raw files of arms that it ran."""
    name = f"{result.name_a}-or-{result.name_b}"
    if records is None:
        return _save(root, name, result, {})
    raw = {f"a.{RAW_FILE}": encode_records(records[0]), f"b.{RAW_FILE}": encode_records(records[1])}
    (file_a, raw_a), (file_b, raw_b) = raw.items()
    a = result.a.model_copy(update={"raw_file": file_a, "raw_sha256": digest(raw_a)})
    b = result.b.model_copy(update={"raw_file": file_b, "raw_sha256": digest(raw_b)})
    return _save(root, name, result.model_copy(update={"a": a, "b": b}), raw)


def _save(
    root: Path,
    name: str,
    result: RunResult | SearchResult | CompareResult,
    more: dict[str, bytes],
) -> Path:
    run = result.b if isinstance(result, CompareResult) else result
    started_at = datetime.fromisoformat(run.started_at)
    files = {
        **more,
        RESULT_FILE: result.model_dump_json(indent=1).encode() + b"\n",
        "summary.md": summary(result).encode(),
        "junit.xml": junit(result).encode(),
        "metrics.prom": metrics_file(result),
        REPORT_FILE: report_page(result).encode(),
    }
    return write_directory(root, directory_name(name, started_at), files)
