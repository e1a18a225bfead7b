"""Arrivals have the rates and the variation they say, and follow from the seed."""

from __future__ import annotations

import random
import statistics
from itertools import islice, pairwise, takewhile

import pytest

from loadtest.arrivals import Burst, Constant, Diurnal, Gamma, Open, Poisson, Ramp, Step, Steps

BURST = Burst(base_rps=10, peak_rps=60, on_s=20, off_s=30)
ALL: tuple[Open, ...] = (
    Constant(rate_rps=20),
    Poisson(rate_rps=20),
    Gamma(rate_rps=20, cv2=9),
    BURST,
    Ramp(from_rps=5, to_rps=50, over_s=80),
    Steps(steps=(Step(rate_rps=10, for_s=25), Step(rate_rps=40, for_s=75))),
    Diurnal(mean_rate_rps=20, swing=0.8, period_s=100),
)


def instants(arrivals: Open, until_s: float, seed: int = 1) -> list[float]:
    return list(takewhile(lambda at: at < until_s, arrivals.instants(random.Random(seed))))


@pytest.mark.parametrize("arrivals", ALL, ids=lambda a: a.kind)
def test_mean_rate_is_as_said_and_can_be_changed(arrivals: Open) -> None:
    until_s = 100.0
    at_double = arrivals.at_rate(2 * arrivals.mean_rps(until_s), until_s)

    for process in (arrivals, at_double):
        expected = process.mean_rps(until_s) * until_s
        many = [len(instants(process, until_s, seed)) for seed in range(20)]
        # Of 20 sums: five standard errors, by the most varied of the processes.
        assert statistics.fmean(many) == pytest.approx(expected, abs=5 * (9 * expected / 20) ** 0.5)
    assert at_double.mean_rps(until_s) == pytest.approx(2 * arrivals.mean_rps(until_s))


@pytest.mark.parametrize("arrivals", ALL, ids=lambda a: a.kind)
def test_instants_rise_and_follow_from_the_seed(arrivals: Open) -> None:
    first = instants(arrivals, 50)

    assert all(a <= b for a, b in pairwise(first))
    assert first == instants(arrivals, 50)
    if arrivals.kind != "constant":
        assert first != instants(arrivals, 50, seed=2)


@pytest.mark.parametrize("cv2", [0.25, 1.0, 9.0])
def test_gamma_gaps_have_the_variation(cv2: float) -> None:
    at = list(islice(Gamma(rate_rps=5, cv2=cv2).instants(random.Random(3)), 50_000))
    gaps = [b - a for a, b in pairwise(at)]

    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert statistics.pvariance(gaps) / mean**2 == pytest.approx(cv2, rel=0.1)


def test_poisson_gaps_have_variation_one() -> None:
    at = list(islice(Poisson(rate_rps=5).instants(random.Random(3)), 50_000))
    gaps = [b - a for a, b in pairwise(at)]

    assert statistics.pvariance(gaps) / statistics.fmean(gaps) ** 2 == pytest.approx(1, rel=0.05)


def test_a_burst_comes_after_quiet_and_again() -> None:
    at = [s for seed in range(20) for s in instants(BURST, 100, seed)]

    def rate(from_s: float, to_s: float) -> float:
        return sum(from_s <= s < to_s for s in at) / 20 / (to_s - from_s)

    assert rate(0, 30) == pytest.approx(10, rel=0.1)
    assert rate(30, 50) == pytest.approx(60, rel=0.1)
    assert rate(50, 80) == pytest.approx(10, rel=0.1)
    assert rate(80, 100) == pytest.approx(60, rel=0.1)


def test_a_ramp_ends_where_it_says_and_stays() -> None:
    ramp = Ramp(from_rps=10, to_rps=30, over_s=10)

    assert [ramp.rate_at(s) for s in (0, 5, 10, 100)] == [10, 20, 30, 30]


def test_steps_follow_one_another_and_the_last_stays() -> None:
    steps = Steps(steps=(Step(rate_rps=1, for_s=10), Step(rate_rps=2, for_s=5)))

    assert [steps.rate_at(s) for s in (0, 9.9, 10, 14.9, 99)] == [1, 1, 2, 2, 2]


def test_a_day_begins_at_its_lowest() -> None:
    day = Diurnal(mean_rate_rps=10, swing=0.5, period_s=24)

    assert [round(day.rate_at(s), 9) for s in (0, 6, 12, 24)] == [5, 10, 15, 5]
