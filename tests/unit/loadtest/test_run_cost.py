"""A run priced by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.analysis import Origin, analyse
from loadtest.options import pricing_of
from loadtest.records import RequestRecord, Sample, Status
from loadtest.run_command import priced
from loadtest.run_cost import Pricing, parse_workers, run_cost
from loadtest.run_log import RunLog
from loadtest.scenario import parse_scenario
from loadtest.slo import Slo
from loadtest.target import TargetFacts
from services.common.errors import ConfigError
from services.sim.prices import PoolPrices, Prices
from tests.support.load_records import make_record

SLO = Slo(ttft_s=0.5)
PRICES = Prices(prefill=PoolPrices(rent_per_gpu_h=3.6), decode=PoolPrices(rent_per_gpu_h=7.2))


def _record(number: int, due_s: float, ttft_s: float = 0.4, **more: object) -> RequestRecord:
    """100 tokens in and 11 out; prefill takes 0.2 s, decode the 0.1 s after the first token."""
    record = make_record(number, due_s, ttft_s)
    record.stages_ms = {"prefill": 200.0, "decode": 100.0}
    record.prefill_worker, record.decode_worker = "p0", "d0"
    for name, value in more.items():
        setattr(record, name, value)
    return record


def _log(*records: RequestRecord) -> RunLog:
    facts = TargetFacts("grpc", "127.0.0.1:1")
    return RunLog(facts, "2026-01-01T00:00:00Z", list(records), duration_s=10.0)


def test_workers_cost_their_time_whether_or_not_they_were_busy() -> None:
    """A tenth of a cent a second for prefill, two for decode; the second request is late."""
    log = _log(_record(0, 1.0), _record(1, 5.0, ttft_s=0.7))
    cost = run_cost(log, SLO, Pricing(PRICES, parse_workers("prefill=1,decode=2")))
    assert cost["total_usd"] == pytest.approx(10 * 0.001 + 20 * 0.002)
    assert cost["used_usd"] == pytest.approx(0.4 * 0.001 + 0.2 * 0.002)
    assert cost["per_m_allocated"] == pytest.approx(0.05 / 222 * 1e6)
    assert cost["per_m_good"] == pytest.approx(0.05 / 111 * 1e6)
    assert [(pool["role"], pool["total_usd"]) for pool in cost["pools"]] == [
        ("prefill", pytest.approx(0.01)),
        ("decode", pytest.approx(0.04)),
    ]


def test_time_that_requests_share_is_busy_once() -> None:
    apart = run_cost(_log(_record(0, 1.0), _record(1, 5.0)), SLO, Pricing(PRICES))
    together = run_cost(_log(_record(0, 1.0), _record(1, 1.1)), SLO, Pricing(PRICES))
    assert apart["used_usd"] == pytest.approx(0.4 * 0.001 + 0.2 * 0.002)
    assert together["used_usd"] == pytest.approx(0.3 * 0.001 + 0.2 * 0.002)


def test_without_a_prefill_pool_workers_do_both() -> None:
    log = _log(_record(0, 1.0, prefill_worker="", mode="LOCAL"))
    cost = run_cost(log, SLO, Pricing(Prices()))
    assert [pool["role"] for pool in cost["pools"]] == ["aggregated"]
    assert cost["pools"][0]["prefill_usd"] > cost["pools"][0]["decode_usd"] > 0


def test_a_worker_of_the_decode_pool_that_did_all_alone_stays_in_it() -> None:
    """Some targets name it as the reader, too; one that stayed is of the prefill pool."""
    log = _log(
        _record(0, 1.0, mode="REMOTE"),
        _record(1, 2.0, mode="LOCAL", prefill_worker="d1", decode_worker="d1"),
        _record(2, 3.0, mode="STAY", prefill_worker="p1", decode_worker="p1"),
    )
    cost = run_cost(log, SLO, Pricing(PRICES))
    assert [(pool["role"], pool["gpu_h"]) for pool in cost["pools"]] == [
        ("prefill", pytest.approx(20 / 3600)),
        ("decode", pytest.approx(20 / 3600)),
    ]


def test_without_stages_nobody_knows_how_busy_workers_were() -> None:
    cost = run_cost(_log(_record(0, 1.0, stages_ms={})), SLO, Pricing(PRICES))
    assert cost["total_usd"] == pytest.approx(0.03)
    assert cost["per_m_output"] == pytest.approx(0.02 / 11 * 1e6)
    assert (cost["used_usd"], cost["idle_usd"], cost["per_m_used"]) == (None, None, None)
    assert [pool["used_usd"] for pool in cost["pools"]] == [None, None]


def test_owned_workers_without_stages_take_power_while_a_request_is_open() -> None:
    """0.6 s of 10: the first for 0.5 s, the second for as long and 0.4 s of it beside the first."""
    owned = PoolPrices(mode="own", idle_w=100.0, max_w=1_100.0)
    prices = Prices(prefill=owned, decode=owned, aggregated=owned)
    requests = [_record(0, 1.0, stages_ms={}), _record(1, 1.1, stages_ms={})]
    for number, workers in ((2, "aggregated=2"), (3, "aggregated=3")):
        cost = run_cost(_log(*requests), SLO, Pricing(prices, parse_workers(workers)))
        joules = number * (100.0 * 10 + 1_000.0 * 0.6)
        energy = prices.energy.pue * prices.energy.per_kwh
        assert cost["pools"][0]["energy_usd"] == pytest.approx(joules / 3.6e6 * energy)
        assert cost["used_usd"] is None


def test_one_pool_without_stages_has_a_cost_that_nobody_can_split() -> None:
    """Every request stays with its worker, as in a simulation of one pool."""
    log = _log(_record(0, 1.0, stages_ms={}, mode="STAY", prefill_worker="a", decode_worker="a"))
    log.samples = [Sample(1.0, 1, replicas={"aggregated": 2})]
    cost = run_cost(log, SLO, Pricing(PRICES))
    (pool,) = cost["pools"]
    assert (pool["role"], pool["gpu_h"]) == ("aggregated", pytest.approx(20 / 3600))
    assert (pool["prefill_usd"], pool["decode_usd"]) == (None, None)
    assert cost["per_m_allocated"] > 0
    split = ("per_m_input_uncached", "per_m_input_billed", "per_m_output", "cache_saving_usd")
    assert [cost[name] for name in split] == [None] * 4


def test_workers_that_the_target_told_of_cost_though_they_served_nobody() -> None:
    log = _log(_record(0, 1.0))
    log.samples = [Sample(float(n), 1, replicas={"prefill": 1, "decode": 1 + n}) for n in range(3)]
    pools = run_cost(log, SLO, Pricing(PRICES))["pools"]
    assert [pool["gpu_h"] for pool in pools] == pytest.approx([10 / 3600, 20 / 3600])


def test_tenants_pay_the_whole_between_them_and_failures_are_not_served() -> None:
    lost = _record(2, 3.0, tenant="b", status=Status.ERROR)
    log = _log(_record(0, 1.0, tenant="a"), _record(1, 2.0, tenant="b"), lost)
    cost = run_cost(log, SLO, Pricing(PRICES))
    assert sum(tenant["micro_usd"] for tenant in cost["tenants"]) == round(cost["total_usd"] * 1e6)
    assert cost["per_m_allocated"] == pytest.approx(0.03 / 222 * 1e6)


@pytest.mark.parametrize("text", ["", "prefill", "prefill=0", "prefill=two", "gpu=1", "decode=1,"])
def test_workers_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="say it like prefill=2,decode=4"):
        parse_workers(text)


def test_more_workers_than_said_or_none_told_is_refused() -> None:
    log = _log(_record(0, 1.0), _record(1, 5.0, decode_worker="d1"))
    with pytest.raises(ConfigError, match="says 1 decode, but 2 served"):
        run_cost(log, SLO, Pricing(PRICES, parse_workers("prefill=1,decode=1")))
    silent = _log(_record(0, 1.0, prefill_worker="", decode_worker=""))
    with pytest.raises(ConfigError, match="give --workers"):
        run_cost(silent, SLO, Pricing(PRICES))
    with pytest.raises(ConfigError, match="nothing was sent"):
        run_cost(_log(), SLO, Pricing(PRICES, parse_workers("aggregated=2")))
    told = run_cost(silent, SLO, Pricing(PRICES, parse_workers("aggregated=2")))
    assert told["total_usd"] > 0


def test_prices_are_read_before_anything_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("prefill:\n  rent_per_gpu_h: 9\n")
    pricing = pricing_of(file, "decode=2")
    assert pricing is not None
    assert pricing.prices.prefill.rent_per_gpu_h == 9
    assert pricing.workers == {"decode": 2}
    assert pricing_of(None, "") is None
    with pytest.raises(ConfigError, match="give --prices, too"):
        pricing_of(None, "decode=2")
    file.write_text("prefil:\n  rent_per_gpu_h: 9\n")
    with pytest.raises(ConfigError, match="prefil"):
        pricing_of(file, "")


def test_a_run_that_cannot_be_priced_is_kept_and_says_why() -> None:
    log = _log(_record(0, 1.0, prefill_worker="", decode_worker=""), _record(1, 2.0))
    scenario = parse_scenario(
        {
            "name": "x",
            "arrivals": {"kind": "constant", "rate_rps": 1.0},
            "workload": {"kind": "fixed", "isl": 100, "osl": 11},
            "phases": {"measure_s": 10.0},
        },
        "x",
    )
    result = analyse(log, scenario, Origin({}, "abc"))
    assert priced(result, log, scenario, Pricing(PRICES)).cost is not None
    refused = priced(result, log, scenario, Pricing(PRICES, {"prefill": 1}))
    assert refused.cost is None
    assert refused.notes == ("there is no cost: --workers says 0 decode, but 1 served",)
