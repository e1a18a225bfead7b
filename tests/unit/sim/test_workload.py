from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from services.sim.groups import GroupLoad, group_workload
from services.sim.mooncake import read_trace
from services.sim.trace_file import BadTrace
from services.sim.workload import Arrival, Workload, ideal_hit

ROW = {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [4, 9]}


def write(path: Path, *rows: object) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_reads_a_trace_in_order_and_faster(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", ROW, {**ROW, "timestamp": 500})
    workload = read_trace(path, 2.0)
    assert workload.arrivals == (Arrival(0.25, 700, 3, (4, 9)), Arrival(0.75, 700, 3, (4, 9)))
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(packed, 2.0) == workload


@pytest.mark.parametrize(
    "row",
    [
        [],
        "x",
        {**ROW, "timestamp": -1},
        {**ROW, "timestamp": float("nan")},
        {**ROW, "input_length": 0},
        {**ROW, "hash_ids": [1]},
        {**ROW, "hash_ids": [1, "2"]},
        {**ROW, "hash_ids": [1, True]},
        {"timestamp": 0},
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, row: object) -> None:
    with pytest.raises(BadTrace, match="line 2"):
        read_trace(write(tmp_path / "t.jsonl", ROW, row))


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="no requests"):
        read_trace(write(tmp_path / "t.jsonl"))


def test_ideal_hit_counts_leading_runs_only() -> None:
    arrivals = [Arrival(0, 1536, 1, units) for units in ((1, 2, 3), (1, 2, 4), (9, 2, 3))]
    assert ideal_hit(Workload("w", 512, tuple(arrivals))) == 2 / 9


def test_equal_prefixes_have_equal_names_and_a_part_of_a_stride_has_none() -> None:
    workload = Workload("w", 512, ())
    long, short = Arrival(0, 1024, 1, (7, 8)), Arrival(0, 700, 1, (7, 9))
    assert len(workload.names(long)) == 16 * 8
    assert len(workload.names(short)) == 700 // 64 * 8
    assert workload.names(long)[:64] == workload.names(short)[:64]
    assert workload.names(long)[64:72] != workload.names(short)[64:72]


def test_groups_share_what_they_should_and_arrive_in_bursts() -> None:
    load = GroupLoad(8.0, 400, burst=8, num_groups=3, num_users=2)
    workload = group_workload(load, seed=1)
    assert workload == group_workload(load, seed=1)
    assert len({a.at_s for a in workload.arrivals}) == 50
    assert len({a.units for a in workload.arrivals}) == 6
    assert len({a.units[:94] for a in workload.arrivals}) == 3
    rate = len(workload.arrivals) / workload.arrivals[-1].at_s
    assert 4.0 < rate < 16.0
