"""Metrics of the catalogue through OpenTelemetry, read in Prometheus text form."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Self

from services.common.version import installed_version
from services.telemetry.catalog import (
    BUILD_INFO,
    Counter,
    Gauge,
    Histogram,
    Metric,
    all_metrics,
)

if TYPE_CHECKING:
    from opentelemetry import metrics as otel
    from opentelemetry.sdk.metrics import MeterProvider
    from prometheus_client import CollectorRegistry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_SERIES = 500  # label sets of one metric; more are folded into one overflow series

Reading = tuple[float, Mapping[str, str]]


class Metrics:
    """Counts and observes by catalogue entry; `Metrics.disabled()` does nothing, cheaply."""

    def __init__(self, instruments: _Instruments | None) -> None:
        self._instruments = instruments

    @classmethod
    def enabled(cls) -> Self:
        """Make the metrics of one process (or one test)."""
        made = cls(_Instruments())
        version = installed_version()
        made.watch(BUILD_INFO, lambda: ((1.0, {"version": version}),))
        return made

    @classmethod
    def disabled(cls) -> Self:
        """Make metrics that go nowhere."""
        return cls(None)

    def begin(self, totals: Iterable[Counter]) -> None:
        """Show counters without labels from the start: one that is absent until it counts hides
        its first increase.
        """
        for metric in totals:
            self.add(metric, 0)

    def add(self, metric: Counter, value: float = 1, /, **labels: str) -> None:
        """Raise a counter."""
        if self._instruments is not None:
            _check_labels(metric, labels)
            self._instruments.counters[metric.name].add(value, labels)

    def observe(self, metric: Histogram, value: float, /, **labels: str) -> None:
        """Put one value into a distribution."""
        if self._instruments is not None:
            _check_labels(metric, labels)
            self._instruments.histograms[metric.name].record(value, labels)

    def watch(self, metric: Gauge, read: Callable[[], float | Iterable[Reading]]) -> None:
        """Read a gauge by calling `read` at every scrape; it must be quick and thread-safe.

        `read` returns a number, or (number, labels) pairs for a gauge with labels. A later
        watcher replaces an earlier one.
        """
        if self._instruments is not None:
            self._instruments.watch(metric, read)

    def render(self) -> bytes:
        """Everything in Prometheus text form."""
        return b"" if self._instruments is None else self._instruments.render()

    def shutdown(self) -> None:
        """Let go of the reader."""
        if self._instruments is not None:
            self._instruments.provider.shutdown()


class _Instruments:
    """OpenTelemetry objects of one process, made once from the catalogue."""

    def __init__(self) -> None:
        # Imported here: a process that has metrics off does not pay for the SDK.
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from opentelemetry.sdk.metrics import Counter as SdkCounter
        from opentelemetry.sdk.metrics import Histogram as SdkHistogram
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource
        from prometheus_client import CollectorRegistry

        self.registry: CollectorRegistry = CollectorRegistry(auto_describe=False)
        reader = PrometheusMetricReader(
            disable_target_info=True,
            scope_info_enabled=False,
            registry=self.registry,
            cardinality_limits={SdkCounter: MAX_SERIES, SdkHistogram: MAX_SERIES},
        )
        self.provider: MeterProvider = MeterProvider(
            metric_readers=[reader], resource=Resource.create({}), shutdown_on_exit=False
        )
        self._meter: otel.Meter = self.provider.get_meter("isthmus")
        self._readers: dict[str, Callable[[], float | Iterable[Reading]]] = {}
        # The reader's hand-over queue takes one scrape at a time.
        self._render_lock = threading.Lock()
        self.counters: dict[str, otel.Counter] = {}
        self.histograms: dict[str, otel.Histogram] = {}
        for metric in all_metrics():
            self._create(metric)

    def _create(self, metric: Metric) -> None:
        # The unit is part of our names already; given to the reader it would be added again.
        if isinstance(metric, Counter):
            name = metric.name.removesuffix("_total")  # the text form adds it
            self.counters[metric.name] = self._meter.create_counter(
                name, description=metric.description
            )
        elif isinstance(metric, Histogram):
            self.histograms[metric.name] = self._meter.create_histogram(
                metric.name,
                description=metric.description,
                explicit_bucket_boundaries_advisory=metric.buckets,
            )

    def watch(self, metric: Gauge, read: Callable[[], float | Iterable[Reading]]) -> None:
        """Register the gauge on first use; swap its reader afterwards."""
        is_new = metric.name not in self._readers
        self._readers[metric.name] = read
        if is_new:
            self._meter.create_observable_gauge(
                metric.name, callbacks=[self._callback(metric)], description=metric.description
            )

    def _callback(
        self, metric: Gauge
    ) -> Callable[[otel.CallbackOptions], Iterable[otel.Observation]]:
        from opentelemetry.metrics import Observation

        def observe(_options: otel.CallbackOptions) -> Iterable[otel.Observation]:
            result = self._readers[metric.name]()
            readings = [(result, {})] if isinstance(result, (int, float)) else list(result)
            for value, labels in readings:
                _check_labels(metric, labels)
                yield Observation(value, dict(labels))

        return observe

    def render(self) -> bytes:
        """Collect and format."""
        from prometheus_client import generate_latest

        with self._render_lock:
            return generate_latest(self.registry)


def _check_labels(metric: Metric, labels: Mapping[str, str]) -> None:
    """A label the catalogue does not name is a fault of ours; found by any test that counts."""
    if len(labels) != len(metric.labels) or any(name not in labels for name in metric.labels):
        raise ValueError(f"{metric.name} has labels {metric.labels}, got {tuple(labels)}")
