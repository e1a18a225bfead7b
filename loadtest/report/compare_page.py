"""The page of a comparison: is B better than A? Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadtest.plots import numbers
from loadtest.plots.chart import Axis, Span, SpanPlot, span_plot
from loadtest.plots.markup import Markup, join, tag
from loadtest.report import parts
from loadtest.report.curves import CURVES, latency_plot, scenario_name, slo_limits_ms
from loadtest.report.figure_names import figure_rows
from loadtest.report.parts import NONE, Cell
from loadtest.result import CompareResult, MetricChange, RunResult

KINDS = {"better": "good", "worse": "bad"}


def compare_page(result: CompareResult) -> str:
    """Make the report of one comparison."""
    title = f"{scenario_name(result.a.scenario)}: is B better than A?"
    confidence = numbers.percent(result.confidence)
    about = (f"A is {result.name_a}", f"B is {result.name_b}", f"Intervals of {confidence}")
    word = f"B is {result.verdict}" if result.verdict in KINDS else result.verdict
    return parts.document(
        title,
        parts.header(title, *about),
        parts.verdict(word, KINDS.get(result.verdict, ""), result.verdict_reason),
        _warnings(result),
        parts.section("What changed", parts.plots(_changes(result)), _metrics(result)),
        parts.section(
            "What this comparison asks",
            parts.cards(parts.fact_table("Figures", figure_rows(result.figures))),
        ),
        _curves(result),
        parts.section("What differs", _differences(result)),
        parts.section("The two runs", _run("A", result.a), _run("B", result.b)),
        parts.section("Definitions", parts.definitions([*result.a.distributions, "goodput_rps"])),
    )


def _warnings(result: CompareResult) -> Markup:
    if not result.warnings:
        return Markup()
    told = [tag("p", parts.sentence(warning)) for warning in result.warnings]
    return tag("div", parts.badge("not alike", "bad"), *told, class_="card verdict bad")


def _changes(result: CompareResult) -> Markup:
    spans = [span for metric in result.metrics if (span := _span(metric)) is not None]
    if not spans:
        return Markup()
    by_verdict: dict[str, list[str]] = {"worse": [], "better": [], "inconclusive": []}
    for metric in result.metrics:
        by_verdict[metric.verdict].append(numbers.title_of(metric.name))
    told = "; ".join(f"{word}: {', '.join(names)}" for word, names in by_verdict.items() if names)
    axis = Axis("change from A to B, % of A", _signed)
    return span_plot(SpanPlot("Changes and their intervals", parts.sentence(told), axis, spans))


def _signed(value: float) -> str:
    return f"{value:+.3g} %" if value else "0 %"


def _span(metric: MetricChange) -> Span | None:
    known = (metric.a, metric.change, metric.low, metric.high)
    a, change, low, high = known
    if a is None or change is None or low is None or high is None or a == 0:
        return None
    of_a = 100 / abs(a)
    return Span(_title(metric), change * of_a, low * of_a, high * of_a, metric.verdict)


def _title(metric: MetricChange) -> str:
    better = "lower" if metric.is_better_lower else "higher"
    return f"{numbers.title_of(metric.name)}, {better} is better"


def _metrics(result: CompareResult) -> Markup:
    headers = ["", "A", "B", "change", "verdict", "threshold", "p", "why"]
    return parts.table("Metrics", headers, [_row(metric) for metric in result.metrics])


def _row(metric: MetricChange) -> list[str]:
    name = metric.name
    ends = [parts.optional(name, end) for end in (metric.low, metric.high) if end is not None]
    change = parts.noted(parts.optional(name, metric.change), " to ".join(ends))
    how = "lower is better" if metric.is_better_lower else "higher is better"
    return [
        parts.noted(
            numbers.title_of(name), f"{how}, {'paired' if metric.is_paired else 'not paired'}"
        ),
        parts.optional(name, metric.a),
        parts.optional(name, metric.b),
        change,
        join(parts.badge(metric.verdict, KINDS.get(metric.verdict, ""))),
        parts.optional(name, metric.threshold),
        NONE if metric.p_value is None else numbers.significant(metric.p_value),
        metric.reason,
    ]


def _curves(result: CompareResult) -> Markup:
    arms = {"A": result.a.distributions, "B": result.b.distributions}
    limits = slo_limits_ms(result.a.scenario)
    return parts.section(
        "Latencies", parts.plots(*(latency_plot(name, arms, limits.get(name)) for name in CURVES))
    )


def _differences(result: CompareResult) -> Markup:
    """Say which facts of the arms are not equal, whether or not they should be."""
    facts_a, facts_b = _facts(result.a), _facts(result.b)
    names = list(dict.fromkeys([*facts_a, *facts_b]))
    rows = [
        [name, parts.fact("", facts_a.get(name)), parts.fact("", facts_b.get(name))]
        for name in names
        if facts_a.get(name) != facts_b.get(name)
    ]
    if not rows:
        return tag("p", "Scenario, target, machine and commit are the same.")
    return parts.cards(parts.table("Not the same in A and B", ["", "A", "B"], rows))


def _facts(run: RunResult) -> dict[str, Cell]:
    facts: dict[str, Cell] = {"commit": run.commit, "seed": str(run.seed)}
    for name, part in (
        ("scenario", run.scenario),
        ("target", run.target),
        ("machine", run.machine),
    ):
        _flatten(name, part, facts)
    return facts


# Any: as JSON has it.
def _flatten(name: str, value: Mapping[str, Any], into: dict[str, Cell]) -> None:
    for key, item in value.items():
        if isinstance(item, Mapping):
            _flatten(f"{name} / {key}", item, into)
        else:
            into[f"{name} / {key}"] = item


def _run(name: str, run: RunResult) -> Markup:
    told = parts.distribution_table(f"{name}: {run.verdict}", run.distributions)
    return join(told, tag("p", run.verdict_reason, class_="note"))
