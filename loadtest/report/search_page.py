"""The page of a search: how much load keeps the SLO. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.plots import numbers
from loadtest.plots.chart import Axis, LinePlot, Mark, Point, Series, line_plot
from loadtest.plots.markup import Markup, join
from loadtest.report import parts
from loadtest.report.curves import cost_section, provenance, scenario_name, slo_limits_ms
from loadtest.report.parts import NONE, Tile
from loadtest.result import Probe, SearchResult

_KINDS = {"FOUND": "good", "NONE": "bad"}
_STATES = {"met": "good", "missed": "bad"}
_COLOURS = 8


def search_page(result: SearchResult) -> str:
    """Make the report of one search."""
    name = f"{scenario_name(result.scenario)}: highest rate within the SLO"
    share = numbers.percent(result.target_share)
    about = f"{share} of requests must be good · {result.started_at} · seed {result.seed}"
    return parts.document(
        name,
        parts.header(name, about),
        parts.verdict(result.verdict, _KINDS.get(result.verdict, ""), result.verdict_reason),
        parts.tiles(_headline(result)),
        parts.section("Goodput", parts.plots(_goodput(result), _attainment(result))),
        parts.section("Latencies against rate", parts.plots(*_latencies(result))),
        parts.section("Speed for one user, speed for one GPU", parts.plots(_pareto(result))),
        parts.section("Splits of the workers", _splits_table(result)),
        parts.section(
            "Probes",
            _table("In the order of their rates", _by_rate(_asked(result))),
            _table("The best rate again", result.verified),
        ),
        cost_section(result.cost),
        provenance(result),
        parts.section("Definitions", parts.definitions(["ttft_ms", "tpot_ms", "goodput_rps"])),
    )


def _headline(result: SearchResult) -> list[Tile]:
    tiles = [
        Tile("Highest rate", parts.optional("_rps", result.best_rps), "sessions offered"),
        Tile(
            "Knee",
            parts.optional("_rps", result.knee_rps),
            "from here goodput gains less than load",
        ),
        Tile("Probes", str(len(_asked(result))), f"in {numbers.seconds_axis(result.duration_s)}"),
    ]
    if result.verified:
        kept = sum(probe.state == "met" for probe in result.verified)
        tiles.append(
            Tile("Verified", f"{kept} of {len(result.verified)}", "runs of the highest rate")
        )
    return tiles


def _asked(result: SearchResult) -> Sequence[Probe]:
    """Return the probes without the later runs of the best rate, which are told apart."""
    latest_first = list(reversed(result.probes))
    for probe in result.verified:
        if probe in latest_first:
            latest_first.remove(probe)
    return latest_first[::-1]


def _by_rate(probes: Sequence[Probe]) -> list[Probe]:
    return sorted(probes, key=lambda probe: probe.offered_rps)


def _splits(result: SearchResult) -> dict[str, list[Probe]]:
    """Group probes by the split of workers, where it is searched, too."""
    splits: dict[str, list[Probe]] = {}
    for probe in _by_rate(result.probes):
        splits.setdefault(_split(probe) or "goodput", []).append(probe)
    return splits


def _split(probe: Probe) -> str:
    if probe.prefill_workers is None or probe.decode_workers is None:
        return ""
    return f"{probe.prefill_workers} prefill, {probe.decode_workers} decode"


def _goodput(result: SearchResult) -> Markup:
    splits = _splits(result)
    series = [
        Series(
            name,
            [(probe.offered_rps, probe.goodput_rps[1]) for probe in probes],
            [(p.offered_rps, p.goodput_rps[0], p.goodput_rps[2]) for p in probes],
            [_hover(probe) for probe in probes],
            colour=number % _COLOURS + 1,
        )
        for number, (name, probes) in enumerate(splits.items())
    ]
    if not series:
        return Markup()
    # Not the offered rate itself: that is of sessions, which may send several requests.
    sent = [(probe.offered_rps, probe.achieved_rps) for probe in _by_rate(result.probes)]
    every = Series("all that were sent", sent, colour=8, is_dashed=True)
    best = max((p for p in result.probes), key=lambda probe: probe.goodput_rps[1])
    told = (
        "The band is the interval of the share of good requests. The most good requests, "
        f"{numbers.figure('_rps', best.goodput_rps[1])}, came at "
        f"{numbers.figure('_rps', best.offered_rps)}."
    )
    x = Axis("offered rate, sessions/s", numbers.count, low=0.0)
    y = Axis("good requests/s", numbers.count, low=0.0)
    plot = LinePlot("Goodput against rate", told, x, y, [*series, every], _marks(result))
    return line_plot(plot)


def _hover(probe: Probe) -> str:
    share = numbers.percent(probe.attainment.value)
    return f"{numbers.figure('_rps', probe.offered_rps)} offered: {share} good, {probe.state}"


def _marks(result: SearchResult) -> list[Mark]:
    marks = []
    if result.best_rps is not None:
        marks.append(Mark(result.best_rps, f"highest {numbers.figure('_rps', result.best_rps)}"))
    return marks


def _attainment(result: SearchResult) -> Markup:
    series = [
        Series(
            name,
            [(probe.offered_rps, probe.attainment.value) for probe in probes],
            [(p.offered_rps, p.attainment.low, p.attainment.high) for p in probes],
            [_hover(probe) for probe in probes],
            colour=number % _COLOURS + 1,
        )
        for number, (name, probes) in enumerate(_splits(result).items())
    ]
    if not series:
        return Markup()
    share = numbers.percent(result.target_share)
    kept = sum(probe.state == "met" for probe in result.probes)
    told = f"{kept} of {len(result.probes)} probes kept {share}."
    x = Axis("offered rate, sessions/s", numbers.count, low=0.0)
    y = Axis("share of good requests", numbers.percent, 0.0, 1.0)
    marks = [Mark(result.target_share, f"wanted {share}", is_horizontal=True)]
    return line_plot(LinePlot("Requests within the SLO", told, x, y, series, marks))


def _latencies(result: SearchResult) -> list[Markup]:
    return [_latency(result, name) for name in ("ttft_ms", "tpot_ms")]


def _latency(result: SearchResult, name: str) -> Markup:
    """Draw p50 and p99 of one pair of pools, or the p99 of each split."""
    splits = _splits(result)
    if len(splits) > 1:
        shown = [(split, probes, 0.99) for split, probes in splits.items()]
    else:
        shown = [(parts.share_name(share), _by_rate(result.probes), share) for share in (0.5, 0.99)]
    series = [
        Series(told, points, colour=number % _COLOURS + 1)
        for number, (told, probes, share) in enumerate(shown)
        if (points := _percentile_points(probes, name, share))
    ]
    if not series:
        return Markup()
    limit = slo_limits_ms(result.scenario).get(name)
    marks = []
    if limit is not None:
        marks.append(Mark(limit, f"SLO {numbers.milliseconds(limit)}", is_horizontal=True))
    title = f"{numbers.title_of(name)}{' p99' if len(splits) > 1 else ''}"
    ends = [f"{line.name} {numbers.figure(name, line.points[-1][1])}" for line in series]
    told = f"At the highest rate: {', '.join(ends)}."
    x = Axis("offered rate, sessions/s", numbers.count, low=0.0)
    y = Axis(title, numbers.milliseconds, may_be_log=True)
    return line_plot(LinePlot(f"{title} against rate", told, x, y, series, marks))


def _percentile_points(probes: Sequence[Probe], name: str, share: float) -> list[Point]:
    points = []
    for probe in probes:
        percentile = parts.by_share(probe.distributions.get(name)).get(share)
        if percentile is not None and percentile.value is not None:
            points.append((probe.offered_rps, percentile.value))
    return points


def _pareto(result: SearchResult) -> Markup:
    known = [
        (probe.user_tok_s, probe.output_tok_s / probe.gpus, probe)
        for probe in result.probes
        if probe.user_tok_s is not None and probe.gpus
    ]
    if not known:
        return Markup()
    best = frontier([(user, gpu) for user, gpu, _ in known])
    points = Series(
        "probes",
        [(user, gpu) for user, gpu, _ in known],
        labels=[f"{_hover(probe)}. {_split(probe)}" for _, _, probe in known],
        colour=1,
        is_scattered=True,
    )
    edge = Series("none is better in both", best, colour=3)
    ends = [
        f"{numbers.count(user)} for a user, {numbers.count(gpu)} for a GPU" for user, gpu in best
    ]
    told = f"Upper right is better. From {ends[0]} to {ends[-1]}."
    x = Axis("tokens/s of one user (1 / median TPOT)", numbers.count, low=0.0)
    y = Axis("output tokens/s of one GPU", numbers.count, low=0.0)
    return line_plot(
        LinePlot("Tokens a second: a user's against a GPU's", told, x, y, [points, edge])
    )


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep the points that no other beats in both, by the first."""
    best: list[tuple[float, float]] = []
    for point in sorted(points, reverse=True):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best[::-1]


