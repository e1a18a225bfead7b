"""Metrics of the catalogue, read in Prometheus text form.

A token is counted more often than anything else happens in a router, so counting is a lookup and
an addition here, and everything that takes time is done when somebody asks.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Self, TypeVar

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
    from prometheus_client.core import Metric as Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_SERIES = 500  # label sets of one metric; more are folded into one overflow series
OVERFLOW = "overflow"  # value of every label of that series

Reading = tuple[float, Mapping[str, str]]
_Key = tuple[str, ...]  # label values in the catalogue's order
_V = TypeVar("_V")


class Metrics:
    """Counts and observes by catalogue entry; `Metrics.disabled()` does nothing, cheaply."""

    def __init__(self, store: _Store | None) -> None:
        self._store = store

    @classmethod
    def enabled(cls) -> Self:
        """Make the metrics of one process (or one test)."""
        made = cls(_Store())
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
        store = self._store
        if store is not None:
            with store.lock:
                store.totals[metric.name].at(labels).value += value

    def observe(self, metric: Histogram, value: float, /, **labels: str) -> None:
        """Put one value into a distribution."""
        store = self._store
        if store is not None:
            with store.lock:
                store.distributions[metric.name].at(labels).put((value,))

    def observe_all(self, metric: Histogram, values: Sequence[float], /, **labels: str) -> None:
        """Put several values into a distribution."""
        store = self._store
        if store is not None:
            with store.lock:
                store.distributions[metric.name].at(labels).put(values)

    def adder(self, metric: Counter, /, **labels: str) -> Callable[[float], None]:
        """Give a function that raises one counter, for use at every request."""
        store = self._store
        if store is None:
            return _ignore
        lock = store.lock
        with lock:
            total = store.totals[metric.name].at(labels)

        def add(value: float) -> None:
            with lock:
                total.value += value

        return add

    def parts_observer(
        self, metric: Histogram, label: str, parts: Sequence[str]
    ) -> Callable[[Iterable[float]], None]:
        """Give a function that takes a value of each part, for use at every request.

        Args:
            label: the metric's only one, whose values the parts are.
        """
        store = self._store
        if store is None:
            return _ignore
        lock, series = store.lock, store.distributions[metric.name]
        with lock:
            distributions = [series.at({label: part}) for part in parts]

        def observe(values: Iterable[float]) -> None:
            with lock:
                for distribution, value in zip(distributions, values, strict=True):
                    distribution.put((value,))

        return observe

    def watch(self, metric: Gauge, read: Callable[[], float | Iterable[Reading]]) -> None:
        """Read a gauge by calling `read` at every scrape; it must be quick and thread-safe.

        `read` returns a number, or (number, labels) pairs for a gauge with labels. A later
        watcher replaces an earlier one.
        """
        if self._store is not None:
            self._store.readers[metric.name] = read

    def render(self) -> bytes:
        """Everything in Prometheus text form."""
        if self._store is None:
            return b""
        from prometheus_client import generate_latest

        return generate_latest(self._store)

    def shutdown(self) -> None:
        """Let go of what gauges are read from."""
        if self._store is not None:
            self._store.readers.clear()


def _ignore(_values: float | Iterable[float]) -> None:
    pass


@dataclass(slots=True)
class _Total:
    value: float = 0.0


class _Distribution:
    """Numbers of values per bucket, the last one without an upper bound, and their sum."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def put(self, values: Sequence[float]) -> None:
        """Count values; one on a bound belongs below it."""
        for value in values:
            self.counts[bisect_left(self._bounds, value)] += 1
            self.total += value


class _Series(Generic[_V]):
    """One metric's values by label values; bounded."""

    def __init__(self, metric: Metric, make: Callable[[], _V]) -> None:
        self.by_key: dict[_Key, _V] = {}
        # As labels were given, which the catalogue need not be asked for again.
        self._as_given: dict[tuple[tuple[str, str], ...], _V] = {}
        self._metric = metric
        self._make = make

    def at(self, labels: Mapping[str, str]) -> _V:
        """Return the value of a label set, or the overflow's once there are too many."""
        found = self._as_given.get(tuple(labels.items()))
        return self._find(labels) if found is None else found

    def _find(self, labels: Mapping[str, str]) -> _V:
        key = _key(self._metric, labels)
        if key not in self.by_key and len(self.by_key) >= MAX_SERIES:
            return self.by_key.setdefault((OVERFLOW,) * len(key), self._make())
        value = self.by_key.setdefault(key, self._make())
        self._as_given[tuple(labels.items())] = value
        return value


class _Store:
    """All values of one process; counted from several threads, read by whoever scrapes.

    Whoever looks at totals or distributions holds the lock.
    """

    def __init__(self) -> None:
        self.readers: dict[str, Callable[[], float | Iterable[Reading]]] = {}
        self.lock = threading.Lock()
        self.totals: dict[str, _Series[_Total]] = {}
        self.distributions: dict[str, _Series[_Distribution]] = {}
        for metric in all_metrics():
            if isinstance(metric, Counter):
                self.totals[metric.name] = _Series(metric, _Total)
            elif isinstance(metric, Histogram):
                self.distributions[metric.name] = _Series(
                    metric, partial(_Distribution, metric.buckets)
                )

    # -- prometheus_client's Collector --------------------------------------------------------

    def collect(self) -> Iterator[Family]:
        """Give every metric that has a value."""
        for metric in all_metrics():
            if isinstance(metric, Counter):
                yield from self._counter(metric)
            elif isinstance(metric, Histogram):
                yield from self._histogram(metric)
            elif metric.name in self.readers:
                yield self._gauge(metric)

    def _counter(self, metric: Counter) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily

        with self.lock:
            values = [(k, v.value) for k, v in self.totals[metric.name].by_key.items()]
        if values:
            family = CounterMetricFamily(metric.name, metric.description, labels=metric.labels)
            for key, value in values:
                family.add_metric(key, value)
            yield family

    def _histogram(self, metric: Histogram) -> Iterator[Family]:
        from prometheus_client.core import HistogramMetricFamily

        with self.lock:
            values = [
                (k, list(v.counts), v.total)
                for k, v in self.distributions[metric.name].by_key.items()
            ]
        if values:
            family = HistogramMetricFamily(metric.name, metric.description, labels=metric.labels)
            bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
            for key, counts, total in values:
                below, buckets = 0, []
                for bound, count in zip(bounds, counts, strict=True):
                    below += count
                    buckets.append((bound, below))
                family.add_metric(key, buckets, total)
            yield family

    def _gauge(self, metric: Gauge) -> Family:
        from prometheus_client.core import GaugeMetricFamily

        result = self.readers[metric.name]()
        readings = [(result, {})] if isinstance(result, (int, float)) else result
        family = GaugeMetricFamily(metric.name, metric.description, labels=metric.labels)
        for value, labels in readings:
            family.add_metric(_key(metric, labels), value)
        return family


def _key(metric: Metric, labels: Mapping[str, str]) -> _Key:
    """A label the catalogue does not name is a fault of ours; found by any test that counts."""
    if not (labels or metric.labels):
        return ()
    try:
        key = tuple([labels[name] for name in metric.labels])
    except KeyError:
        key = ()
    if len(key) != len(metric.labels) or len(labels) != len(key):
        raise ValueError(f"{metric.name} has labels {metric.labels}, got {tuple(labels)}")
    return key
