"""What a router remembers of its requests: bounded, summed up, stages that add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.api import RequestTiming
from services.router.reports import RecentRequests, RequestReport, RunningRequest
from services.router.timing import STAGES, Marks, StageTimes, Whereabouts, attribute, ttft_stages


def report(number: int, outcome: str = "ok", *, at: float = 0.0, **fields: object) -> RequestReport:
    """Make a report of a request with 100 prompt tokens."""
    values: dict[str, object] = {
        "prompt_tokens": 100, "cached_tokens": 40, "completion_tokens": 5, "ended_at": at, **fields,
    }  # fmt: skip
    return RequestReport(f"r{number}", "", "toy", 0.0, outcome, **values)  # type: ignore[arg-type]  # values of fields


def running(tokens: int) -> RunningRequest:
    """Make a request under way."""
    return RunningRequest("x", "", "toy", "decode", 0.0, 9.0, "REMOTE", ("d0",), 10, tokens, 8, 1)


def test_oldest_report_is_forgotten_first() -> None:
    recent = RecentRequests(2)
    for number in range(3):
        recent.add(report(number))
    assert recent.find("r0") is None
    assert [found.request_id for found in recent.newest(9)] == ["r2", "r1"]
    assert [found.request_id for found in recent.newest(1)] == ["r2"]


def test_router_that_keeps_no_reports_still_counts() -> None:
    recent = RecentRequests(0)
    recent.add(report(1))
    assert recent.newest(9) == ()
    assert recent.totals(()).requests_ok == 1


def test_totals_count_what_ended_and_what_is_under_way() -> None:
    recent = RecentRequests(10)
    recent.add(report(1))
    recent.add(report(2, "worker_lost", cached_tokens=0))
    recent.add(report(3, "cancelled"))
    totals = recent.totals([running(7), running(2)])
    assert (totals.requests_ok, totals.requests_failed) == (1, 1)
    assert (totals.prompt_tokens, totals.cached_tokens) == (100, 40)
    assert totals.completion_tokens == 3 * 5 + 9


def test_latencies_are_those_of_the_window() -> None:
    recent = RecentRequests(10)
    slow = RequestTiming(ttft_us=9_000_000, e2e_us=9_000_000)
    recent.add(report(1, at=0.0, timing=slow))
    for number, ttft_us in enumerate((10_000, 30_000, 20_000)):
        timing = RequestTiming(ttft_us=ttft_us, e2e_us=ttft_us + 8_000)
        recent.add(report(10 + number, at=50.0, timing=timing))
    recent.add(report(20, "overloaded", at=51.0))
    latencies = recent.latencies(55.0)
    assert latencies.num_requests == 3
    assert (latencies.ttft_p50_s, latencies.ttft_p99_s) == (0.02, 0.03)
    assert latencies.tpot_p50_s == pytest.approx(0.002)
    assert RecentRequests(1).latencies(1.0).num_requests == 0


times = st.floats(min_value=0, max_value=100)


@given(st.lists(times, min_size=4, max_size=4), times, st.integers(0, 10**8), st.integers(0, 10**8))
def test_stages_add_up_to_ttft_and_to_the_whole_whatever_workers_report(
    moments: list[float], rest: float, queue_us: int, prefill_us: int
) -> None:
    """A worker's clock may run wild: what it says is fitted between what the router saw."""
    received, sent, first, shown = sorted(moments)
    marks = Marks(received, sent=sent, first_token=first, first_frame=shown)
    stages = StageTimes(queue_prefill_us=queue_us, prefill_us=prefill_us)
    timing = attribute(marks, stages, shown + rest, has_decode_report=False, where=Whereabouts())
    split = ttft_stages(marks, timing)
    assert sum(us for _, us in split) == timing.ttft_us
    assert all(us >= 0 for _, us in split)
    assert sum(getattr(timing, f"{name}_us") for name in STAGES) == timing.e2e_us


def test_request_without_a_first_frame_has_no_stages_of_it() -> None:
    marks = Marks(0.0, sent=1.0)
    timing = attribute(marks, StageTimes(), 2.0, has_decode_report=False, where=Whereabouts())
    assert ttft_stages(marks, timing) == ()
