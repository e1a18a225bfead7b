"""What `isthmus sim` found, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.sim.cluster import ClusterSpec
    from services.sim.report import PoolUse, Served, SimReport
    from services.sim.statistics import LoadStatistics
    from services.sim.workload import Workload

_SHARES = (0.5, 0.95, 0.99)
_MS = 1000
_COLUMNS = (
    "policy", "attained", "hit", "TTFT p50", "p95", "p99 s", "TPOT p50", "p95 ms", "busiest/mean",
)  # fmt: skip


def report_lines(
    load: Workload,
    spec: ClusterSpec,
    reports: Mapping[str, SimReport],
    slo_ttft_s: float,
    slo_tpot_s: float,
) -> Iterator[str]:
    """Write a table with a row for each policy, and the pools of the first."""
    yield f"{load.name}: {len(load.arrivals)} requests on {_cluster(spec)}, {spec.model.name}"
    yield f"speed of workers: {spec.model.source}"
    yield f"attained: TTFT within {slo_ttft_s:g} s and TPOT within {slo_tpot_s * _MS:g} ms"
    yield ""
    rows = [_COLUMNS, *(_row(name, r, slo_ttft_s, slo_tpot_s) for name, r in reports.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join((row[0].ljust(widths[0]), *cells))
    yield ""
    policy, report = next(iter(reports.items()))
    for pool, use in report.pools.items():
        yield f"{pool} ({policy}): {_use(use)}"
    yield f"over {report.duration_s:.0f} s, {_ends(report)}"
    if report.refused_share:
        reasons = ", ".join(f"{count} {why}" for why, count in _reasons(report).items())
        yield f"refused: {report.refused_share:.1%} ({reasons})"


def report_json(
    load: Workload,
    spec: ClusterSpec,
    reports: Mapping[str, SimReport],
    seed: int,
    slo_ttft_s: float,
    slo_tpot_s: float,
) -> dict[str, object]:
    """Return everything as one JSON object, all requests left out."""
    return {
        "load": load.name,
        "num_requests": len(load.arrivals),
        "workers": spec.sizes(),
        "num_routers": spec.num_routers,
        "performance": spec.model.model_dump(mode="json", exclude_none=True),
        "seed": seed,
        "slo": {"ttft_s": slo_ttft_s, "tpot_s": slo_tpot_s},
        "policies": {
            name: _report_json(report, slo_ttft_s, slo_tpot_s) for name, report in reports.items()
        },
    }


def statistics_lines(name: str, found: LoadStatistics) -> Iterator[str]:
    """Write what a load is like."""
    rate = "" if found.rate is None else f", {found.rate:.2f} a second"
    yield f"{name}: {found.num_requests} requests in {found.duration_s:.0f} s{rate}"
    for title, lengths in (("prompts", found.inputs), ("answers", found.outputs)):
        yield (
            f"{title}: {lengths.mean:.0f} tokens on average, p50 {lengths.p50:.0f}, "
            f"p90 {lengths.p90:.0f}, p99 {lengths.p99:.0f}"
        )
    if found.gap_cv2 is not None:
        yield f"gaps: squared coefficient of variation {found.gap_cv2:.1f} (Poisson: 1)"
    if found.peak_to_mean:
        peaks = ", ".join(f"{ratio:.1f} over {s} s" for s, ratio in found.peak_to_mean.items())
        yield f"peak to mean: {peaks}"
    yield (
        f"ideal hit: {found.ideal_block_hit:.4f} of the blocks, "
        f"{found.ideal_token_hit:.4f} of the tokens"
    )


def statistics_json(name: str, found: LoadStatistics) -> dict[str, object]:
    """Return the same as one JSON object."""
    return {"load": name, **asdict(found)}


def _cluster(spec: ClusterSpec) -> str:
    return " + ".join(f"{count} {pool}" for pool, count in spec.sizes().items() if count)


def _row(name: str, report: SimReport, slo_ttft_s: float, slo_tpot_s: float) -> tuple[str, ...]:
    ttft = [_number(report.quantile(_ttft_s, share)) for share in _SHARES]
    tpot = [_number(report.quantile(_tpot_s, share), _MS, 1) for share in _SHARES[:2]]
    busiest = max(use.busiest_to_mean for pool, use in report.pools.items() if pool != "decode")
    attained = report.attainment(slo_ttft_s, slo_tpot_s)
    return (name, f"{attained:.3f}", f"{report.token_hit:.3f}", *ttft, *tpot, f"{busiest:.2f}")


def _number(value: float | None, factor: float = 1.0, digits: int = 3) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


def _use(use: PoolUse) -> str:
    share = use.busy_s / use.provisioned_s if use.provisioned_s else 0.0
    return (
        f"{use.peak_workers} workers at most, {use.provisioned_s:.0f} s provisioned, {share:.0%} "
        f"busy ({use.prefill_busy_s:.0f} s prompts, {use.decode_busy_s:.0f} s answers)"
    )


def _ends(report: SimReport) -> str:
    ends = Counter(r.status for r in report.requests)
    return ", ".join(f"{count} {status}" for status, count in sorted(ends.items()))


def _reasons(report: SimReport) -> dict[str, int]:
    return dict(sorted(Counter(r.reason for r in report.requests if r.reason).items()))


def _report_json(report: SimReport, slo_ttft_s: float, slo_tpot_s: float) -> dict[str, object]:
    return {
        "attainment": report.attainment(slo_ttft_s, slo_tpot_s),
        "block_hit": report.block_hit,
        "token_hit": report.token_hit,
        "ttft_s": _quantiles(report, _ttft_s),
        "tpot_s": _quantiles(report, _tpot_s),
        "status": dict(sorted(Counter(r.status for r in report.requests).items())),
        "refused_share": report.refused_share,
        "refused": _reasons(report),
        "modes": dict(sorted(Counter(r.mode for r in report.answered).items())),
        "pools": {pool: asdict(use) for pool, use in report.pools.items()},
        "duration_s": report.duration_s,
        "handoff_bytes": report.handoff_bytes,
        "handoff_wait_s": report.handoff_wait_s,
        "num_events": report.num_events,
        "num_reports": report.num_reports,
        "events_per_request": report.num_events / len(report.requests),
        "num_resyncs": report.num_resyncs,
    }


def _quantiles(
    report: SimReport, figure: Callable[[Served], float | None]
) -> dict[str, float | None]:
    told = {f"p{share * 100:g}": report.quantile(figure, share) for share in _SHARES}
    return {"mean": report.mean(figure), **told}


def _ttft_s(served: Served) -> float | None:
    return served.ttft_s


def _tpot_s(served: Served) -> float | None:
    return served.tpot_s
