"""Loads whose rate changes."""

from __future__ import annotations

import pytest

from services.sim.varying import Sine, Step, VaryingLoad, copies, varying_workload
from services.sim.workload import Arrival, Workload


def test_a_sine_goes_from_its_least_to_its_most_and_back() -> None:
    sine = Sine(1.0, 24.0, 900.0)
    assert [sine(at) for at in (0.0, 450.0, 900.0)] == pytest.approx([1.0, 24.0, 1.0])
    assert sine(225.0) == pytest.approx(12.5)


def test_arrivals_follow_the_rate_and_the_seed() -> None:
    load = VaryingLoad("step", Step(2.0, 20.0, 100.0, 200.0), 20.0, 300.0, 1000, 50, spread=0.5)
    workload = varying_workload(load, seed=1)
    assert workload == varying_workload(load, seed=1)
    assert workload != varying_workload(load, seed=2)
    times = [a.at_s for a in workload.arrivals]
    assert times == sorted(times)
    assert max(times) < 300.0
    during = sum(100.0 <= at < 200.0 for at in times)
    assert 1700 < during < 2300
    assert 300 < len(times) - during < 500
    mean = sum(a.num_tokens for a in workload.arrivals) / len(times)
    assert mean == pytest.approx(1000, rel=0.05)
    assert {a.units for a in workload.arrivals} == {()}


def test_copies_come_soon_after_one_another_and_in_order() -> None:
    few = Workload("few", 512, (Arrival(0.0, 100, 5, (1,)), Arrival(10.0, 200, 6, (2,))))
    many = copies(few, 10, 1.0, seed=0)
    assert many == copies(few, 10, 1.0, seed=0)
    assert [a.num_tokens for a in many.arrivals] == [100] * 10 + [200] * 10
    assert [a.at_s for a in many.arrivals] == sorted(a.at_s for a in many.arrivals)
    assert all(0.0 <= a.at_s <= 1.0 or 10.0 <= a.at_s <= 11.0 for a in many.arrivals)
    assert len({a.at_s for a in many.arrivals}) == 20
    assert [a.at_s for a in copies(few, 1, 0.0, seed=0).arrivals] == [0.0, 10.0]
