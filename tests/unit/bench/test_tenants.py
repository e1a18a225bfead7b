from __future__ import annotations

import random

import pytest

from services.bench.tenants import Probes, auc, result_of


def test_auc_is_that_of_the_ranks() -> None:
    assert auc([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert auc([3.0, 4.0], [1.0, 2.0]) == 0.0
    assert auc([1.0, 4.0], [2.0, 3.0]) == 0.5
    rng = random.Random(0)
    same = [[rng.gauss(0, 1) for _ in range(5000)] for _ in range(2)]
    assert auc(*same) == pytest.approx(0.5, abs=0.02)


def test_a_shared_cache_fails_the_bars() -> None:
    rng = random.Random(1)

    def times(mean: float) -> list[float]:
        return [rng.gauss(mean, 0.001) for _ in range(1000)]

    apart = Probes(times(0.02), times(0.02), times(0.005), foreign_hits=0, own_hits=256_000)
    assert result_of(apart, 256).exit_code == 0
    shared = Probes(times(0.005), times(0.02), times(0.005), foreign_hits=0, own_hits=256_000)
    assert result_of(shared, 256).exit_code == 1
    hits = Probes(times(0.02), times(0.02), times(0.005), foreign_hits=16, own_hits=256_000)
    assert result_of(hits, 256).exit_code == 1
    blind = Probes(times(0.02), times(0.02), times(0.02), foreign_hits=0, own_hits=256_000)
    assert result_of(blind, 256).exit_code == 1  # a clock that notices no hit proves nothing
