"""Alerts and dashboards against the catalogue: a name that nobody measures never fires."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from services.autoscaler.observation import ReplicaState
from services.common.errors import ERROR_TABLE
from services.engine.api import EngineLoad
from services.router import view
from services.telemetry import catalog
from services.telemetry.catalog import Counter, Histogram, Metric, all_metrics
from services.worker.metrics import _block_readings, _work_readings

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "helm/isthmus/files"
GROUPS: list[dict[str, Any]] = [
    group
    for path in sorted((FILES / "prometheus").glob("*.yml"))
    for group in yaml.safe_load(path.read_text())["groups"]
]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
BOARDS = {path.stem: json.loads(path.read_text()) for path in (FILES / "grafana").glob("*.json")}
METRICS: dict[str, Metric] = {metric.name: metric for metric in all_metrics()}
FROM_THE_SCRAPE = {"instance", "job", "le"}
RUNBOOKS = ROOT / "docs/operations/runbooks.md"

_SELECTED = re.compile(r"(isthmus[a-z_]*(?::[a-z0-9_:]+)?)(?:\{([^}]*)\})?(\[)?")
_MATCHER = re.compile(r'([a-z_]+)(=~|!~|!=|=)"([^"]*)"')
_GROUPED = re.compile(r"\b(?:by|on|without)\s*\(([^)]*)\)")


def expressions() -> Iterator[tuple[str, str]]:
    for rule in RULES:
        yield rule.get("alert") or rule["record"], rule["expr"]
    for name, board in BOARDS.items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"]


def metric_of(series: str) -> Metric:
    """Return the metric of a series name; of a histogram there are three."""
    if series in METRICS:
        return METRICS[series]
    base = re.sub(r"_(bucket|count|sum)$", "", series)
    metric = METRICS.get(base)
    assert isinstance(metric, Histogram), f"nobody measures {series}"
    return metric


@pytest.mark.parametrize(("where", "expr"), list(expressions()))
def test_every_series_and_label_is_measured(where: str, expr: str) -> None:
    found = list(_SELECTED.finditer(expr))
    assert found, where
    labels: set[str] = set()
    for series, matchers, is_range in (match.groups() for match in found):
        if ":" in series:
            assert series in RECORDED, series
            continue
        metric = metric_of(series)
        labels |= set(metric.labels)
        for label, _, _ in _MATCHER.findall(matchers or ""):
            assert label in {*metric.labels, "le"}, f"{series} has no label {label}"
        # Only what counts may be looked at over time, and what counts only so.
        counts = isinstance(metric, Counter | Histogram)
        assert bool(is_range) is counts, f"{where}: {series}"
    for names in _GROUPED.findall(expr):
        for name in filter(None, (each.strip() for each in names.split(","))):
            assert name in labels | FROM_THE_SCRAPE, f"{where}: nothing has a label {name}"


@pytest.mark.parametrize(("where", "expr"), list(expressions()))
def test_brackets_of_every_expression_close(where: str, expr: str) -> None:
    plain = re.sub(r'"[^"]*"', "", expr)
    for opening, closing in ("()", "[]", "{}"):
        assert plain.count(opening) == plain.count(closing), where


def test_every_bound_is_a_bucket() -> None:
    for _, expr in expressions():
        for series, matchers, _ in (match.groups() for match in _SELECTED.finditer(expr)):
            for label, _, value in _MATCHER.findall(matchers or ""):
                if label == "le":
                    metric = metric_of(series)
                    assert isinstance(metric, Histogram)
                    assert value in {str(float(bound)) for bound in metric.buckets}


def test_faults_are_codes_of_the_error_table_and_none_is_the_clients() -> None:
    (faults,) = {
        found[1]
        for rule in RULES
        if (found := re.search(r'isthmus_requests_total\{outcome=~"([^"]+)"', rule["expr"]))
    }
    codes = faults.split("|")
    assert set(codes) <= ERROR_TABLE.keys()
    left_out = set(ERROR_TABLE) - set(codes)
    # What a client did, asked for or is limited to; what an operator did.
    ours_left_out = {code for code in left_out if ERROR_TABLE[code].http_status >= 500}
    assert ours_left_out == {"killed", "draining"}


def test_rates_of_burning_have_both_windows() -> None:
    burns = [rule for name, rule in ALERTS.items() if "Burn" in name]
    assert len(burns) == 4
    for rule in burns:
        windows = re.findall(r"ratio_rate(\w+)", rule["expr"])
        assert windows in (["1h", "5m"], ["6h", "30m"])


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_bad_it_is_and_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    headings = re.findall(r"^## (Isthmus\w+)", RUNBOOKS.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(ALERTS)


def test_names_of_rules_and_groups_are_unique() -> None:
    names = [rule.get("alert") or rule["record"] for rule in RULES]
    groups = [group["name"] for group in GROUPS]
    assert len(set(names)) == len(names)
    assert len(set(groups)) == len(groups)


def test_states_that_are_watched_are_states_that_are_told() -> None:
    """Values of labels, which the catalogue does not list."""
    engine: Any = SimpleNamespace(load=EngineLoad)
    told = {
        catalog.KV_BLOCKS.name: {labels["state"] for _, labels in _block_readings(engine)},
        catalog.WORK_OPEN.name: {labels["state"] for _, labels in _work_readings(engine)},
        catalog.WORKERS.name: {
            view.LIVE,
            view.DRAINING,
            view.SUSPECT,
            view.INCOMPATIBLE,
            view.GONE,
        },
        catalog.REPLICAS.name: {"desired", *(state.value for state in ReplicaState)},
    }
    num = 0
    for _, expr in expressions():
        for series, matchers, _ in (match.groups() for match in _SELECTED.finditer(expr)):
            for label, _, given in _MATCHER.findall(matchers or ""):
                if label == "state":
                    assert set(given.split("|")) <= told[series], expr
                    num += 1
    assert num > 5
