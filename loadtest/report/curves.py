"""Plots that several pages share: latency curves, costs, what was run and where. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.plots import numbers
from loadtest.plots.chart import Axis, LinePlot, Mark, Point, Series, line_plot
from loadtest.plots.markup import Markup
from loadtest.report.parts import as_yaml, cards, fact, fact_table, facts_table, section, table
from loadtest.result import Distribution, RunResult, SearchResult

CURVES = ("ttft_ms", "tpot_ms", "e2e_ms", "itl_ms")
_LIMITS = {
    "ttft_ms": "ttft_s",
    "tpot_ms": "tpot_s",
    "e2e_ms": "e2e_s",
    "max_stall_ms": "max_stall_s",
}


def latency_plot(
    name: str,
    arms: Mapping[str, Mapping[str, Distribution]],
    limit_ms: float | None,
    suffix: str = "",
) -> Markup:
    """Draw the share of requests within a time, one line an arm; nothing without a curve."""
    series = [
        Series(arm, cdf(found[name]), colour=number, is_dashed=number % 2 == 0)
        for number, (arm, found) in enumerate(arms.items(), start=1)
        if name in found and len(found[name].curve) > 1
    ]
    if not series:
        return Markup()
    marks = [] if limit_ms is None else [Mark(limit_ms, f"SLO {numbers.milliseconds(limit_ms)}")]
    told = "; ".join(_told(arm, name, found.get(name), len(arms)) for arm, found in arms.items())
    x = Axis(numbers.title_of(name), numbers.milliseconds, may_be_log=True)
    y = Axis("share of requests", numbers.percent, 0.0, 1.0)
    title = f"{numbers.title_of(name)}{suffix or ': share of requests within a time'}"
    return line_plot(LinePlot(title, f"{told}.", x, y, series, marks))


def cdf(distribution: Distribution) -> list[Point]:
    """Turn equal steps of share into points of a cumulative curve."""
    last = len(distribution.curve) - 1
    return [(value, number / last) for number, value in enumerate(distribution.curve)]


def _told(arm: str, name: str, distribution: Distribution | None, num_arms: int) -> str:
    known = () if distribution is None else distribution.percentiles
    within = [
        f"{numbers.percent(p.share)} within {numbers.figure(name, p.value)}"
        for p in known
        if p.value is not None and p.share in (0.5, 0.99)
    ]
    told = ", ".join(within) or "too few requests for percentiles"
    return told if num_arms == 1 else f"{arm}: {told}"


def slo_limits_ms(scenario: Mapping[str, Any]) -> dict[str, float]:
    """Read the limits of a scenario by the figure they bound."""
    slo = scenario.get("slo")
    if not isinstance(slo, Mapping):
        return {}
    limits = {name: slo.get(key) for name, key in _LIMITS.items()}
    return {name: limit * 1e3 for name, limit in limits.items() if isinstance(limit, int | float)}


def scenario_name(scenario: Mapping[str, Any]) -> str:
    """Name what was run."""
    return str(scenario.get("name") or "load test")


def provenance(result: RunResult | SearchResult) -> Markup:
    """Say what was run, against what and where, so that it can be run again."""
    origin = {
        "scenario": scenario_name(result.scenario),
        "digest of the scenario": result.scenario_digest,
        "seed": str(result.seed),
        "commit": result.commit,
        "started": result.started_at,
    }
    if isinstance(result, RunResult):
        origin |= {"raw file": result.raw_file, "SHA-256 of it": result.raw_sha256}
    return section(
        "What was run",
        cards(
            facts_table("Run", origin),
            facts_table("Target", result.target),
            facts_table("Machine of the client", result.machine),
        ),
        as_yaml("The whole scenario", result.scenario),
    )


# Any: as JSON has it.
def cost_section(cost: Mapping[str, Any] | None) -> Markup:
    """Show prices and where they come from; lists become tables of their own."""
    if not cost:
        return Markup()
    rows: list[tuple[str, str]] = []
    tables: list[Markup] = []
    for name, value in cost.items():
        if isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
            tables.append(_cost_table(name, value))
        elif isinstance(value, Mapping):
            rows += [
                (_cost_title(f"{name}_{key}"), _cost(key, item)) for key, item in value.items()
            ]
        else:
            rows.append((_cost_title(name), _cost(name, value)))
    return section("Cost", cards(fact_table("Cost of this run", rows), *tables))


def _cost_table(name: str, entries: Sequence[Mapping[str, Any]]) -> Markup:
    keys = list(entries[0])
    rows = [[_cost(key, entry.get(key)) for key in keys] for entry in entries]
    return table(_cost_title(name), [_cost_title(key) for key in keys], rows)


_COST_TITLES = {
    "per_m_allocated": "$ per M tokens, all that was provisioned",
    "per_m_used": "$ per M tokens, while busy",
    "per_m_good": "$ per M good tokens",
    "per_m_input_uncached": "$ per M input tokens, without cached ones",
    "per_m_input_billed": "$ per M input tokens, cached ones too",
    "per_m_output": "$ per M output tokens",
    "gpu_h": "GPU hours",
    "total_usd": "all of it",
    "used_usd": "while busy",
    "idle_usd": "while idle",
    "usd_per_h": "$ an hour",
    "micro_usd": "$",
    "energy_usd": "energy",
    "ops_usd": "operations",
    "shared_usd": "shared",
    "prefill_usd": "for prompts",
    "decode_usd": "for answers",
    "gpus_usd": "GPUs",
    "break_even_api_usd": "the same tokens from an API",
    "break_even_load_share": "share of this load from which the cluster is cheaper",
    "cache_saving_usd": "saved by the cache",
    "opportunity_usd": "lost: idle GPUs, missed limits, refused requests",
}


def _cost_title(name: str) -> str:
    return _COST_TITLES.get(name) or numbers.title_of(name)


def _cost(name: str, value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and name == "micro_usd":
        return f"${numbers.significant(value / 1e6)}"
    if is_number and name.startswith("per_m_"):
        return f"${numbers.significant(value)}"
    return fact(name, value)
