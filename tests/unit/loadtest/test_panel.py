"""What the panel tells of a run that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import io

import pytest
from rich.console import Console

from loadtest.panel import LiveState, Meter, plain_line, view, watch
from loadtest.records import Chunk, Phase, RequestRecord, Status
from loadtest.slo import Slo


def make_record(number: int, at_s: float, *, ttft_s: float | None = None) -> RequestRecord:
    record = RequestRecord(number, at_s, sent_s=at_s)
    if ttft_s is not None:
        end(record, ttft_s)
    return record


def end(record: RequestRecord, ttft_s: float) -> None:
    record.chunks.append(Chunk(record.scheduled_s + ttft_s, 1))
    record.done_s = record.scheduled_s + ttft_s
    record.status = Status.OK


def test_a_request_counts_as_in_flight_until_it_ended_and_is_counted_once() -> None:
    meter = Meter("t", None)
    records = [make_record(0, 0.5, ttft_s=0.1), make_record(1, 0.75)]
    first = meter.look(1.0, Phase.MEASURE, records)
    assert (first.in_flight, first.num_ended, first.offered_rps) == (1, 1, 2.0)
    end(records[1], 0.5)
    records.append(make_record(2, 1.5))
    second = meter.look(2.0, Phase.MEASURE, records)
    assert (second.in_flight, second.num_ended) == (1, 2)
    assert meter.look(2.0, Phase.MEASURE, records) == second


def test_rates_are_of_the_last_ten_seconds() -> None:
    records = [make_record(n, n * 0.25, ttft_s=0.125) for n in range(80)]
    state = Meter("t", None).look(20.0, Phase.MEASURE, records)
    assert state.offered_rps == 4.0
    assert state.achieved_rps == pytest.approx(4.0, abs=0.11)


def test_a_p99_is_told_only_when_a_thousand_requests_bear_it() -> None:
    records = [make_record(n, n * 0.01, ttft_s=(n + 1) / 1000) for n in range(1000)]
    few = Meter("t", None).look(20.0, Phase.MEASURE, records[:999])
    assert few.ttft_p99_ms is None
    assert few.ttft_greatest_ms == pytest.approx(999.0)
    enough = Meter("t", None).look(20.0, Phase.MEASURE, records)
    assert enough.ttft_p99_ms == pytest.approx(990.0)
    assert enough.ttft_p50_ms == pytest.approx(500.0)


def test_only_measured_requests_count_for_the_slo_and_failures_are_not_good() -> None:
    records = [make_record(n, 0.0, ttft_s=0.1) for n in range(4)]
    records[0].phase = Phase.WARMUP
    records[1].status = Status.TIMEOUT
    end(late := make_record(4, 0.0), 0.9)
    state = Meter("t", Slo(ttft_s=0.5)).look(2.0, Phase.MEASURE, [*records, late])
    assert state.attainment == 0.5
    assert state.num_failed == 1


STATE = LiveState(
    title="chat [bold] · grpc 127.0.0.1:50051",
    phase="measure",
    at_s=45.2,
    total_s=60.0,
    offered_rps=20.1,
    achieved_rps=19.9,
    in_flight=16,
    num_ended=900,
    num_failed=3,
    ttft_p50_ms=103.0,
    ttft_greatest_ms=450.0,
    attainment=0.991,
    replicas={"prefill": 2, "decode": 3},
)


def test_a_line_has_everything() -> None:
    assert plain_line(STATE) == (
        "measure 45 s of 60 s, 15 s left: rate 20.1/s offered, 19.9/s answered; "
        "requests 16 in flight, 900 ended, 3 failed; TTFT p50 103 ms, greatest 450 ms; "
        "SLO 99.1 % within; workers 2 prefill, 3 decode"
    )


def test_what_is_not_known_is_not_told() -> None:
    assert plain_line(LiveState("t", "warmup", 0.0)) == (
        "warmup 0 s: rate 0/s offered, 0/s answered; requests 0 in flight, 0 ended, 0 failed"
    )
    late = LiveState("t", "measure", 61.0, total_s=60.0)
    assert "61 s, waiting for the last" in plain_line(late)


def test_the_panel_shows_names_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(view(STATE))
    text = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "chat [bold] · grpc 127.0.0.1:50051" in text
    assert "━" * 23 + "·" * 7 + " 45 s of 60 s, 15 s left" in text
    assert "SLO       99.1 % within" in text


async def test_the_last_state_is_told_when_the_run_ends(capsys: pytest.CaptureFixture[str]) -> None:
    task = asyncio.ensure_future(watch(lambda: STATE))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    captured = capsys.readouterr()
    assert captured.err == plain_line(STATE) + "\n"
    assert captured.out == ""
