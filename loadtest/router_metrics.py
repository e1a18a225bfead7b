"""What a router's metrics tell of the cluster behind it. Pure: a page goes in, a look comes out."""

from __future__ import annotations

import re
from collections import Counter

from loadtest.target import ClusterLook
from services.telemetry import catalog

_LIVE = "live"
_SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? (\d{1,9})(?:\.0+)?$", re.MULTILINE)  # whole numbers
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def look_at(page: str) -> ClusterLook | None:
    """Read workers and queue from a page in Prometheus' text form; None where it tells neither."""
    replicas: Counter[str] = Counter()
    queued: int | None = None
    for name, labels, value in _SERIES.findall(page):
        if name == catalog.QUEUED.name:
            queued = int(value)
        elif name == catalog.WORKERS.name:
            told = dict(_LABEL.findall(labels))
            if told.get("state") == _LIVE:
                replicas[told.get("role", "")] += int(value)
    if not replicas and queued is None:
        return None
    return ClusterLook(dict(replicas), queued or 0)
