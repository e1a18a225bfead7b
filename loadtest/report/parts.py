"""Pieces of every report: the document, cards, tiles, tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from loadtest.plots import numbers
from loadtest.plots.markup import Markup, join, tag
from loadtest.report.style import STYLE
from loadtest.result import Check, Distribution, FaultOutcome, Interval, Percentile

# Nothing is fetched and nothing runs, whatever a page was made from.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
NONE = "–"

Cell = str | float | None


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure that stands out."""

    title: str
    value: str
    note: str = ""


def document(title: str, *sections: str) -> str:
    """Make the whole file."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup(STYLE)),
    )
    body = tag("body", tag("main", *sections))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def header(title: str, *notes: str) -> Markup:
    """Say what the page is about."""
    return tag("header", tag("h1", title), *(tag("p", note, class_="note") for note in notes))


def verdict(word: str, kind: str, reason: str) -> Markup:
    """Say how it ended; `kind` is good, bad or neither."""
    return tag(
        "div",
        badge(word, kind),
        " ",
        sentence(reason),
        class_=f"card verdict {kind}",
        role="status",
    )


def badge(word: str, kind: str) -> Markup:
    """Make a word on a coloured ground; the colour says nothing that the word does not."""
    return tag("span", word, class_=f"badge {kind}")


def section(title: str, *parts: str) -> Markup:
    """Make a section; one with nothing in it is left out."""
    told = [part for part in parts if part]
    return tag("section", tag("h2", title), *told) if told else Markup()


def tiles(entries: Sequence[Tile]) -> Markup:
    """Put figures side by side."""
    made = [
        tag(
            "div",
            tag("span", t.title, class_="note"),
            tag("b", t.value),
            _note(t.note),
            class_="tile",
        )
        for t in entries
    ]
    return tag("div", *made, class_="tiles")


def _note(text: str) -> Markup:
    return tag("span", text, class_="note") if text else Markup()


def plots(*figures: str) -> Markup:
    """Put plots side by side where there is room."""
    return tag("div", *figures, class_="plots") if any(figures) else Markup()


def cards(*tables: str) -> Markup:
    """Put small tables side by side where there is room."""
    return tag("div", *tables, class_="cards") if any(tables) else Markup()


def table(caption: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """Make a table whose first column names its rows; none without rows.

    Columns of numbers stand to the right, columns of words to the left.
    """
    if not rows:
        return Markup()
    kinds = [_column_kind([row[at] for row in rows]) for at in range(len(headers))]
    cells = [
        tag("th", text, scope="col", class_=kind) for text, kind in zip(headers, kinds, strict=True)
    ]
    body = [_row(row, kinds) for row in rows]
    made = tag(
        "table", tag("caption", caption), tag("thead", tag("tr", *cells)), tag("tbody", *body)
    )
    return _scroller(caption, made)


def _row(cells: Sequence[str], kinds: Sequence[str]) -> Markup:
    first, *others = cells
    made = [tag("td", cell, class_=kind) for cell, kind in zip(others, kinds[1:], strict=True)]
    return tag("tr", tag("th", first, scope="row"), *made)


def _column_kind(cells: Sequence[str]) -> str:
    longest = max((len(cell) for cell in cells if not isinstance(cell, Markup)), default=0)
    return "text" if longest > _LONGEST_NUMBER else "number"


_LONGEST_NUMBER = 24


def fact_table(caption: str, rows: Sequence[tuple[str, str]]) -> Markup:
    """Make a table of names and values; none without rows."""
    if not rows:
        return Markup()
    body = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in rows]
    made = tag("table", tag("caption", caption), tag("tbody", *body))
    return _scroller(caption, made, " facts")


def _scroller(caption: str, made: Markup, kind: str = "") -> Markup:
    """Let a wide table scroll in a frame of its own, also by keyboard."""
    return tag("div", made, class_=f"scroll{kind}", tabindex="0", role="region", aria_label=caption)


def noted(value: str, note: str) -> Markup:
    """Make a cell with a smaller line under its value."""
    return join(value, _note(note))


def by_share(found: Distribution | None) -> dict[float, Percentile]:
    """Look percentiles up by their share."""
    return (
        {} if found is None else {percentile.share: percentile for percentile in found.percentiles}
    )


def percentile_cell(name: str, percentile: Percentile) -> str:
    """Write a percentile and its interval, or that the sample cannot bear it."""
    if percentile.value is None:
        return noted(NONE, "too few requests" if percentile.too_few else "none")
    value = numbers.figure(name, percentile.value)
    if percentile.low is None or percentile.high is None:
        return value
    low, high = numbers.figure(name, percentile.low), numbers.figure(name, percentile.high)
    return noted(value, f"{low} – {high}")


def share_name(share: float) -> str:
    """Name a percentile: p50, p99.9."""
    return f"p{share * 100:.6g}"


def distribution_table(caption: str, distributions: Mapping[str, Distribution]) -> Markup:
    """Make a table of percentiles, one distribution a row."""
    known = {name: d for name, d in distributions.items() if d.count}
    shares = sorted({p.share for d in known.values() for p in d.percentiles})
    borne = [s for s in shares if any(_is_borne(d, s) for d in known.values())]
    if left_out := [share_name(share) for share in shares if share not in borne]:
        caption += f" (too few requests for {', '.join(left_out)})"
    rows = [_distribution_row(name, found, borne) for name, found in known.items()]
    headers = ["", "count", "mean", *(share_name(share) for share in borne), "greatest"]
    return table(caption, headers, rows)


def _is_borne(found: Distribution, share: float) -> bool:
    percentile = by_share(found).get(share)
    return percentile is not None and percentile.value is not None


def _distribution_row(name: str, found: Distribution, shares: Sequence[float]) -> list[str]:
    told = by_share(found)
    cells = [percentile_cell(name, told[share]) if share in told else NONE for share in shares]
    ends = optional(name, found.mean), optional(name, found.maximum)
    return [numbers.title_of(name), f"{found.count:,}", ends[0], *cells, ends[1]]


def optional(name: str, value: float | None) -> str:
    """Write a figure that may be missing."""
    return NONE if value is None else numbers.figure(name, value)


def fault_name(fault: FaultOutcome) -> str:
    """Say what was done to whom."""
    how_long = "" if fault.for_s is None else f" for {fault.for_s:g} s"
    return f"{fault.action} {fault.process}{how_long}"


def interval(share: Interval) -> str:
    """Write the ends of the interval of a share."""
    return f"{numbers.percent(share.low)} – {numbers.percent(share.high)}"


def sentence(text: str) -> str:
    """Begin with a capital and end with a full stop."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


