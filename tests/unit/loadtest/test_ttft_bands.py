"""Stages of quick and of slow requests add up to their times."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.records import Phase, RequestRecord, Status
from loadtest.ttft_bands import ttft_bands
from tests.support.load_records import make_record


def _record(number: int, **more: Any) -> RequestRecord:
    """One that waited a millisecond longer than the one before."""
    stages_ms = {"queue": float(number), "prefill": 50.0, "decode": 900.0}
    ttft_s = (number + 60.0) / 1e3
    return make_record(number, ttft_s=ttft_s, stages_ms=stages_ms, **more)


def test_requests_are_split_by_rank_and_only_stages_before_the_first_token_count() -> None:
    bands = ttft_bands([_record(number) for number in reversed(range(100))])
    assert [(band.name, band.num_requests) for band in bands] == [
        ("fastest half", 50),
        ("50 to 90 %", 40),
        ("90 to 99 %", 9),
        ("slowest 1 %", 1),
    ]
    assert bands[0].stages_ms == {"queue": 24.5, "prefill": 50.0}
    assert bands[-1].stages_ms == {"queue": 99.0, "prefill": 50.0}
    for band in bands:
        assert band.outside_ms == pytest.approx(10.0)
        assert sum(band.stages_ms.values()) + band.outside_ms == pytest.approx(band.ttft_ms)


def test_what_is_not_measured_or_tells_no_stages_is_left_out() -> None:
    left_out = [
        _record(1, phase=Phase.WARMUP),
        _record(2, status=Status.ERROR),
        make_record(3),
        make_record(4, ttft_s=None),
    ]
    assert ttft_bands(left_out) == ()
    assert [band.num_requests for band in ttft_bands([*left_out, _record(5)])] == [1]
