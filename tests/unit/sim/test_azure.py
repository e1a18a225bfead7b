"""Traces in Azure's form: instants, lengths, nothing shared."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from services.sim.azure import read_azure
from services.sim.trace_file import BadTrace
from services.sim.workload import ideal_hit

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(tmp_path: Path, rows: str) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(HEAD + rows)
    return path


def test_reads_instants_to_a_tenth_of_a_microsecond(tmp_path: Path) -> None:
    path = write(tmp_path, "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,5,0\n")

    workload = read_azure(path, speedup=2)

    first, second = workload.arrivals
    assert first.at_s == 0
    assert second.at_s == pytest.approx(0.026, abs=1e-6)
    assert (first.num_tokens, first.output_tokens) == (4808, 10)
    assert (second.num_tokens, second.output_tokens) == (5, 1)
    assert ideal_hit(workload) == 0


@pytest.mark.parametrize(
    "row", ["2023-11-16,1,x", "never,1,1", "2023-11-16 18:17:03.9,1", "2023-11-16,-1,1"]
)
def test_a_bad_line_is_named(tmp_path: Path, row: str) -> None:
    with pytest.raises(BadTrace, match="line 2 of azure"):
        read_azure(write(tmp_path, row + "\n"))


@pytest.mark.parametrize("cut", [slice(0, 30), slice(20, None), slice(0, 0)])
def test_a_damaged_file_is_refused(tmp_path: Path, cut: slice) -> None:
    rows = "".join(f"2023-11-16 18:17:{n % 60:02},{n * 7919 % 1000},9\n" for n in range(400))
    whole = gzip.compress(write(tmp_path, rows).read_bytes())
    damaged = tmp_path / "azure.csv.gz"
    damaged.write_bytes(whole[cut])

    with pytest.raises(BadTrace):
        read_azure(damaged)


def test_a_field_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="cannot be read"):
        read_azure(write(tmp_path, "9" * 200_000 + ",1,1\n"))


def test_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("a,b\n")

    with pytest.raises(BadTrace, match="does not begin with"):
        read_azure(path)
