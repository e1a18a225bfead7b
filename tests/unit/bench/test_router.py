"""What the router benchmark computes from what it measured."""

from __future__ import annotations

import pytest

from services.bench.router import Measured, growth_per_request
from services.bench.router_load import LoadReport


def test_growth_is_of_the_later_half_of_the_slices() -> None:
    warming_up = [100_000, 900_000, 1_000_000]
    steady = [1_000_000, 1_050_000, 1_100_000]
    assert growth_per_request([*warming_up, *steady], 500) == pytest.approx(100.0)


def test_one_slice_that_stands_out_is_no_growth() -> None:
    assert growth_per_request([*[1_000] * 8, 9_000_000, 1_000], 10) == pytest.approx(0.0)


def test_memory_that_comes_and_goes_is_no_growth() -> None:
    assert growth_per_request([5, 5, 5, 7_000, 7_000, 7_000], 10) == pytest.approx(0.0)


def test_rates_count_the_servers_cpu_time_not_the_clock() -> None:
    measured = Measured(LoadReport(wall_s=50.0, requests=300, frames=6_000), cpu_s=0.5)
    assert measured.requests_per_cpu_s == 600.0
    assert measured.frames_per_cpu_s == 12_000.0