def _splits_table(result: SearchResult) -> Markup:
    rows = []
    for split, probes in _splits(result).items():
        met = [probe for probe in probes if probe.state == "met"]
        best = met[-1] if met else None
        rows.append(
            [
                split,
                parts.optional("_rps", best.offered_rps if best else None),
                parts.optional("_rps", best.goodput_rps[1] if best else None),
                parts.optional("_rps", _lowest(probes, "missed")),
            ]
        )
    headers = ["", "highest rate met", "goodput there", "lowest rate missed"]
    return parts.cards(parts.table("By split", headers, rows)) if len(rows) > 1 else Markup()


def _lowest(probes: Sequence[Probe], state: str) -> float | None:
    """Return the lowest rate with an outcome."""
    return min((probe.offered_rps for probe in probes if probe.state == state), default=None)


def _table(caption: str, probes: Sequence[Probe]) -> Markup:
    headers = ["offered", "state", "within the SLO", "achieved", "goodput", "output", "time", "why"]
    has_splits = any(_split(probe) for probe in probes)
    rows = [_row(probe, has_splits=has_splits) for probe in probes]
    return parts.table(caption, [*headers, *(["workers"] if has_splits else [])], rows)


def _row(probe: Probe, *, has_splits: bool) -> list[str]:
    share = probe.attainment
    return [
        numbers.figure("_rps", probe.offered_rps),
        join(parts.badge(probe.state, _STATES.get(probe.state, ""))),
        parts.noted(numbers.percent(share.value), parts.interval(share)),
        numbers.figure("_rps", probe.achieved_rps),
        numbers.figure("_rps", probe.goodput_rps[1]),
        numbers.figure("_tok_s", probe.output_tok_s),
        numbers.seconds_axis(probe.duration_s),
        probe.reason or NONE,
        *([_split(probe) or NONE] if has_splits else []),
    ]
