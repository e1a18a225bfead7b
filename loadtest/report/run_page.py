"""The page of one run. Pure: a result goes in, a file comes out."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from loadtest.plots import numbers
from loadtest.plots.chart import (
    Axis,
    Bar,
    BarPlot,
    LinePlot,
    Mark,
    Point,
    Series,
    bar_plot,
    line_plot,
)
from loadtest.plots.markup import Markup, tag
from loadtest.report import parts
from loadtest.report.curves import (
    CURVES,
    cost_section,
    latency_plot,
    provenance,
    scenario_name,
    slo_limits_ms,
)
from loadtest.report.figure_names import figure_rows
from loadtest.report.parts import NONE, Tile
from loadtest.result import (
    Distribution,
    Group,
    RunResult,
    StageBand,
    TimelinePoint,
)
from loadtest.ttft_bands import TTFT_STAGES

GOOD_VERDICTS = ("OK",)
_BAD_VERDICTS = ("FAILED",)
_GROUP_FIGURES = ("ttft_ms", "tpot_ms")


def run_page(result: RunResult) -> str:
    """Make the report of one run."""
    name = scenario_name(result.scenario)
    return parts.document(
        f"{name}: {result.verdict}",
        parts.header(name, *_about(result)),
        parts.verdict(result.verdict, verdict_kind(result.verdict), result.verdict_reason),
        parts.tiles(headline(result)),
        _trust(result),
        _latencies(result),
        _stages(result),
        _timeline(result),
        _groups(result),
        _figures(result),
        cost_section(result.cost),
        _outcomes(result),
        provenance(result),
        parts.section("Definitions", parts.definitions([*result.distributions, "goodput_rps"])),
    )


def _trust(result: RunResult) -> Markup:
    notes = [tag("p", parts.sentence(note), class_="note") for note in result.notes]
    return parts.section("Can these figures be trusted?", parts.checks(result.checks), *notes)


def verdict_kind(verdict: str) -> str:
    """Say how a verdict is shown."""
    if verdict in GOOD_VERDICTS:
        return "good"
    return "bad" if verdict in _BAD_VERDICTS else ""


def _about(result: RunResult) -> list[str]:
    description = str(result.scenario.get("description") or "")
    target = result.target
    model = f", model {target['model']}" if target.get("model") else ""
    where = f"{target.get('kind', 'target')} {target.get('address', '')}{model}"
    when = f"{result.started_at}, {numbers.seconds_axis(result.duration_s)} long"
    return [text for text in (description, f"{where} · {when} · seed {result.seed}") if text]


def headline(result: RunResult) -> list[Tile]:
    """Choose the figures that stand out."""
    rates = result.rates
    tiles = []
    if result.attainment is not None:
        share = result.attainment
        tiles.append(
            Tile("Requests within the SLO", numbers.percent(share.value), parts.interval(share))
        )
    if "goodput_rps" in rates:
        told = f"of {parts.optional('_rps', rates.get('offered_rps'))} offered"
        tiles.append(Tile("Goodput", numbers.figure("_rps", rates["goodput_rps"]), told))
    for name in ("ttft_ms", "tpot_ms"):
        for rank in (0.5, 0.99):
            tiles += _percentile_tile(name, rank, result.distributions.get(name))
    if "output_tok_s" in rates:
        tiles.append(Tile("Output", numbers.figure("output_tok_s", rates["output_tok_s"])))
    failed = sum(result.counts.get(status, 0) for status in ("error", "timeout", "rejected"))
    measured = result.counts.get("measured", 0)
    tiles.append(Tile("Failed or refused", str(failed), f"of {measured:,} measured"))
    good = (result.cost or {}).get("per_m_good")
    if isinstance(good, int | float):
        tiles.append(Tile("Per million good tokens", f"${numbers.significant(good)}"))
    return tiles


def _percentile_tile(name: str, share: float, found: Distribution | None) -> list[Tile]:
    percentile = parts.by_share(found).get(share)
    if percentile is None:
        return []
    title = f"{numbers.title_of(name)} {parts.share_name(share)}"
    if percentile.value is None:
        return [Tile(title, NONE, "too few requests")]
    ends = [
        numbers.figure(name, end) for end in (percentile.low, percentile.high) if end is not None
    ]
    return [Tile(title, numbers.figure(name, percentile.value), " – ".join(ends))]


def _latencies(result: RunResult) -> Markup:
    limits = slo_limits_ms(result.scenario)
    arms = {"all": result.distributions}
    figures = [latency_plot(name, arms, limits.get(name)) for name in CURVES]
    latencies = {name: d for name, d in result.distributions.items() if name not in _LENGTHS}
    lengths = {name: d for name, d in result.distributions.items() if name in _LENGTHS}
    return parts.section(
        "Latencies",
        parts.plots(*figures),
        parts.distribution_table("All measured requests", latencies),
        parts.distribution_table("Tokens of a request", lengths),
    )


_LENGTHS = ("isl", "osl")


def _stages(result: RunResult) -> Markup:
    figure = _bands(result.ttft_bands) if result.ttft_bands else Markup()
    ordered = sorted(result.stages_ms.items(), key=lambda stage: _place(stage[0]))
    as_ms = {f"{name}_ms": stage for name, stage in ordered}
    told = parts.distribution_table("Stages as the server tells them", as_ms)
    return parts.section("Where the time goes", parts.plots(figure), told)


def _place(stage: str) -> int:
    """Order stages as they happen; unknown ones come last."""
    return _STAGES.index(stage) if stage in _STAGES else len(_STAGES)


_STAGES = (*TTFT_STAGES, "handoff", "queue_decode", "migration", "decode", "unattributed")


def _bands(bands: Sequence[StageBand]) -> Markup:
    bars = []
    for band in bands:
        split = {**band.stages_ms, _OUTSIDE: max(0.0, band.outside_ms)}
        bars.append(Bar(f"{band.name} ({band.num_requests:,})", split))
    name, longest_ms = max(bars[-1].parts.items(), key=lambda part: part[1])
    told = (
        f"Means. In the last bar the longest part is {name}: "
        f"{numbers.milliseconds(longest_ms)} of {numbers.milliseconds(bands[-1].ttft_ms)}."
    )
    axis = Axis("time to the first token", numbers.milliseconds)
    return bar_plot(BarPlot("TTFT by stage, from fast to slow requests", told, axis, bars))


_OUTSIDE = "outside the server"


def _timeline(result: RunResult) -> Markup:
    points = result.timeline
    if len(points) < _MIN_POINTS:
        return Markup()
    step_s = statistics.median(b.at_s - a.at_s for a, b in pairwise(points))
    has_failed = any(point.failed for point in points)
    rates = [
        _over_time(points, "sent", 1, lambda p: p.sent / step_s),
        _over_time(points, "finished", 3, lambda p: p.finished / step_s),
        _over_time(points, "failed", 2, lambda p: p.failed / step_s if has_failed else None),
    ]
    marks = [Mark(fault.at_s, fault.action) for fault in result.faults if not fault.failure]
    figures = [
        _time_plot("Requests a second", "requests/s", rates, marks=marks),
        _time_plot(
            "In flight and queued",
            "requests",
            [
                _over_time(points, "in flight", 1, lambda p: p.in_flight),
                _over_time(points, "queued in the server", 2, lambda p: p.queued),
            ],
        ),
        _time_plot(
            "Output tokens a second",
            "tokens/s",
            [_over_time(points, "tokens", 1, lambda p: p.tokens / step_s)],
        ),
        _time_plot(
            "Median TTFT",
            "TTFT",
            [_over_time(points, "p50", 1, lambda p: p.ttft_p50_ms)],
            numbers.milliseconds,
            marks,
        ),
        _time_plot("Workers", "workers", _replicas(points)),
        *(
            _time_plot(f"Pool {pool}, by its autoscaler", "workers", _sizes(points, pool))
            for pool in _pools(points)
        ),
    ]
    return parts.section("Over time", parts.plots(*figures), _limits(points), _faults(result))


def _faults(result: RunResult) -> Markup:
    headers = ["", "at", "ready again after", "SLO held again after", "requests", "failed"]
    rows = [
        [
            parts.fault_name(fault),
            numbers.figure("_s", fault.at_s),
            fault.failure or parts.optional("_s", fault.back_s),
            parts.optional("_s", fault.recovery_s),
            f"{fault.num_requests:,}",
            f"{fault.num_failed:,}",
        ]
        for fault in result.faults
    ]
    return parts.table("Faults: each with the requests until the next one", headers, rows)


_MIN_POINTS = 3


def _over_time(
    points: tuple[TimelinePoint, ...],
    name: str,
    colour: int,
    value: Callable[[TimelinePoint], float | None],
) -> Series:
    known = [(point.at_s, value(point)) for point in points]
    return Series(name, [(at, y) for at, y in known if y is not None], colour=colour)


def _replicas(points: tuple[TimelinePoint, ...]) -> list[Series]:
    pools = list(dict.fromkeys(pool for point in points for pool in point.replicas))
    return [
        Series(
            pool,
            [(p.at_s, float(p.replicas[pool])) for p in points if pool in p.replicas],
            colour=number,
            is_stepped=True,
            is_dashed=number > 1,
        )
        for number, pool in enumerate(pools[:_MAX_POOLS], start=1)
    ]


_MAX_POOLS = 8


def _pools(points: tuple[TimelinePoint, ...]) -> list[str]:
    return list(dict.fromkeys(pool for point in points for pool in point.pools))[:_MAX_POOLS]


def _sizes(points: tuple[TimelinePoint, ...], pool: str) -> list[Series]:
    known = [(point.at_s, point.pools[pool]) for point in points if pool in point.pools]
    lines = [
        Series(name, [(at, float(getattr(size, name))) for at, size in known], colour=colour)
        for colour, name in enumerate(("ready", "desired", "pending", "draining"), start=1)
    ]
    # Lines of nothing but zeros only hide the others.
    return [
        replace(line, is_stepped=True, is_dashed=line.name == "desired")
        for line in lines
        if line.name in ("ready", "desired") or any(size for _, size in line.points)
    ]


def _limits(points: tuple[TimelinePoint, ...]) -> Markup:
    rows = []
    for pool in _pools(points):
        known = [point.pools[pool] for point in points if pool in point.pools]
        counts = Counter(size.limited_by for size in known if size.limited_by)
        rows += [
            [pool, step, numbers.percent(count / len(known))]
            for step, count in counts.most_common()
        ]
    headers = ["pool", "limited by", "of the time"]
    return parts.table("What kept a pool from the size that metrics asked for", headers, rows)


def _time_plot(
    title: str,
    label: str,
    series: list[Series],
    tick: Callable[[float], str] = numbers.count,
    marks: Sequence[Mark] = (),
) -> Markup:
    known = [s for s in series if s.points]
    if not known:
        return Markup()
    told = "; ".join(f"{s.name} {_range(s.points, tick)}" for s in known)
    x = Axis("time since the run began", numbers.seconds_axis, steps=numbers.CLOCK_STEPS_S)
    y = Axis(label, tick, low=0.0, is_whole=label in ("requests", "workers"))
    return line_plot(LinePlot(title, f"{told}.", x, y, known, marks))


def _range(points: Sequence[Point], tick: Callable[[float], str]) -> str:
    values = [value for _, value in points]
    return f"{tick(min(values))} to {tick(max(values))}"


def _groups(result: RunResult) -> Markup:
    if not result.groups:
        return Markup()
    rows = [_group_row(group) for group in result.groups]
    headers = ["", "requests", "within the SLO"]
    headers += [f"{numbers.title_of(name)} {p}" for name in _GROUP_FIGURES for p in ("p50", "p99")]
    told = parts.table("Parts of the load", headers, rows)
    return parts.section("Groups", parts.plots(*_group_plots(result)), told)


def _group_plots(result: RunResult) -> list[Markup]:
    """Draw the TTFT by each thing that groups are split by: the first word of their names."""
    splits: dict[str, dict[str, Mapping[str, Distribution]]] = {}
    for group in result.groups:
        split, _, part = group.name.partition(" ")
        splits.setdefault(split, {})[part] = group.distributions
    limit = slo_limits_ms(result.scenario).get("ttft_ms")
    return [
        latency_plot("ttft_ms", dict(list(arms.items())[:_MAX_ARMS]), limit, f" by {split}")
        for split, arms in splits.items()
    ]


_MAX_ARMS = 6


def _group_row(group: Group) -> list[str]:
    share = group.attainment
    kept = (
        NONE if share is None else parts.noted(numbers.percent(share.value), parts.interval(share))
    )
    row: list[str] = [group.name, f"{group.num_requests:,}", kept]
    for name in _GROUP_FIGURES:
        told = parts.by_share(group.distributions.get(name))
        for share_of in (0.5, 0.99):
            found = told.get(share_of)
            row.append(NONE if found is None else parts.percentile_cell(name, found))
    return row


def _figures(result: RunResult) -> Markup:
    rows = figure_rows(result.figures)
    return parts.section("What this scenario asks", parts.cards(parts.fact_table("Figures", rows)))


def _outcomes(result: RunResult) -> Markup:
    counts = parts.facts_table("Requests", result.counts)
    errors = parts.table(
        "Errors", ["code", "requests"], [(code, f"{n:,}") for code, n in result.errors.items()]
    )
    rates = parts.facts_table("Rates", result.rates)
    return parts.section("Outcomes", parts.cards(rates, counts, errors))
