"""`summary.md`: the figures that matter, for a review or a chat. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from loadtest.plots import numbers
from loadtest.plots.markup import printable
from loadtest.report.curves import scenario_name
from loadtest.report.figure_names import figure_rows
from loadtest.report.parts import NONE, fault_name, optional, share_name
from loadtest.result import (
    CompareResult,
    Distribution,
    FaultOutcome,
    Interval,
    RunResult,
    SearchResult,
)

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#!~&$@])")


def summary(result: RunResult | SearchResult | CompareResult) -> str:
    """Write a result in Markdown."""
    match result:
        case RunResult():
            return _run(result)
        case SearchResult():
            return _search(result)
        case CompareResult():
            return _compare(result)


def _run(result: RunResult) -> str:
    lines = [f"# {_safe(scenario_name(result.scenario))}: {result.verdict}", ""]
    lines += [_safe(result.verdict_reason), ""]
    figures = [
        (numbers.title_of(name), numbers.figure(name, v)) for name, v in result.rates.items()
    ]
    if result.attainment is not None:
        figures.insert(0, ("within the SLO", _share(result.attainment)))
    figures += [(name, f"{n:,}") for name, n in result.counts.items() if n or name == "measured"]
    figures += [(f"error {code}", f"{number:,}") for code, number in result.errors.items()]
    lines += _table(["figure", "value"], [*figures, *figure_rows(result.figures)])
    lines += _latencies(result.distributions)
    told = [
        (check.state if check.is_ok else f"**{check.state}**", check.message)
        for check in sorted(result.checks, key=lambda check: check.is_ok)
    ]
    lines += [f"* {word}: {_safe(message)}" for word, message in told]
    lines += [f"* {_safe(_fault(fault))}" for fault in result.faults]
    lines += [f"* note: {_safe(note)}" for note in result.notes]
    lines += ["", _safe(f"Seed {result.seed}, commit {result.commit}, {result.started_at}."), ""]
    return "\n".join(lines)


def _fault(fault: FaultOutcome) -> str:
    if fault.failure:
        return f"not brought: {fault_name(fault)}: {fault.failure}"
    back, held = optional("_s", fault.back_s), optional("_s", fault.recovery_s)
    return (
        f"{fault_name(fault)} at {numbers.figure('_s', fault.at_s)}: ready again after {back}, SLO "
        f"held again after {held}; {fault.num_failed} of {fault.num_requests} requests failed"
    )


def _latencies(distributions: Mapping[str, Distribution]) -> list[str]:
    shares = sorted({p.share for d in distributions.values() for p in d.percentiles})
    rows = []
    for name, found in distributions.items():
        by_share = {p.share: p.value for p in found.percentiles}
        cells = [optional(name, by_share.get(share)) for share in shares]
        ends = optional(name, found.mean), optional(name, found.maximum)
        rows.append([numbers.title_of(name), f"{found.count:,}", ends[0], *cells, ends[1]])
    headers = ["", "count", "mean", *(share_name(share) for share in shares), "greatest"]
    return _table(headers, rows)


def _search(result: SearchResult) -> str:
    name = _safe(scenario_name(result.scenario))
    is_split = any(probe.prefill_workers is not None for probe in result.probes)
    rows = [
        (
            numbers.figure("_rps", probe.offered_rps),
            _share(probe.attainment),
            numbers.figure("_rps", probe.goodput_rps[1]),
            probe.state,
            probe.reason,
            *([f"{probe.prefill_workers} + {probe.decode_workers}"] if is_split else []),
        )
        for probe in sorted(result.probes, key=lambda probe: probe.offered_rps)
    ]
    best = "none" if result.best_rps is None else numbers.figure("_rps", result.best_rps)
    lines = [f"# {name}: {best}", "", f"{result.verdict}: {_safe(result.verdict_reason)}", ""]
    headers = ["offered", "within the SLO", "goodput", "state", "why"]
    if is_split:
        headers.append("prefill + decode workers")
    return "\n".join(lines + _table(headers, rows))


def _compare(result: CompareResult) -> str:
    rows = [
        (
            metric.name,
            optional(metric.name, metric.a),
            optional(metric.name, metric.b),
            f"{optional(metric.name, metric.low)} – {optional(metric.name, metric.high)}",
            metric.verdict,
        )
        for metric in result.metrics
    ]
    title = _safe(f"{result.name_b} against {result.name_a}: {result.verdict}")
    lines = [f"# {title}", "", _safe(result.verdict_reason), ""]
    lines += [f"* **not alike**: {_safe(warning)}" for warning in result.warnings]
    told = _table(["figure", "value"], figure_rows(result.figures))
    return "\n".join([*lines, "", *told, *_table(["", "A", "B", "change", "verdict"], rows)])


def _share(share: Interval) -> str:
    percent = numbers.percent
    return f"{percent(share.value)} ({percent(share.low)} – {percent(share.high)})"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    told = [f"| {' | '.join(_safe(cell) or NONE for cell in row)} |" for row in rows]
    return [f"| {' | '.join(headers)} |", f"|{'---|' * len(headers)}", *told, ""]


def _safe(text: str) -> str:
    """Keep a text on its line, and let nothing in it be Markdown or HTML."""
    return _SPECIAL.sub(r"\\\1", " ".join(printable(text).split()))
