"""`metrics.prom`: the figures of a result for Prometheus' textfile collector. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from loadtest.plots.markup import printable
from loadtest.report.curves import scenario_name
from loadtest.result import CompareResult, Distribution, RunResult, SearchResult

_PREFIX = "isthmus_loadtest_"
_LABELS = ("scenario", "target")

# Name, help, labels beside the two, value.
_Sample = tuple[str, str, Mapping[str, str], float]


def metrics_file(result: RunResult | SearchResult | CompareResult) -> bytes:
    """Write gauges; of a comparison, those of B."""
    run = result.b if isinstance(result, CompareResult) else result
    common = {
        "scenario": printable(scenario_name(run.scenario)),
        "target": printable(str(run.target.get("address", ""))),
    }
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    samples = _search(run) if isinstance(run, SearchResult) else _run(run)
    for name, told, labels, value in samples:
        if name not in gauges:
            gauges[name] = Gauge(_PREFIX + name, told, [*_LABELS, *labels], registry=registry)
        told_labels = {key: printable(label) for key, label in labels.items()}
        gauges[name].labels(**common, **told_labels).set(value)
    return generate_latest(registry)


def _run(result: RunResult) -> Iterator[_Sample]:
    yield "ok", "1 if the verdict is OK", {"verdict": result.verdict}, result.verdict == "OK"
    yield "duration_seconds", "Length of the run", {}, result.duration_s
    for status, number in result.counts.items():
        yield "requests", "Requests by how they ended", {"status": status}, number
    for name, rate in result.rates.items():
        yield "rate", "Rates, in the unit the name ends with", {"name": name}, rate
    if result.attainment is not None:
        yield "attainment_ratio", "Share within the SLO", {}, result.attainment.value
    for check in result.checks:
        yield "check_ok", "1 if a check of the run holds", {"check": check.name}, check.is_ok
    for name, found in result.distributions.items():
        yield from _latency(name, found)


def _latency(name: str, found: Distribution) -> Iterator[_Sample]:
    """In seconds, as Prometheus wants times; percentiles the sample cannot bear are left out."""
    if not name.endswith("_ms"):
        return
    for percentile in found.percentiles:
        if percentile.value is not None:
            labels = {"name": name.removesuffix("_ms"), "quantile": f"{percentile.share:g}"}
            yield "latency_seconds", "Latencies by percentile", labels, percentile.value / 1e3


def _search(result: SearchResult) -> Iterator[_Sample]:
    yield "search_found", "1 if a highest rate was found", {}, result.verdict == "FOUND"
    if result.best_rps is not None:
        yield "search_best_rps", "Highest rate within the SLO", {}, result.best_rps
