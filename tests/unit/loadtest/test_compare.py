"""Equal arms stay inconclusive, slower ones are found, and doubtful comparisons say so."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.analysis import Origin, analyse
from loadtest.compare import (
    EXIT_CODES,
    Arm,
    CompareRules,
    Threshold,
    compare,
    differences,
    holm,
)
from loadtest.records import RequestRecord, Status
from loadtest.result import CompareResult, MetricChange, RunResult
from loadtest.run_log import RunLog
from loadtest.scenario import parse_scenario
from loadtest.slo import Slo
from loadtest.target import TargetFacts
from tests.support.load_records import first_come_first_served, make_record

_BLOCKS, _BLOCK_S = 12, 10.0
_SLO = Slo(ttft_s=0.4)


def _result(**changes: Any) -> RunResult:
    scenario = parse_scenario(
        {
            "name": "arm",
            "arrivals": {"kind": "constant", "rate_rps": 1.0},
            "workload": {"kind": "fixed", "isl": 1, "osl": 1},
            "phases": {"measure_s": 1.0},
        },
        "test",
    )
    log = RunLog(TargetFacts("grpc", "127.0.0.1:1"), "2026-01-01T00:00:00Z", [make_record()])
    result = analyse(log, scenario, Origin({"cores": 2}, "abc"))
    return result.model_copy(update=changes)


def _arm(name: str, records: list[RequestRecord], **more: Any) -> Arm:
    return Arm(
        name=name,
        result=_result(),
        records=records,
        cluster_of=lambda record: int(record.scheduled_s // _BLOCK_S),
        length_s=_BLOCKS * _BLOCK_S,
        ended_s=_BLOCKS * _BLOCK_S,
        **more,
    )


def _queue(seed: int, noise: random.Random, extra_s: float = 0.0) -> list[RequestRecord]:
    """A queue of two servers at 80 % load whose blocks are now and then slow as a whole."""
    rng = random.Random(seed)
    records = []
    due = list(accumulate(rng.expovariate(8) for _ in range(1500)))
    slow = [noise.choice((0.0, 0.0, 0.03)) for _ in range(_BLOCKS)]
    for record in first_come_first_served(due, 0.2, 2):
        if record.scheduled_s >= _BLOCKS * _BLOCK_S:
            break
        later = slow[int(record.scheduled_s // _BLOCK_S)] + noise.expovariate(200) + extra_s
        records.append(
            make_record(
                record.number, record.scheduled_s, (record.ttft_s or 0) + later,
                itl_s=0.01 * noise.uniform(0.9, 1.1),
            )
        )  # fmt: skip
    return records


def _compared(a: list[RequestRecord], b: list[RequestRecord], **more: Any) -> CompareResult:
    rules = more.pop("rules", CompareRules())
    return compare(_arm("A", a), _arm("B", b), _SLO, rules, is_paired=True, **more)


def _metric(result: CompareResult, name: str) -> MetricChange:
    return next(metric for metric in result.metrics if metric.name == name)


def test_equal_arms_are_inconclusive_however_noisy() -> None:
    verdicts = []
    for seed in range(20):
        noise = random.Random(f"noise/{seed}")
        verdicts.append(_compared(_queue(seed, noise), _queue(seed, noise)).verdict)
    assert verdicts.count("inconclusive") >= 18


def test_ten_milliseconds_more_are_worse_and_the_interval_holds_them() -> None:
    noise = random.Random(5)
    result = _compared(_queue(1, noise), _queue(1, noise, extra_s=0.05))
    assert (result.verdict, EXIT_CODES[result.verdict]) == ("worse", 1)
    calm = [make_record(n, n / 20, 0.1 + (n % 7) * 1e-3) for n in range(2400)]
    slower = [make_record(n, n / 20, 0.11 + (n % 5) * 1e-3) for n in range(2400)]
    result = _compared(calm, slower)
    assert result.verdict == "worse"
    change = _metric(result, "ttft_p50_ms")
    assert [change.a, change.b] == pytest.approx([103, 112])
    assert change.low is not None
    assert change.high is not None
    assert change.low <= 9 + 1e-6
    assert change.high >= 9 - 1e-6
    paired = _metric(result, "ttft_paired_ms")
    assert paired.is_paired
    assert paired.change == pytest.approx(9, abs=1)


def test_swapped_arms_turn_the_verdict() -> None:
    slow = [make_record(n, n / 20, 0.2) for n in range(2400)]
    fast = [make_record(n, n / 20, 0.1) for n in range(2400)]
    assert EXIT_CODES[_compared(slow, fast).verdict] == 0
    assert EXIT_CODES[_compared(fast, slow).verdict] == 1


def test_goodput_and_cost_of_good_tokens_are_judged_too() -> None:
    """A third of B's answers is late: two thirds of the goodput, one and a half times the cost."""
    a = [make_record(n, n / 20, 0.1) for n in range(2400)]
    b = [make_record(n, n / 20, 0.5 if n % 3 == 0 else 0.1) for n in range(2400)]
    result = compare(
        _arm("A", a, usd_per_hour=3.6), _arm("B", b, usd_per_hour=3.6), _SLO, CompareRules(),
        is_paired=True,
    )  # fmt: skip
    goodput = _metric(result, "goodput_rps")
    assert [goodput.a, goodput.b] == pytest.approx([20, 13.33], abs=0.01)
    assert goodput.verdict == "worse"
    cost = _metric(result, "usd_per_m_good")
    assert cost.a == pytest.approx(1e6 * 120 * 0.001 / (2400 * 11))
    assert cost.b == pytest.approx((cost.a or 0) * 1.5)
    assert cost.verdict == "worse"


