"""Plots as SVG: lines with bands, points, marks; stacked bars; intervals. Pure, values to text.

Colours are classes (`c1` to `c8`), so that the page decides them, for light and dark and print.
A plot is `WIDTH` units wide and scales with the page; text is an SVG text and stays selectable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from loadtest.plots.markup import Markup, join, tag
from loadtest.plots.scale import Scale, linear_scale, log_scale, suits_log

WIDTH = 440
NUM_COLOURS = 8
_HEIGHT = 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 12, 46
_MAX_POINTS = 400  # more than there are pixels on a phone
_ROW = 46  # height of a bar with its label
_WIDEST_TICK = 52
_LABEL = 15  # the text of a row above its bar

Point = tuple[float, float]
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows, and how its ticks are written."""

    label: str
    tick: Format
    low: float | None = None  # None: from the values
    high: float | None = None
    may_be_log: bool = False  # where the values spread far enough
    steps: Sequence[float] = ()  # distances of ticks to prefer
    is_whole: bool = False  # shows numbers of things


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or points where `is_scattered`."""

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()  # x, low, high
    labels: Sequence[str] = ()  # of points, in their order
    colour: int = 1
    is_dashed: bool = False
    is_stepped: bool = False
    is_scattered: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across the plot at one value of an axis, such as a limit."""

    at: float
    label: str
    is_horizontal: bool = False


@dataclass(frozen=True, slots=True)
class LinePlot:
    """A plot of series over one pair of axes."""

    title: str
    told: str  # what it shows, in words, for those who do not see it
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    height: int = _HEIGHT


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar: parts by name."""

    label: str
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class BarPlot:
    """Bars below each other, of the same parts."""

    title: str
    told: str
    x: Axis
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class Span:
    """A value with its interval, and how good that is: `better`, `worse` or `inconclusive`."""

    label: str
    value: float
    low: float
    high: float
    kind: str


@dataclass(frozen=True, slots=True)
class SpanPlot:
    """Intervals below each other around zero."""

    title: str
    told: str
    x: Axis
    spans: Sequence[Span] = field(default=())


def line_plot(plot: LinePlot) -> Markup:
    """Draw a figure with its legend."""
    bottom = plot.height - _BOTTOM
    x = _scale(plot.x, _xs(plot), _LEFT, WIDTH - _RIGHT)
    y = _scale(plot.y, _ys(plot), bottom, _TOP)
    drawn = [_series(series, x, y) for series in plot.series]
    marks = [_mark(mark, x, y) for mark in plot.marks]
    body = join(_y_axis(plot.y, y), _x_axis(plot.x, x, bottom), *drawn, *marks)
    legend = _legend([(s.name, s.colour) for s in plot.series]) if len(plot.series) > 1 else ""
    return _figure(plot.title, plot.told, body, plot.height, legend)


def _xs(plot: LinePlot) -> list[float]:
    marked = [mark.at for mark in plot.marks if not mark.is_horizontal]
    return [x for series in plot.series for x, _ in series.points] + marked


def _ys(plot: LinePlot) -> list[float]:
    values = [mark.at for mark in plot.marks if mark.is_horizontal]
    for series in plot.series:
        values += [y for _, y in series.points]
        values += [end for _, low, high in series.band for end in (low, high)]
    return values


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    if axis.may_be_log and axis.low is None and suits_log(values):
        gap = _WIDEST_TICK if end > start else _LABEL
        return log_scale(min(values), max(values), start, end, gap)
    low = min(values, default=0.0) if axis.low is None else axis.low
    high = max(values, default=1.0) if axis.high is None else axis.high
    return linear_scale(low, high, start, end, steps=axis.steps, is_whole=axis.is_whole)


def _series(series: Series, x: Scale, y: Scale) -> Markup:
    colour = f"c{series.colour}"
    band = _band(series, x, y)
    dots = "" if len(series.points) > _MAX_DOTS else _dots(series, x, y)
    if series.is_scattered:
        return tag("g", band, dots, class_=colour)
    places = _places(thinned(series.points), x, y, is_stepped=series.is_stepped)
    dash = " dashed" if series.is_dashed else ""
    line = tag("polyline", points=places, class_=f"line{dash}") if places else ""
    return tag("g", band, line, dots, class_=colour)


_MAX_DOTS = 60


def _places(points: Sequence[Point], x: Scale, y: Scale, *, is_stepped: bool) -> str:
    places: list[str] = []
    for number, (at, value) in enumerate(points):
        if is_stepped and number:
            places.append(_place(x.at(at), y.at(points[number - 1][1])))
        places.append(_place(x.at(at), y.at(value)))
    return " ".join(places)


def _place(x: float, y: float) -> str:
    return f"{x:.1f},{y:.1f}"


def _band(series: Series, x: Scale, y: Scale) -> Markup | str:
    if not series.band:
        return ""
    upper = [_place(x.at(at), y.at(high)) for at, _, high in series.band]
    lower = [_place(x.at(at), y.at(low)) for at, low, _ in reversed(series.band)]
    return tag("polygon", points=" ".join(upper + lower), class_="band")


def _dots(series: Series, x: Scale, y: Scale) -> Markup:
    """Points that can be hovered; lines of more points than that show their shape alone."""
    dots: list[Markup] = []
    for number, (at, value) in enumerate(series.points):
        label = series.labels[number] if number < len(series.labels) else ""
        title = tag("title", label) if label else ""
        if label or series.is_scattered:
            dots.append(tag("circle", title, cx=x.at(at), cy=y.at(value), r=3.6, class_="dot"))
    return join(*dots)


def thinned(points: Sequence[Point]) -> list[Point]:
    """Keep the least and the greatest of every stretch, so that no peak is lost."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    kept: list[Point] = []
    stretches = _MAX_POINTS // 2
    for number in range(stretches):
        start = number * len(points) // stretches
        stretch = points[start : (number + 1) * len(points) // stretches]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _y_axis(axis: Axis, y: Scale) -> Markup:
    parts = []
    for value in y.ticks:
        at = y.at(value)
        parts.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(
            tag("text", axis.tick(value), x=_LEFT - 6, y=at + 4, text_anchor="end", class_="tick")
        )
    middle = (y.start + y.end) / 2
    turned = f"rotate(-90 12 {middle:.0f})"
    label = tag(
        "text", axis.label, x=12, y=middle, text_anchor="middle", transform=turned, class_="label"
    )
    return join(*parts, label)


def _x_axis(axis: Axis, x: Scale, bottom: float) -> Markup:
    parts = [tag("line", x1=x.start, x2=x.end, y1=bottom, y2=bottom, class_="axis")]
    for value in x.ticks:
        at = x.at(value)
        parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="axis"))
        anchor = "end" if at > WIDTH - _RIGHT - _LABEL else "middle"
        at = WIDTH - _RIGHT + 8 if anchor == "end" else at
        parts.append(
            tag("text", axis.tick(value), x=at, y=bottom + 18, text_anchor=anchor, class_="tick")
        )
    middle = (x.start + x.end) / 2
    label = tag("text", axis.label, x=middle, y=bottom + 38, text_anchor="middle", class_="label")
    return join(*parts, label)


