"""Figures from a Prometheus server, by instant queries: by name, and latencies if asked."""

from __future__ import annotations

import asyncio
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from services.autoscaler.observation import Reading
from services.autoscaler.policy import MetricType, PolicySpec
from services.autoscaler.policy_file import load_policy
from services.common.errors import ConfigError
from services.telemetry import catalog
from services.telemetry.logs import get_logger

log = get_logger(__name__)

QUERY_TIMEOUT_S = 3.0
_MAX_ANSWER_BYTES = 1 << 20
_WINDOW = "1m"  # at least four scrapes at the usual 15 s


def queries_of(spec: PolicySpec) -> dict[str, str]:
    """Return the query of each metric that is not read from routers and workers, by name."""
    queries = {}
    for pool in spec.pools:
        for metric in pool.metrics:
            if metric.type is MetricType.EXTERNAL and metric.external is not None:
                name = metric.external.metric.name
                queries[name] = f"sum({name})"
    if spec.metrics.source == "Prometheus":
        for kind, slo, histogram in (
            (MetricType.TTFT, spec.slo.ttft, catalog.TTFT),
            (MetricType.ITL, spec.slo.itl, catalog.ITL),
        ):
            share = 0.95 if slo is None else int(slo.percentile[1:]) / 100
            rate = f"sum by (le) (rate({histogram.name}_bucket[{_WINDOW}]))"
            queries[kind.value] = f"histogram_quantile({share:g}, {rate})"
    return queries


class PrometheusReader:
    """Implements External. Belongs to the event loop; each query runs in a thread, with an end."""

    def __init__(
        self, url: str, queries: Mapping[str, str], timeout_s: float = QUERY_TIMEOUT_S
    ) -> None:
        self._url = url.rstrip("/") + "/api/v1/query?"
        self._queries = dict(queries)
        self._timeout_s = timeout_s
        self._failed: frozenset[str] = frozenset()  # told of already

    async def read(self, now: float) -> Mapping[str, Reading]:
        """Ask for all figures at once; those that cannot be had are left out."""
        names = list(self._queries)
        answers = await asyncio.gather(*(self._answer(name, now) for name in names))
        readings = {
            name: answer
            for name, answer in zip(names, answers, strict=True)
            if isinstance(answer, Reading)
        }
        failed = frozenset(names) - readings.keys()
        if failed - self._failed:
            why = next(answer for answer in answers if isinstance(answer, str))
            log.warning("autoscaler.metrics_missing", names=",".join(sorted(failed)), reason=why)
        self._failed = failed
        return readings

    async def _answer(self, name: str, now: float) -> Reading | str:
        try:
            # The timeout of a socket is one of each read.
            async with asyncio.timeout(2 * self._timeout_s):
                return await asyncio.to_thread(self._ask, name, now)
        except TimeoutError:
            return f"no answer within {2 * self._timeout_s:g} s"

    def _ask(self, name: str, now: float) -> Reading | str:
        """Return a figure, or why there is none."""
        query = urllib.parse.urlencode({"query": self._queries[name]})
        try:
            with urllib.request.urlopen(self._url + query, timeout=self._timeout_s) as answer:
                return _parse(answer.read(_MAX_ANSWER_BYTES), now)
        except urllib.error.HTTPError as error:
            error.close()
            return f"the server answered {error.code}"
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"[:200]


def _parse(body: bytes, now: float) -> Reading | str:
    """Read the one sample of an instant query."""
    try:
        result = json.loads(body)["data"]["result"]
        if len(result) != 1:
            return f"{len(result)} samples instead of one"
        at, value = float(result[0]["value"][0]), float(result[0]["value"][1])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return "the answer is of an unknown form"
    if not math.isfinite(value):
        return "the sample is no number"
    return Reading(value, min(at, now))


def prometheus_reader(url: str | None, policy: Path) -> PrometheusReader | None:
    """Make the reader of a policy's figures, if it needs any; raises ConfigError."""
    queries = queries_of(load_policy(policy).spec)
    if not queries:
        return None
    if url is None:
        names = ", ".join(sorted(queries))
        raise ConfigError(
            f"the policy asks for figures of a Prometheus server ({names}): --prometheus"
        )
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--prometheus: {url!r} is no http:// or https:// address")
    return PrometheusReader(url, queries)
