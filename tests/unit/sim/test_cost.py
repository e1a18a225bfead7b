from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.sim.cost import (
    PoolUsage,
    RunUsage,
    TenantUsage,
    capital_recovery,
    cost_of,
    exact_shares,
    gpu_usd_per_h,
    standing_usd_per_h,
)
from services.sim.prices import PoolPrices, Prices, prices_yaml, read_prices

HOUR_S = 3600.0
ONE = TenantUsage("a", 1_000_000, 0, 1_000_000, 2_000_000)


def prices(**sections: dict[str, object]) -> Prices:
    return Prices.model_validate(sections)


def run(*pools: PoolUsage, tenants: tuple[TenantUsage, ...] = (ONE,)) -> RunUsage:
    return RunUsage(HOUR_S, pools, tenants)


def hour_of(role: str, workers: int, utilisation: float = 0.5) -> PoolUsage:
    assert role in ("prefill", "decode", "aggregated")
    seconds = workers * HOUR_S
    return PoolUsage(role, seconds, seconds * utilisation)  # type: ignore[arg-type]  # checked


# 8 + 8 workers at $2.50 an hour: 393 M tokens in, of which 0.273 cached, and 11.2 M out.
IN, OUT = 393_000_000, 11_200_000
WORKED = TenantUsage("all", IN, round(0.273 * IN), OUT, round(0.951 * (IN + OUT)))


def test_the_worked_example_of_sixteen_workers() -> None:
    usage = run(hour_of("prefill", 8), hour_of("decode", 8), tenants=(WORKED,))
    cost = cost_of(usage, Prices())
    assert cost.usd_per_h == pytest.approx(40.0)
    assert cost.per_m_allocated == pytest.approx(0.099, abs=0.0005)
    assert cost.per_m_good == pytest.approx(0.104, abs=0.0005)
    assert cost.per_m_output == pytest.approx(1.78, abs=0.01)
    assert cost.per_m_input_billed == pytest.approx(0.051, abs=0.0005)
    assert cost.per_m_input_uncached == pytest.approx(0.070, abs=0.0005)
    # The same cluster under a policy that meets the SLO of about half of the requests.
    poor = replace(WORKED, good_tokens=round(0.509 * (IN + OUT)))
    assert cost_of(replace(usage, tenants=(poor,)), Prices()).per_m_good == pytest.approx(
        0.194, abs=0.0005
    )


def test_owned_gpus_are_written_off_with_interest() -> None:
    """10 % over 2 years: 1 / 1.1 + 1 / 1.21 of the yearly payment is what was lent."""
    assert capital_recovery(0.1, 2) == pytest.approx(1 / (1 / 1.1 + 1 / 1.21))
    assert capital_recovery(0.0, 4) == 0.25
    assert capital_recovery(1e-8, 4) == pytest.approx(0.25, rel=1e-6)
    owned = PoolPrices(
        mode="own", capex_per_gpu=8760, overhead=0.5, interest=0, life_years=2, availability=0.75
    )
    assert gpu_usd_per_h(owned) == pytest.approx(1.5 / 2 / 0.75)


def test_energy_is_paid_where_gpus_are_owned() -> None:
    pool = {"idle_w": 100, "max_w": 500, "gpus_per_worker": 2, "mode": "own", "capex_per_gpu": 0}
    at = prices(prefill=pool, energy={"per_kwh": 0.5, "pue": 1.5})
    half_busy = hour_of("prefill", 3)  # 6 GPUs at 300 W
    assert cost_of(run(half_busy), at).total_usd == pytest.approx(1.8 * 1.5 * 0.5)
    measured = replace(half_busy, energy_j=3.6e6)  # a kWh
    assert cost_of(run(measured), at).total_usd == pytest.approx(1.5 * 0.5)
    rented = prices(prefill=pool | {"mode": "rent", "rent_per_gpu_h": 0})
    assert cost_of(run(half_busy), rented).total_usd == 0
    assert standing_usd_per_h("prefill", at) == pytest.approx(2 * 0.1 * 1.5 * 0.5)


def test_shared_cost_goes_by_gpu_hours_and_operations_too() -> None:
    at = prices(
        prefill={"rent_per_gpu_h": 1, "ops_per_gpu_h": 0.5, "gpus_per_worker": 3},
        decode={"rent_per_gpu_h": 2},
        shared={"per_h": 4},
    )
    prefill, decode = cost_of(run(hour_of("prefill", 1), hour_of("decode", 1)), at).pools
    assert (prefill.gpus_usd, prefill.ops_usd, prefill.shared_usd) == (3.0, 1.5, 3.0)
    assert (decode.gpus_usd, decode.ops_usd, decode.shared_usd) == (2.0, 0.0, 1.0)


def test_allocated_used_and_idle_side_by_side() -> None:
    cost = cost_of(run(hour_of("prefill", 2, 0.25), hour_of("decode", 1, 1.0)), Prices())
    assert cost.total_usd == 7.5
    assert cost.used_usd == 2 * 2.5 * 0.25 + 2.5
    assert cost.idle_usd == 3.75
    assert cost.per_m_allocated == 3.75
    assert cost.per_m_used == 1.875
    assert cost.per_m_good == 3.75


def test_one_pool_is_split_by_what_it_was_busy_with() -> None:
    pool = PoolUsage("aggregated", 4 * HOUR_S, 2 * HOUR_S, 1.5 * HOUR_S, 0.5 * HOUR_S)
    cost = cost_of(run(pool), Prices())
    assert cost.per_m_input_billed == pytest.approx(7.5)
    assert cost.per_m_output == pytest.approx(2.5)


