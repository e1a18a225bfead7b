from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from services.telemetry import catalog
from services.telemetry.metrics import MAX_SERIES, Metrics


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    made = Metrics.enabled()
    yield made
    made.shutdown()


def test_values_are_rendered_under_the_catalogue_name(metrics: Metrics) -> None:
    metrics.add(catalog.REQUESTS, 2, mode="REMOTE", outcome="ok")
    metrics.observe_all(catalog.ITL, [0.012, 2.0])
    metrics.observe_all(catalog.ITL, [])
    metrics.observe(catalog.ITL, 0.001)
    metrics.watch(catalog.REQUESTS_OPEN, lambda: 3)
    metrics.watch(catalog.KV_BLOCKS, lambda: [(1, {"state": "free"}), (2, {"state": "in_use"})])
    text = metrics.render().decode()
    for line in (
        'isthmus_requests_total{mode="REMOTE",outcome="ok"} 2.0',
        'isthmus_itl_seconds_bucket{le="0.01"} 1.0',
        'isthmus_itl_seconds_bucket{le="0.015"} 2.0',
        "isthmus_itl_seconds_count 3.0",
        "isthmus_requests_open 3.0",
        'isthmus_kv_blocks{state="in_use"} 2.0',
    ):
        assert line in text.splitlines(), line


def test_every_entry_comes_out_under_its_own_name(metrics: Metrics) -> None:
    expected = set()
    for metric in catalog.all_metrics():
        labels = dict.fromkeys(metric.labels, "x")
        if isinstance(metric, catalog.Counter):
            metrics.add(metric, 1, **labels)
        elif isinstance(metric, catalog.Histogram):
            metrics.observe(metric, 1.0, **labels)
        else:
            metrics.watch(metric, lambda labels=labels: [(1.0, labels)])  # type: ignore[misc]  # default binds the loop's value
        expected.add(metric.name)
    typed = set(re.findall(r"^# TYPE (\S+) ", metrics.render().decode(), re.MULTILINE))
    assert typed == expected


@pytest.mark.parametrize("labels", [{}, {"mode": "x"}, {"mode": "x", "outcome": "y", "id": "z"}])
def test_labels_must_be_those_of_the_catalogue(metrics: Metrics, labels: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="isthmus_requests_total has labels"):
        metrics.add(catalog.REQUESTS, 1, **labels)


def test_number_of_series_is_bounded(metrics: Metrics) -> None:
    for number in range(MAX_SERIES + 200):
        metrics.add(catalog.RETRIES, code=str(number))
    lines = re.findall(r"^isthmus_retries_total\{", metrics.render().decode(), re.MULTILINE)
    assert len(lines) == MAX_SERIES + 1  # the last one collects the overflow


def test_later_watcher_replaces_the_earlier(metrics: Metrics) -> None:
    metrics.watch(catalog.DEGRADED, lambda: 0)
    metrics.watch(catalog.DEGRADED, lambda: 1)
    assert "isthmus_router_degraded 1.0" in metrics.render().decode()


def test_disabled_metrics_do_nothing() -> None:
    metrics = Metrics.disabled()
    metrics.add(catalog.STEPS)
    metrics.observe(catalog.ITL, 1)
    metrics.watch(catalog.DEGRADED, lambda: 1)
    assert metrics.render() == b""
    metrics.shutdown()


def test_two_sets_do_not_share_values() -> None:
    first, second = Metrics.enabled(), Metrics.enabled()
    first.add(catalog.STEPS)
    assert b"isthmus_steps_total 1.0" in first.render()
    assert b"isthmus_steps_total 1.0" not in second.render()
    first.shutdown()
    second.shutdown()


def test_counters_without_labels_are_there_before_they_count(metrics: Metrics) -> None:
    totals = (*catalog.ROUTER_TOTALS, *catalog.WORKER_TOTALS)
    assert sorted(totals, key=lambda total: total.name) == sorted(
        (m for m in catalog.all_metrics() if isinstance(m, catalog.Counter) and not m.labels),
        key=lambda total: total.name,
    )
    metrics.begin(catalog.WORKER_TOTALS)
    metrics.add(catalog.STEPS)
    lines = metrics.render().decode().splitlines()
    assert [line for line in lines if line.startswith("isthmus_") and "build" not in line] == [
        "isthmus_steps_total 1.0",
        "isthmus_preemptions_total 0.0",
        "isthmus_kv_integrity_errors_total 0.0",
    ]
