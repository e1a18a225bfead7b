"""The search finds capacities that are known, and says so when it cannot."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.intervals import wilson
from loadtest.result import Probe
from loadtest.search import EarlyEnd, RateSearch, SearchOrder, knee_rps, state_of
from loadtest.slo import Slo
from tests.support.load_records import first_come_first_served

ORDER = SearchOrder(target_share=0.95, start_rps=8.0, min_rps=0.5, max_rps=1000.0)


def _probe(rate: float, good: int, count: int, target: float = 0.95) -> Probe:
    attainment = wilson(good, count, 0.95)
    return Probe(
        offered_rps=rate,
        achieved_rps=rate,
        attainment=attainment,
        state=state_of(attainment, target),
        reason="",
        duration_s=1.0,
        output_tok_s=rate,
        user_tok_s=None,
    )


def _search(order: SearchOrder, probe: Callable[[float], Probe]) -> RateSearch:
    search = RateSearch(order)
    while (rate := search.next_rate()) is not None:
        assert order.min_rps <= rate <= order.max_rps
        search.take(probe(rate))
    return search


@given(capacity=st.floats(1.0, 900.0), start=st.floats(0.5, 1000.0), count=st.integers(200, 2000))
def test_a_sharp_capacity_is_found_from_any_start_within_the_precision(
    capacity: float, start: float, count: int
) -> None:
    order = SearchOrder(target_share=0.95, start_rps=start, min_rps=0.5, max_rps=1000.0)
    search = _search(order, lambda rate: _probe(rate, count if rate <= capacity else 0, count))
    assert search.verdict == "FOUND"
    assert search.best_rps is not None
    assert capacity / (1 + order.precision) <= search.best_rps <= capacity
    assert [probe.offered_rps for probe in search.verified] == [search.best_rps] * 3
    assert len(search.probes) <= 20


def _waiting_within(rate: float, service_s: float, wait_s: float) -> float:
    """P(wait <= t) of M/D/1 (Erlang's series)."""
    load = rate * service_s
    return (1 - load) * sum(
        (-rate * (wait_s - k * service_s)) ** k
        / math.factorial(k)
        * math.exp(rate * (wait_s - k * service_s))
        for k in range(int(wait_s / service_s) + 1)
    )


def _queue(service_s: float, servers: int, slo_s: float, count: int) -> Callable[[float], Probe]:
    rng = random.Random(7)
    slo = Slo(ttft_s=slo_s)

    def probe(rate: float) -> Probe:
        due = accumulate(rng.expovariate(rate) for _ in range(count))
        records = list(first_come_first_served(due, service_s, servers))[count // 10 :]
        return _probe(rate, sum(slo.is_met(record) for record in records), len(records))

    return probe


def test_the_capacity_of_a_queue_with_one_server_is_that_of_its_closed_form() -> None:
    """Deterministic service of 50 ms, first token within 250 ms for 95 %."""
    low, high = 1.0, 20.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if _waiting_within(middle, 0.05, 0.2) >= 0.95:
            low = middle
        else:
            high = middle
    search = _search(ORDER, _queue(0.05, 1, 0.25, 4000))
    assert search.verdict == "FOUND"
    assert search.best_rps == pytest.approx(low, rel=0.10)


def test_the_capacity_of_many_servers_is_what_they_serve_where_waiting_is_allowed() -> None:
    """Eight servers of 50 ms serve 160 a second; a second of waiting hardly ever fills below."""
    search = _search(ORDER, _queue(0.05, 8, 1.0, 8_000))
    assert search.best_rps is not None
    assert 160 * 0.9 < search.best_rps < 160


def test_a_rate_that_is_only_just_good_enough_is_not_believed() -> None:
    """Attainment falls slowly: at 10 requests a second exactly 95 % are good."""
    search = _search(
        ORDER, lambda rate: _probe(rate, round(1000 * (1 - 0.05 * min(1, rate / 10))), 1000)
    )
    assert search.best_rps is not None
    if search.verdict == "FOUND":
        assert search.best_rps < 9.5
    else:
        assert "not clearly good enough" in search.reason


def test_nothing_good_at_any_rate_is_no_capacity() -> None:
    search = _search(ORDER, lambda rate: _probe(rate, 0, 100))
    assert (search.verdict, search.best_rps) == ("NONE", None)


def test_a_target_that_is_faster_than_asked_is_told_so() -> None:
    search = _search(ORDER, lambda rate: _probe(rate, 1000, 1000))
    assert (search.verdict, search.best_rps) == ("FOUND", 1000.0)
    assert "highest rate that may be tried" in search.reason


def test_probes_have_a_bound_and_giving_up_keeps_the_best_guess() -> None:
    order = SearchOrder(0.95, 8.0, 0.5, 1000.0, max_probes=2)
    search = _search(order, lambda rate: _probe(rate, 1000, 1000))
    assert (search.verdict, search.best_rps) == ("UNRESOLVED", 16.0)
    assert search.reason == "2 probes were not enough"


@pytest.mark.parametrize("bounds", [(0.0, 1.0, 2.0), (1.0, 0.5, 2.0), (1.0, 3.0, 2.0)])
def test_rates_out_of_order_are_refused(bounds: tuple[float, float, float]) -> None:
    lowest, start, highest = bounds
    with pytest.raises(ValueError, match="0 < min <= start <= max"):
        SearchOrder(0.95, start, lowest, highest)


def test_a_hopeless_probe_ends_early_and_a_good_one_at_half_time() -> None:
    assert EarlyEnd(0.95, 60.0).look([False] * 50, 1.0) == "missed"
    watch = EarlyEnd(0.95, 60.0)
    assert watch.look([True] * 400, 29.0) is None
    assert watch.look([True] * 400, 30.0) is None  # looked at this already
    assert watch.look([True] * 600, 30.0) == "met"


def test_answers_behind_an_open_request_are_not_counted_yet() -> None:
    watch = EarlyEnd(0.95, 1.0)
    assert watch.look([*[True] * 40, None, *[True] * 1000], 1.0) is None
    assert watch.look([*[True] * 40, *[False] * 10], 1.0) == "missed"


def test_looking_often_rarely_misjudges_a_rate_at_the_target() -> None:
    """At 95 % exactly every early end is an error."""
    rng = random.Random(3)
    ended = 0
    for _ in range(150):
        watch, goods = EarlyEnd(0.95, 1.0), [rng.random() < 0.95 for _ in range(3000)]
        ended += any(watch.look(goods[:n], 1.0) for n in range(50, 3000, 50))
    assert ended / 150 <= 0.06


def test_the_knee_is_where_goodput_stops_to_follow_load() -> None:
    probes = [_probe(rate, round(min(1, 40 / rate) * 1000), 1000) for rate in (10, 20, 40, 60, 80)]
    assert knee_rps(probes) == 40
    assert knee_rps(probes[:2]) is None
    assert knee_rps([_probe(rate, 1000, 1000) for rate in (10, 20, 40)]) is None
