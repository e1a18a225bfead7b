"""One place knows which form a trace has, and errors name what is wrong with a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.sim.recorded import form_of, read_recorded
from services.sim.trace_file import BadTrace

ROW = {"timestamp": 0, "input_length": 512, "output_length": 3, "hash_ids": [1]}


def test_the_name_tells_the_form() -> None:
    for name in ("a.jsonl", "a.csv.jsonl", "a.jsonl.gz"):
        assert form_of(Path(name)) == "mooncake"
    for name in ("a.csv", "a.jsonl.csv.gz"):
        assert form_of(Path(name)) == "azure"
    for name in ("a", "a.txt", "a.jsonl.bz2", "a.gz", "csv"):
        with pytest.raises(BadTrace, match="is neither"):
            form_of(Path(name))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"timestamp": 0}, "it lacks input_length, output_length, hash_ids"),
        ([1, 2], "it is no JSON object"),
        (ROW | {"input_length": 513}, "513 tokens are not 1 blocks of 512"),
    ],
)
def test_a_bad_row_is_told_once_and_in_words(tmp_path: Path, row: Any, told: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps(row)}\n")
    with pytest.raises(BadTrace) as caught:
        read_recorded(path)
    assert str(caught.value) == f"line 2 of t.jsonl is no request: {told}"


def test_a_bad_column_is_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for row, told in (
        ("2023-11-16,1", "it has 2 columns, and 3 are needed"),
        ("2023-11-16,1,x", "x is no number of tokens"),
        ("never,1,1", "TIMESTAMP is no time"),
    ):
        path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{row}\n")
        with pytest.raises(BadTrace) as caught:
            read_recorded(path)
        assert str(caught.value) == f"line 2 of t.csv is no request: {told}"