_CHECK_KINDS = {"ok": "good", "failed": "bad"}


def checks(entries: Sequence[Check]) -> Markup:
    """List the questions about the run itself; those that failed come first."""
    made = [
        tag(
            "li",
            badge(c.state, _CHECK_KINDS.get(c.state, "")),
            tag("span", sentence(c.message)),
        )
        for c in sorted(entries, key=lambda check: check.is_ok)
    ]
    return tag("ul", *made, class_="checks card") if made else Markup()


# Any: values of a scenario, a target or a cost, as JSON has them.
def facts_table(caption: str, facts: Mapping[str, Any]) -> Markup:
    """Make a table of names and values; a mapping inside becomes rows with its own names."""
    return fact_table(caption, _fact_rows("", facts))


def _fact_rows(prefix: str, facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            rows += _fact_rows(f"{prefix}{name} / ", value)
        else:
            rows.append((prefix + numbers.title_of(name), fact(name, value)))
    return rows


def fact(name: str, value: Any) -> str:
    """Write one value of any kind."""
    match value:
        case None | "" | [] | ():
            return NONE
        case bool():
            return "yes" if value else "no"
        case int() if not numbers.unit_of(name):
            return f"{value:,}"
        case int() | float():
            return numbers.figure(name, value)
        case list() | tuple():
            return ", ".join(fact("", item) for item in value)
    return str(value)


def as_yaml(title: str, value: Mapping[str, Any]) -> Markup:
    """Show a nested value in full, folded away."""
    text = yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=88)
    return tag("details", tag("summary", title), tag("div", tag("pre", text), class_="card"))


def definitions(names: Sequence[str]) -> Markup:
    """Say what figures mean, those that the page shows."""
    rows = [(numbers.title_of(name), MEANINGS[name]) for name in names if name in MEANINGS]
    return fact_table("What the figures mean", rows)


MEANINGS = {
    "ttft_ms": "from the time a request was due (open loop) to its first token",
    "ttft_sent_ms": "from the time the client really sent it to its first token",
    "tpot_ms": "mean time of a token after those of the first message, for each request",
    "itl_ms": "time between two messages, shared among the tokens of the later one",
    "e2e_ms": "from the time a request was due to the end of its stream",
    "max_stall_ms": "longest wait between two messages of a request",
    "handoff_gap_ms": "how much longer the second message took than the median later one: "
    "where KV crosses from prefill to decode",
    "dispatch_delay_ms": "how late the client sent a request",
    "goodput_rps": "requests a second that succeeded within every limit of the SLO",
}
