"""The comparison of a simulated minute with a real one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.bench.result import BenchFailed
from services.bench.sim_reality import STEP_S, compare, scripted_performance
from services.sim.fit import PromptSample
from services.sim.performance import parse_model


def found(scale: float, *, ok: int = 400, measured: int = 400) -> dict[str, Any]:
    """Make what the load test writes, as far as it is read."""
    percentiles = [
        {"share": share, "value": value * scale}
        for share, value in ((0.5, 100.0), (0.95, 300.0), (0.99, 500.0))
    ]
    return {
        "counts": {"ok": ok, "measured": measured},
        "figures": {"hit_ratio": 0.5},
        "distributions": {
            name: {"percentiles": percentiles, "mean": 120.0}
            for name in ("ttft_ms", "tpot_ms", "e2e_ms")
        },
    }


def test_a_simulated_prompt_takes_what_single_requests_took() -> None:
    probes = [PromptSample(n, 0, 0.02 + n / 4000) for n in (64, 256, 512, 1024)]
    model = parse_model(json.dumps(scripted_performance(probes)), "scripted")
    assert model.prefill_s(400, 0) == pytest.approx(0.02 + 400 / 4000, rel=1e-6)
    assert model.decode_s(3, 1000) == STEP_S


@pytest.mark.parametrize(("scale", "exit_code"), [(1.0, 0), (0.86, 0), (0.8, 1), (1.3, 1)])
def test_times_must_be_near_each_other(scale: float, exit_code: int) -> None:
    result = compare(found(1.0), found(scale), has_bars=True)
    assert result.figures["ttft_p50_off"] == pytest.approx(abs(scale - 1), abs=1e-4)
    assert result.exit_code == exit_code


def test_a_real_model_has_no_bar() -> None:
    assert compare(found(1.0), found(3.0), has_bars=False).bars == []


def test_a_real_model_may_have_too_few_requests_for_a_percentile() -> None:
    few = found(1.0, ok=20, measured=20)
    few["distributions"]["ttft_ms"] = {
        "mean": 120.0,
        "percentiles": [{"share": 0.95, "value": None}],
    }
    result = compare(few, found(1.0), has_bars=False)
    assert result.figures["ttft_p95_off"] is None
    with pytest.raises(BenchFailed, match="real: 20 of 20"):
        compare(few, found(1.0), has_bars=True)


def test_failed_requests_compare_nothing() -> None:
    with pytest.raises(BenchFailed, match="real: 399 of 400"):
        compare(found(1.0, ok=399), found(1.0), has_bars=True)