def _mark(mark: Mark, x: Scale, y: Scale) -> Markup:
    if mark.is_horizontal:
        at = y.at(mark.at)
        line = tag("line", x1=x.start, x2=x.end, y1=at, y2=at, class_="mark")
        return join(
            line,
            tag("text", mark.label, x=x.end, y=at - 5, text_anchor="end", class_="told"),
        )
    at = x.at(mark.at)
    line = tag("line", x1=at, x2=at, y1=y.start, y2=y.end, class_="mark")
    is_late = at > (x.start + x.end) / 2
    anchor, beside = ("end", at - 5) if is_late else ("start", at + 5)
    height = y.end + 12 if not is_late else y.start - 8
    return join(
        line, tag("text", mark.label, x=beside, y=height, text_anchor=anchor, class_="told")
    )


def bar_plot(plot: BarPlot) -> Markup:
    """Draw stacked bars with their legend."""
    names = list(dict.fromkeys(name for bar in plot.bars for name in bar.parts))
    colours = {name: number % NUM_COLOURS + 1 for number, name in enumerate(names)}
    longest = max((sum(bar.parts.values()) for bar in plot.bars), default=1.0)
    height = _TOP + _ROW * len(plot.bars) + _BOTTOM
    x = linear_scale(0.0, longest, _RIGHT, WIDTH - _RIGHT)
    rows = [
        _bar(bar, x, _TOP + _ROW * number, colours, plot.x.tick)
        for number, bar in enumerate(plot.bars)
    ]
    body = join(*rows, _x_axis(plot.x, x, height - _BOTTOM))
    return _figure(plot.title, plot.told, body, height, _legend(list(colours.items())))


def _bar(bar: Bar, x: Scale, top: float, colours: Mapping[str, int], tick: Format) -> Markup:
    told = f"{bar.label}: {tick(sum(bar.parts.values()))}"
    parts = [tag("text", told, x=x.start, y=top + _LABEL - 4, class_="row")]
    before = 0.0
    for name, value in bar.parts.items():
        start, end = x.at(before), x.at(before + value)
        before += value
        if end > start:
            title = tag("title", f"{name}: {tick(value)}")
            place = {"x": start, "y": top + _LABEL, "width": end - start, "height": 20.0}
            parts.append(tag("rect", title, class_=f"c{colours[name]} fill", **place))
    return join(*parts)


def span_plot(plot: SpanPlot) -> Markup:
    """Draw intervals around a line at zero."""
    ends = [0.0, *(end for span in plot.spans for end in (span.low, span.high, span.value))]
    height = _TOP + _ROW * len(plot.spans) + _BOTTOM
    bottom = height - _BOTTOM
    x = linear_scale(min(ends), max(ends), _RIGHT + 8, WIDTH - _RIGHT - 8)
    zero = tag("line", x1=x.at(0), x2=x.at(0), y1=_TOP, y2=bottom, class_="mark")
    rows = [_span(span, x, _TOP + _ROW * number) for number, span in enumerate(plot.spans)]
    body = join(zero, *rows, _x_axis(plot.x, x, bottom))
    return _figure(plot.title, plot.told, body, height, "")


def _span(span: Span, x: Scale, top: float) -> Markup:
    middle = top + _LABEL + 10
    ends = {"x1": x.at(span.low), "x2": x.at(span.high), "y1": middle, "y2": middle}
    return tag(
        "g",
        tag("text", span.label, x=x.start, y=top + _LABEL - 2, class_="row"),
        tag("line", class_="span", **ends),
        tag("circle", cx=x.at(span.value), cy=middle, r=5.0, class_="dot"),
        class_=span.kind,
    )


def _legend(entries: Sequence[tuple[str, int]]) -> Markup:
    keys = [tag("span", tag("i", class_=f"key c{colour}"), name) for name, colour in entries]
    return tag("p", *keys, class_="legend")


def _figure(title: str, told: str, body: Markup, height: float, legend: str) -> Markup:
    drawing = tag(
        "svg",
        body,
        viewBox=f"0 0 {WIDTH} {height:.0f}",
        role="img",
        aria_label=f"{title}. {told}",
    )
    caption = tag("figcaption", tag("strong", title), tag("span", told, class_="note"))
    return tag("figure", caption, legend, drawing)
