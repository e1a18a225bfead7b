"""From records to a result: every figure by hand."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.analysis import Origin, analyse
from loadtest.percentiles import share_of
from loadtest.records import Chunk, PoolSize, RequestRecord, Sample, Status
from loadtest.result import PoolPoint, RunResult
from loadtest.run_log import RunLog
from loadtest.scenario import Scenario, parse_scenario
from loadtest.target import TargetFacts
from tests.support.load_records import make_record


def _scenario(**more: Any) -> Scenario:
    values: dict[str, Any] = {
        "name": "known",
        "arrivals": {"kind": "constant", "rate_rps": 10.0},
        "workload": {"kind": "fixed", "isl": 100, "osl": 11},
        "slo": {"ttft_s": 0.5},
        "phases": {"warmup_s": 10.0, "measure_s": 100.0, "cooldown_s": 10.0},
    }
    return parse_scenario(values | more, "test")


def _run(records: list[RequestRecord], scenario: Scenario | None = None, **more: Any) -> RunResult:
    scenario = scenario or _scenario()
    for record in records:
        record.phase = scenario.phases.at(record.scheduled_s)
    log = RunLog(TargetFacts("grpc", "127.0.0.1:1"), "2026-01-01T00:00:00Z", records)
    log.duration_s = 121.0
    for name, value in more.items():
        setattr(log, name, value)
    return analyse(log, scenario, Origin({"cores": 2}, "abc"))


def _even() -> list[RequestRecord]:
    """Ten a second for 120 s, each 0.2 s long."""
    return [make_record(n, n / 10) for n in range(1200)]


def test_only_the_measured_phase_counts() -> None:
    records = _even()
    for record in records[:100] + records[1100:]:
        record.status = Status.ERROR
    result = _run(records)
    assert result.counts["measured"] == result.counts["ok"] == 1000
    assert result.counts["not_measured"] == 200
    assert result.verdict == "OK", result.verdict_reason
    assert result.attainment is not None
    assert result.attainment.value == 1
    assert result.rates == {
        "offered_rps": pytest.approx(10.0),
        "achieved_rps": pytest.approx(10.0),
        "goodput_rps": pytest.approx(10.0),
        "output_tok_s": pytest.approx(110, rel=0.01),
        "input_tok_s": pytest.approx(1000, rel=0.01),
    }


def test_latencies_count_from_the_scheduled_time_even_if_the_client_was_late() -> None:
    """A client that waits before it sends hides a stalled server from whoever counts from there."""
    records = _even()
    for record in records:
        record.sent_s = record.scheduled_s + 0.08
    result = _run(records)
    median = {name: share_of(d, 0.5) for name, d in result.distributions.items()}
    assert median["ttft_ms"] == pytest.approx(100)
    assert median["ttft_sent_ms"] == pytest.approx(20)
    assert median["dispatch_delay_ms"] == pytest.approx(80)
    assert result.verdict == "CLIENT_BOUND"


def test_tokens_that_came_in_one_chunk_share_its_gap() -> None:
    """Per chunk the gap would read 40 ms: four times what a reader of tokens waits."""
    records = _even()
    for record in records:
        times = (record.scheduled_s + 0.1 + n * 0.04 for n in range(6))
        record.chunks = [Chunk(at_s, 4 if n else 1) for n, at_s in enumerate(times)]
        record.done_s = record.chunks[-1].at_s
    figures = _run(records).distributions
    assert share_of(figures["itl_ms"], 0.5) == pytest.approx(10)
    assert figures["itl_ms"].count == 1000 * 20
    assert share_of(figures["tpot_ms"], 0.5) == pytest.approx(10)
    assert share_of(figures["max_stall_ms"], 0.5) == pytest.approx(40)


def test_a_handoff_shows_in_the_second_token() -> None:
    records = _even()
    for record in records:
        first, *rest = record.chunks
        record.chunks = [first, *(Chunk(chunk.at_s + 0.05, 1) for chunk in rest)]
        record.done_s = record.chunks[-1].at_s
    figures = _run(records).distributions
    assert share_of(figures["handoff_gap_ms"], 0.5) == pytest.approx(50)
    assert share_of(figures["ttft_ms"], 0.5) == pytest.approx(100)


def test_failures_are_not_good_and_in_no_latency() -> None:
    records = _even()
    for record, status in zip(
        records[200:203], (Status.ERROR, Status.TIMEOUT, Status.REJECTED), strict=True
    ):
        record.status, record.code = status, "why"
    result = _run(records)
    assert result.attainment is not None
    assert result.attainment.value == pytest.approx(0.997)
    assert result.errors == {"why": 3}
    assert result.distributions["ttft_ms"].count == 997


def test_requests_open_at_the_end_are_counted_and_judged_only_where_they_are_late() -> None:
    records = _even()
    records[500] = make_record(500, 50.0, ttft_s=None)  # waits since 71 s for its first token
    records[600] = make_record(600, 60.0, done_s=None, status=Status.CENSORED)  # had it in time
    result = _run(records)
    assert result.counts["censored"] == 2
    assert result.attainment is not None
    assert (result.attainment.count, result.attainment.value) == (999, 998 / 999)
    assert result.distributions["ttft_ms"].count == 998


def test_groups_split_what_differs_and_say_nothing_of_what_does_not() -> None:
    records = _even()
    for record in records:
        record.tenant = "same"
        record.kind = "long" if record.number % 10 == 0 else "short"
        record.cached_tokens = 50 if record.number % 2 else 0
    result = _run(records)
    assert [group.name for group in result.groups] == [
        "kind long",
        "kind short",
        "cache hit",
        "cache miss",
    ]
    assert [group.num_requests for group in result.groups] == [100, 900, 500, 500]
    assert result.figures["hit_ratio"] == 0.25


def test_bands_add_up_to_the_time_they_explain() -> None:
    records = [make_record(n, n / 10, 0.1 + n * 1e-5) for n in range(1200)]
    for record in records:
        record.stages_ms = {"prefill": 60.0, "queue_prefill": 20.0, "decode": 100.0}
    result = _run(records)
    assert [band.num_requests for band in result.ttft_bands] == [500, 400, 90, 10]
    for band in result.ttft_bands:
        assert sum(band.stages_ms.values()) + band.outside_ms == pytest.approx(band.ttft_ms)
        assert "decode" not in band.stages_ms
    assert result.stages_ms["decode"].count == 1000


def test_the_timeline_keeps_every_request_and_token() -> None:
    records = _even()
    records[300].status = Status.ERROR
    sizes = (PoolSize("decode", desired=3, ready=2, pending=1, draining=0, limited_by="rate"),)
    samples = [
        Sample(at / 2, 1, replicas={"decode": 2}, queued=4, pools=sizes) for at in range(242)
    ]
    points = _run(records, samples=samples).timeline
    assert len(points) <= 130
    assert sum(point.sent for point in points) == 1200
    assert (sum(p.finished for p in points), sum(p.failed for p in points)) == (1199, 1)
    assert sum(point.tokens for point in points) == 13_200
    assert points[-1].in_flight == 0
    assert {(point.replicas["decode"], point.queued) for point in points} == {(2, 4)}
    told = PoolPoint(desired=3, ready=2, pending=1, draining=0, limited_by="rate")
    assert all(point.pools == {"decode": told} for point in points)


def test_without_a_warm_up_a_slow_start_is_cut_off() -> None:
    scenario = _scenario(phases={"measure_s": 120.0})
    records = [make_record(n, n / 10, 2.0 - n * 0.01 if n < 190 else 0.1) for n in range(1200)]
    result = _run(records, scenario)
    first = 1200 - result.counts["measured"]
    assert 150 <= first <= 200
    assert result.counts["not_measured"] == first
    assert _run(_even(), scenario).counts["measured"] == 1200


def test_an_interrupted_run_is_measured_as_far_as_it_went() -> None:
    records = [record for record in _even() if record.scheduled_s < 60]
    result = _run(records, duration_s=60.0, is_interrupted=True)
    assert result.counts["measured"] == 500
    assert result.rates["offered_rps"] == pytest.approx(10)
    assert result.verdict == "INTERRUPTED", result.verdict_reason


def test_a_run_that_was_stopped_in_its_warm_up_has_no_figures() -> None:
    result = _run([make_record(n, n / 10) for n in range(50)], duration_s=5.0)
    assert (result.verdict, result.checks, result.rates) == ("FAILED", (), {})


def test_nothing_measured_is_a_failure_and_no_number() -> None:
    result = _run([])
    assert (result.verdict, result.verdict_reason) == ("FAILED", "no request was measured")
    assert result.distributions == {}
    assert result.timeline[0].sent == 0


def test_a_burst_is_recognised_by_its_arrivals() -> None:
    arrivals = {"kind": "burst", "base_rps": 1.0, "peak_rps": 6.0, "on_s": 60.0, "off_s": 60.0}
    result = _run(_even(), _scenario(arrivals=arrivals))
    assert result.figures["slo_recovery_s"] == 0
    assert "saturation" not in {check.name for check in result.checks}
