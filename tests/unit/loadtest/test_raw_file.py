"""The raw file gives back what was written, and refuses what is not one."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.raw_file import RawFileUnreadable, decode_records, encode_records, read_records
from loadtest.records import Chunk, Phase, RequestRecord, Status
from tests.support.load_results import make_records

TIMES = st.floats(-10.0, 1e7) | st.integers(0, 10**16).map(lambda ns: ns / 10**9)
COUNTS = st.integers(0, 2**53)
TEXT = st.text(max_size=8)
RECORDS = st.builds(
    RequestRecord,
    number=COUNTS,
    scheduled_s=TIMES,
    phase=st.sampled_from(Phase),
    session=TEXT,
    kind=TEXT,
    tenant=TEXT,
    priority=st.integers(0, 9),
    sent_s=st.none() | TIMES,
    chunks=st.lists(st.builds(Chunk, at_s=TIMES, num_tokens=COUNTS), max_size=5),
    done_s=st.none() | TIMES,
    isl=COUNTS,
    cached_tokens=st.none() | COUNTS,
    osl=COUNTS,
    num_heard=COUNTS,
    status=st.sampled_from(Status),
    code=TEXT,
    retries=COUNTS,
    is_coarse=st.booleans(),
    mode=TEXT,
    prefill_worker=TEXT,
    decode_worker=TEXT,
    migrations=COUNTS,
    handoff_bytes=COUNTS,
    stages_ms=st.dictionaries(TEXT, st.floats(0, 1e9), max_size=3),
)


@given(st.lists(RECORDS, max_size=4))
def test_records_come_back_exactly(records: list[RequestRecord]) -> None:
    assert decode_records(encode_records(records)) == records


def test_times_of_whole_nanoseconds_are_written_as_the_nanoseconds_between_them() -> None:
    record = RequestRecord(
        7,
        1.5,
        sent_s=1.500000250,
        chunks=[Chunk(1.6, 1), Chunk(1.625, 1)],
        done_s=1.625000001,
        status=Status.OK,
    )
    _, line = gzip.decompress(encode_records([record])).splitlines()
    assert json.loads(line) == {
        "number": 7,
        "status": "ok",
        "scheduled": 1_500_000_000,
        "sent": 250,
        "chunks": [99_999_750, 25_000_000],
        "tokens": 1,
        "done": 1,
    }


def test_equal_records_give_equal_bytes() -> None:
    records = make_records(20)
    assert encode_records(records) == encode_records([replace(record) for record in records])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"format":"other","version":1}'], "line 1: ValueError: not a file of isthmus-requests"),
        (['{"format":"isthmus-requests","version":2}'], "version 2, this program reads 1"),
        ([], "line 1: there is no header"),
        (["[]"], "line 1: TypeError"),
        (['{"format":"isthmus-requests","version":1}', '{"number":1}'], "line 2: KeyError"),
        (
            ['{"format":"isthmus-requests","version":1}', '{"number":1,"scheduled":0,"odd":1}'],
            "line 2: ValueError: unknown keys",
        ),
        (
            ['{"format":"isthmus-requests","version":1}', '{"number":"x","scheduled":0}'],
            "line 2: number: Input should be a valid integer",
        ),
        (
            ['{"format":"isthmus-requests","version":1}', '{"number":1,"scheduled":NaN}'],
            "line 2: ValueError",
        ),
        (
            [
                '{"format":"isthmus-requests","version":1}',
                '{"number":1,"scheduled":0,"chunks":[1,1],"tokens":[1]}',
            ],
            "line 2: ValueError",
        ),
    ],
)
def test_a_damaged_line_is_named(lines: list[str], message: str) -> None:
    with pytest.raises(RawFileUnreadable, match=message):
        decode_records(gzip.compress("\n".join(lines).encode()))


def test_a_file_that_was_cut_off_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl.gz"
    path.write_bytes(encode_records(make_records(50))[:-20])
    with pytest.raises(RawFileUnreadable, match=r"requests\.jsonl\.gz"):
        read_records(path)