def test_opportunity_counts_idle_time_lag_and_requests_not_served_well() -> None:
    pool = replace(hour_of("prefill", 2, 0.5), scaling_lag_s=HOUR_S)
    usage = replace(run(pool), num_violated=10, num_refused=2)
    at = prices(loss={"penalty_per_violation": 0.25, "margin_per_request": 3})
    assert cost_of(usage, at).opportunity_usd == pytest.approx(2 * 2.5 + 2.5 + 6)


def test_cache_saves_what_computing_would_have_cost_less_its_keep() -> None:
    half = replace(ONE, cached_tokens=500_000)
    usage = replace(run(hour_of("prefill", 1), tenants=(half,)), cache_gib_h=10)
    cost = cost_of(usage, prices(cache={"per_gib_h": 0.1}))
    assert cost.per_m_input_uncached == 5.0
    assert cost.cache_saving_usd == pytest.approx(2.5 - 1.0)


def test_break_even_names_the_load_at_which_an_api_costs_the_same() -> None:
    cached = replace(ONE, cached_tokens=500_000)
    at = prices(api={"per_m_input": 2, "per_m_cached": 1, "per_m_output": 8.5})
    even = cost_of(run(hour_of("prefill", 2), tenants=(cached,)), at).break_even
    assert even is not None
    assert even.api_usd == 10.0
    assert even.load_share == 0.5
    assert cost_of(run(hour_of("prefill", 2)), Prices()).break_even is None


def test_sensitivity_prices_the_run_again() -> None:
    at = prices(prefill={"rent_per_gpu_h": 2, "ops_per_gpu_h": 1})
    found = cost_of(run(hour_of("prefill", 1, 0.6)), at).sensitivity
    assert {v.name: v.per_m_good for v in found} == pytest.approx(
        {
            "GPU price -20%": 1.3,
            "GPU price +20%": 1.7,
            "utilisation 30%": 3.0,
            "utilisation 60%": 1.5,
            "utilisation 90%": 1.0,
        }
    )


def test_what_was_not_served_has_no_price() -> None:
    none = TenantUsage("a", 0, 0, 0, 0)
    cost = cost_of(run(hour_of("prefill", 1, 0.0), tenants=(none,)), Prices())
    assert cost.total_usd == 2.5
    assert cost.per_m_allocated is None
    assert cost.per_m_good is None
    assert cost.per_m_output is None
    assert [v.name for v in cost.sensitivity] == ["GPU price -20%", "GPU price +20%"]
    assert [t.micro_usd for t in cost.tenants] == [2_500_000]


@pytest.mark.parametrize(
    ("usage", "message"),
    [
        (replace(run(hour_of("prefill", 1)), duration_s=0), "duration"),
        (run(), "pools"),
        (run(hour_of("prefill", 1), tenants=()), "tenants"),
        (run(PoolUsage("decode", 1.0, 2.0)), "decode was busy"),
        (run(hour_of("decode", 1), tenants=(replace(ONE, cached_tokens=1 << 30),)), "less than"),
    ],
)
def test_figures_that_cannot_be_are_refused(usage: RunUsage, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost_of(usage, Prices())


TENANTS = st.builds(
    lambda name, uncached, cached, out, share, busy: TenantUsage(
        name, uncached + cached, cached, out, int((uncached + cached + out) * share), *busy
    ),
    st.text(min_size=1, max_size=4),
    *[st.integers(0, 10**9)] * 3,
    st.floats(0, 1),
    st.tuples(*[st.floats(0, 1e6, allow_subnormal=False)] * 2),
)


@given(
    st.lists(TENANTS, min_size=1, max_size=12),
    st.floats(0, 1e4),
    st.integers(0, 500),
    st.integers(0, 500),
)
def test_tenants_add_up_to_the_whole(
    tenants: list[TenantUsage], rent: float, num_prefill: int, num_decode: int
) -> None:
    at = prices(prefill={"rent_per_gpu_h": rent}, shared={"per_h": 1.37})
    pools = (hour_of("prefill", num_prefill), hour_of("decode", num_decode, 0.3))
    cost = cost_of(run(*pools, tenants=tuple(tenants)), at)
    assert sum(t.micro_usd for t in cost.tenants) == round(cost.total_usd * 1e6)
    assert min(t.micro_usd for t in cost.tenants) >= 0


@given(
    st.integers(0, 10**13),
    st.lists(st.floats(0, 1e9, allow_subnormal=False), min_size=1, max_size=40),
)
def test_parts_are_within_one_of_their_share_and_add_up(total: int, weights: list[float]) -> None:
    if sum(weights) == 0:
        with pytest.raises(ValueError, match="nothing to split by"):
            exact_shares(total, weights)
        return
    parts = exact_shares(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) <= 1.01


def test_the_file_of_defaults_says_what_leaving_them_out_says(tmp_path: Path) -> None:
    path = tmp_path / "cost.yaml"
    path.write_text(prices_yaml())
    assert read_prices(path) == Prices()
    path.write_text("prefill: {rent_per_gpu_h: 1.25}\n")
    assert read_prices(path) == prices(prefill={"rent_per_gpu_h": 1.25})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefill: {rent_per_gpu: 1}", 'did you mean "rent_per_gpu_h"'),
        ("prefil: {mode: own}", 'did you mean "prefill"'),
        ("prefil: {}", 'did you mean "prefill"'),
        ("decode: {mode: lease}", "decode.mode"),
        ("decode: {rent_per_gpu_h: .nan}", "decode.rent_per_gpu_h"),
        ("decode: {rent_per_gpu_h: '1'}", "decode.rent_per_gpu_h"),
        ("decode: {life_years: 0}", "decode.life_years"),
        ("decode: {idle_w: 800}", "max_w is below idle_w"),
        ("energy: {pue: 0.5}", "energy.pue"),
    ],
)
def test_a_wrong_price_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cost.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prices(path)
