"""What each check catches, and what it lets pass."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest

from loadtest.checks import Evidence, Window, check_run, judge
from loadtest.records import RequestRecord, Sample, Status
from loadtest.result import Check
from tests.support.load_records import first_come_first_served, make_record


def _poisson(rate: float, until_s: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    gaps = (rng.expovariate(rate) for _ in range(int(rate * until_s * 2)))
    return [at for at in accumulate(gaps) if at < until_s]


def _check(name: str, records: list[RequestRecord], **more: Any) -> Check:
    window = more.pop("window", Window(0.0, 100.0))
    ended_s = max([window.end_s, *(r.done_s or 0.0 for r in records)])
    more = {"measured": records, "everything": records} | more
    checks = check_run(Evidence(window=window, ended_s=ended_s, **more))
    return next(check for check in checks if check.name == name)


def _even(count: int = 1000, **more: Any) -> list[RequestRecord]:
    return [make_record(n, n * 100 / count, **more) for n in range(count)]


def test_littles_law_holds_in_records_and_catches_requests_nobody_sampled() -> None:
    records = _even(ttft_s=0.4)  # 10 a second, 0.5 s each
    assert _check("littles_law", records).is_ok
    for in_flight, is_ok in ((5, True), (6, False), (4, False)):
        samples = [Sample(at_s=float(n), in_flight=in_flight) for n in range(100)]
        assert _check("littles_law", records, samples=samples).is_ok is is_ok


def test_littles_law_counts_requests_that_never_ended() -> None:
    records = _even(ttft_s=0.4)
    records[500] = make_record(500, 50.0, ttft_s=None)
    check = _check("littles_law", records)
    assert check.value == pytest.approx(0.01, abs=0.02)


@pytest.mark.parametrize(
    ("ttft_s", "late_s", "is_ok"),
    [(0.1, 0.004, True), (0.1, 0.006, False), (1.0, 0.019, True), (1.0, 0.021, False)],
)
def test_dispatch_may_be_five_ms_late_or_two_percent_of_ttft(
    ttft_s: float, late_s: float, is_ok: bool
) -> None:
    records = _even(ttft_s=ttft_s)
    for record in records[::50]:  # 2 %: the 99th percentile is among them
        record.sent_s = record.scheduled_s + late_s
    assert _check("dispatch", records).is_ok is is_ok


def test_an_offline_load_has_no_instants_to_be_late_for() -> None:
    records = _even()
    for record in records:
        record.sent_s = record.scheduled_s + 9.0
    window = Window(0, 100)
    for has_instants in (True, False):
        evidence = Evidence(window, 100.0, records, records, has_instants=has_instants)
        names = [check.name for check in check_run(evidence)]
        assert ("dispatch" in names) == has_instants


def test_a_late_event_loop_is_told() -> None:
    lags = [Sample(at_s=n / 10, in_flight=0, loop_lag_s=0.02 if n % 50 == 0 else 0.001)
            for n in range(1000)]  # fmt: skip
    assert not _check("loop_lag", _even(), samples=lags).is_ok
    assert _check("loop_lag", _even(), samples=lags, window=Window(0.01, 5.0)).is_ok


def test_rate_sees_a_client_that_falls_behind_and_not_one_that_is_evenly_late() -> None:
    evenly = _even()
    for record in evenly:
        record.sent_s = record.scheduled_s + 3.0
    assert _check("rate", evenly).is_ok
    behind = _even()
    for record in behind:
        record.sent_s = record.scheduled_s * 1.02
    assert not _check("rate", behind).is_ok


def test_rate_counts_requests_that_were_never_sent() -> None:
    records = _even()
    for record in records[100:109]:
        record.sent_s = None
    assert _check("rate", records).is_ok
    for record in records[200:210]:
        record.sent_s = None
    check = _check("rate", records)
    assert not check.is_ok
    assert "19 requests never" in check.message


def test_closed_loops_have_no_rate_to_keep_and_moving_loads_no_steady_state() -> None:
    evidence = Evidence(Window(0, 100), 100.0, _even(), _even(), (), False, False)
    assert {check.name for check in check_run(evidence)} == {"littles_law", "dispatch"}


@pytest.mark.parametrize("seed", range(5))
def test_a_queue_below_capacity_is_steady_and_one_above_is_saturated(seed: int) -> None:
    """Two servers of 50 ms each serve 40 a second."""
    for rate, is_ok in ((30, True), (46, False)):
        records = list(first_come_first_served(_poisson(rate, 100, seed), 0.05, 2))
        check = _check("saturation", records)
        assert check.is_ok is is_ok
        assert ("falls further" in check.message) is not is_ok
        assert _check("steady", records).is_ok is is_ok


def test_requests_that_never_had_a_token_belong_to_the_queue_that_grows() -> None:
    """Left out, the answered ones alone would look as if nothing grew."""
    records = []
    for record in first_come_first_served(_poisson(60, 100, 1), 0.05, 2):
        ttft_s = record.ttft_s or 0.0
        is_late = ttft_s > 2
        records.append(
            make_record(
                record.number, record.scheduled_s, None, done_s=record.scheduled_s + 2,
                status=Status.TIMEOUT,
            )
            if is_late
            else record
        )  # fmt: skip
    growing = [record for record in records if record.scheduled_s < 8]
    assert not _check("saturation", growing, window=Window(0.0, 8.0)).is_ok


def test_a_drift_that_costs_nothing_is_no_saturation() -> None:
    records = [make_record(n, n / 10, ttft_s=0.4 + n * 1e-5) for n in range(1000)]
    assert _check("saturation", records).is_ok


def test_a_run_that_gets_ever_faster_never_settled() -> None:
    records = [make_record(n, n / 10, ttft_s=1.0 - n * 9e-4) for n in range(1000)]
    assert not _check("steady", records).is_ok
    assert "fall through the run" in _check("steady", records).message
    assert _check("steady", _even()).is_ok
    assert _check("steady", records[:49]).value is None


def test_the_verdict_names_what_makes_a_run_useless_first() -> None:
    def failing(*names: str) -> list[Check]:
        return [
            Check(name=n, is_ok=False, value=None, limit=None, message=f"{n} is why") for n in names
        ]

    records = [make_record()]
    assert judge([], records) == ("OK", "every check passed")
    assert judge(failing("steady", "saturation"), records) == ("SATURATED", "saturation is why")
    assert judge(failing("saturation", "dispatch"), records) == ("CLIENT_BOUND", "dispatch is why")
    assert judge(failing("littles_law"), records)[0] == "UNSTEADY"
    assert judge([], []) == ("FAILED", "no request was measured")
    broken = [make_record(n, status=Status.ERROR) for n in range(3)]
    assert judge([], broken) == ("FAILED", "none of 3 requests succeeded")