def test_a_difference_below_the_threshold_does_not_matter() -> None:
    a = [make_record(n, n / 20, 0.1) for n in range(2400)]
    b = [make_record(n, n / 20, 0.1005) for n in range(2400)]
    result = _compared(a, b)
    assert result.verdict == "inconclusive"
    assert _metric(result, "ttft_p50_ms").reason == "the change is too small to matter"
    rules = CompareRules(latency=Threshold(absolute=0.1, relative=0.0))
    assert _compared(a, b, rules=rules).verdict == "worse"
    rules = CompareRules(metrics={"ttft_p50_ms": Threshold(relative=0.0)})
    assert _metric(_compared(a, b, rules=rules), "ttft_p50_ms").verdict == "worse"


def test_few_blocks_never_convince() -> None:
    """With six blocks an order by chance is as clear in 2 of 64 cases."""
    a = [make_record(n, n / 20, 0.1) for n in range(1200)]
    b = [make_record(n, n / 20, 0.2) for n in range(1200)]
    result = _compared(a, b)
    assert result.verdict == "inconclusive"
    assert _metric(result, "ttft_p50_ms").p_value == pytest.approx(8 * 2 / 64)


def test_a_sample_that_cannot_bear_a_percentile_is_not_judged_by_it() -> None:
    a = [make_record(n, n / 4, 0.1) for n in range(480)]
    change = _metric(_compared(a, a), "ttft_p99_ms")
    assert (change.a, change.p_value, change.verdict) == (None, None, "inconclusive")
    assert "cannot bear" in change.reason


def test_what_could_not_be_judged_is_said_in_the_reason() -> None:
    few = [make_record(n, n / 4, 0.1) for n in range(8)]
    assert "not judged for want of requests: ttft_p50_ms" in _compared(few, few).verdict_reason
    more = [make_record(n, n / 4, 0.1) for n in range(480)]
    reason = _compared(more, more).verdict_reason
    assert "not judged for want of requests: ttft_p99_ms" in reason


def test_failures_take_part_in_goodput_and_in_no_latency() -> None:
    a = [make_record(n, n / 20, 0.1) for n in range(2400)]
    b = [make_record(n, n / 20, 0.1) for n in range(2400)]
    for record in b[::4]:
        record.status = Status.ERROR
    result = _compared(a, b)
    assert _metric(result, "ttft_p50_ms").change == 0
    assert _metric(result, "goodput_rps").verdict == "worse"
    assert _metric(_compared(a, []), "goodput_rps").b == 0


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=8))
def test_corrected_p_values_keep_their_order_and_never_shrink(p_values: list[float | None]) -> None:
    corrected = holm(p_values)
    asked = [(p, q) for p, q in zip(p_values, corrected, strict=True) if p is not None]
    assert [q is None for q in corrected] == [p is None for p in p_values]
    for p, q in asked:
        assert q is not None
        assert p <= q <= 1
    ordered = [q for _, q in sorted(asked, key=lambda pair: pair[0])]
    assert ordered == sorted(ordered, key=lambda q: q or 0.0)
    if asked:
        least = min(p for p, _ in asked)
        assert min(q for _, q in asked if q is not None) == min(1.0, least * len(asked))


def test_what_differs_beside_the_arms_is_told() -> None:
    same = _result()
    assert list(differences(same, same)) == []
    other = _result(
        seed=4, machine={"cores": 8}, verdict="CLIENT_BOUND", verdict_reason="late", commit="def"
    )
    assert list(differences(same, other)) == [
        "the seeds differ (0 and 4): the arms got other requests",
        "the clients ran on other machines: cores is 2 and 8",
        "B is CLIENT_BOUND: late",
    ]
    assert "scenarios differ" in next(differences(same, _result(scenario_digest="x")))
