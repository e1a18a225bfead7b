"""Grafana dashboards, from a table of panels; written by tools/gen_docs.py."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("helm/isthmus/files/grafana")
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: what it shows, its unit, and its series as (expression, legend)."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]


def _quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    group = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (
            f"histogram_quantile({q}, sum by ({group}) (rate({metric}_bucket[$__rate_interval])))",
            f"p{round(q * 100)}{legend}",
        )
        for q in (0.5, 0.95, 0.99)
    )


def _rate(metric: str, by: str, more: str = "") -> tuple[tuple[str, str], ...]:
    return ((f"sum by ({by}) (rate({metric}{more}[$__rate_interval]))", f"{{{{{by}}}}}"),)


_REQUESTS = (
    Panel("Requests by outcome", "reqps", _rate("isthmus_requests_total", "outcome")),
    Panel("Requests by mode", "reqps", _rate("isthmus_requests_total", "mode")),
    Panel(
        "Faults of ours, share",
        "percentunit",
        (
            ("isthmus:request_faults:ratio_rate5m", "5 minutes"),
            ("isthmus:request_faults:ratio_rate1h", "1 hour"),
        ),
    ),
    Panel("TTFT", "s", _quantiles("isthmus_ttft_seconds")),
    Panel("Time per token", "s", _quantiles("isthmus_tpot_seconds")),
    Panel("Gap between frames", "s", _quantiles("isthmus_itl_seconds")),
    Panel(
        "Tokens",
        "ops",
        (
            ("sum(rate(isthmus_prompt_tokens_total[$__rate_interval]))", "prompt"),
            ("sum(rate(isthmus_cached_tokens_total[$__rate_interval]))", "of these cached"),
            ("sum(rate(isthmus_completion_tokens_total[$__rate_interval]))", "generated"),
        ),
    ),
    Panel(
        "Open and waiting",
        "short",
        (("sum(isthmus_requests_open)", "open"), ("sum(isthmus_queued)", "waiting")),
    ),
    Panel("Admissions", "reqps", _rate("isthmus_admissions_total", "action")),
    Panel("Where time goes, p95", "s", _quantiles("isthmus_stage_seconds", "stage")[1:2]),
    Panel("Choice of workers", "s", _quantiles("isthmus_route_seconds")),
    Panel("Store calls", "ops", _rate("isthmus_store_calls_total", "outcome")),
    Panel("Routes without the store", "short", (("isthmus_router_degraded", "{{instance}}"),)),
    Panel(
        "Workers as routers see them",
        "short",
        (("max by (role, state) (isthmus_workers)", "{{role}} {{state}}"),),
    ),
    Panel("Loop lag", "s", (("isthmus_loop_lag_seconds", "{{instance}}"),)),
)
_WORKERS = (
    Panel("KV blocks", "short", (("sum by (state) (isthmus_kv_blocks)", "{{state}}"),)),
    Panel(
        "KV blocks in use, by worker",
        "percentunit",
        (
            (
                'sum by (instance) (isthmus_kv_blocks{state="in_use"}) / '
                "sum by (instance) (isthmus_kv_blocks)",
                "{{instance}}",
            ),
        ),
    ),
    Panel("Work", "short", (("sum by (state) (isthmus_work_open)", "{{state}}"),)),
    Panel("Step time", "s", _quantiles("isthmus_step_seconds")),
    Panel("Tokens in a step", "short", _quantiles("isthmus_step_tokens")),
    Panel("Steps", "ops", _rate("isthmus_steps_total", "instance")),
    Panel("Handoffs", "ops", _rate("isthmus_handoffs_total", "outcome")),
    Panel("Handoff time by plane", "s", _quantiles("isthmus_transfer_seconds", "plane")),
    Panel("KV moved", "Bps", _rate("isthmus_transfer_bytes_total", "plane")),
    Panel("Transfers open", "short", (("sum by (side) (isthmus_transfers_open)", "{{side}}"),)),
    Panel("Faults of transfers", "ops", _rate("isthmus_transfer_faults_total", "kind")),
    Panel("Damaged blocks", "ops", _rate("isthmus_kv_integrity_errors_total", "instance")),
    Panel("Preemptions", "ops", _rate("isthmus_preemptions_total", "instance")),
    Panel("Lease renewals", "ops", _rate("isthmus_lease_renewals_total", "outcome")),
    Panel("Certificates end in", "s", (("isthmus_cert_expiry_seconds", "{{instance}} {{use}}"),)),
)
_AUTOSCALER = (
    Panel(
        "Replicas",
        "short",
        (("max by (pool, state) (isthmus_autoscaler_replicas)", "{{pool}} {{state}}"),),
    ),
    Panel("Conditions", "short", (("max by (type) (isthmus_autoscaler_condition)", "{{type}}"),)),
    Panel("Actions", "ops", _rate("isthmus_autoscaler_actions_total", "action")),
    Panel(
        "Signals",
        "short",
        (("max by (pool, metric) (isthmus_autoscaler_signal)", "{{pool}} {{metric}}"),),
    ),
    Panel("Looks at the cluster", "ops", _rate("isthmus_autoscaler_ticks_total", "outcome")),
    Panel("Calls that failed", "ops", _rate("isthmus_autoscaler_driver_faults_total", "call")),
)
BOARDS = {"requests": _REQUESTS, "workers": _WORKERS, "autoscaler": _AUTOSCALER}


def dashboards() -> dict[Path, str]:
    """Every dashboard: path below the repository root -> JSON."""
    return {
        FOLDER / f"isthmus-{name}.json": json.dumps(_board(name, panels), indent=1) + "\n"
        for name, panels in BOARDS.items()
    }


def _board(name: str, panels: tuple[Panel, ...]) -> dict[str, object]:
    return {
        "uid": f"isthmus-{name}",
        "title": f"isthmus: {name}",
        "description": "Generated by tools/gen_docs.py (`make docs`). Do not edit.",
        "tags": ["isthmus"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel(index, panel) for index, panel in enumerate(panels)],
    }


def _panel(index: int, panel: Panel) -> dict[str, object]:
    row, column = divmod(index, _COLUMNS)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + n),
                "expr": expr,
                "legendFormat": legend,
                "datasource": _SOURCE,
            }
            for n, (expr, legend) in enumerate(panel.series)
        ],
    }
