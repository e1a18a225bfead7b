"""`pools.csv`: what the autoscaler told of each pool, look by look, beside the load. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from loadtest.records import Sample

POOLS_FILE = "pools.csv"
_COLUMNS = (
    "at_s", "in_flight", "queued", "pool", "desired", "ready", "pending", "draining", "limited_by",
)  # fmt: skip


def pools_file(samples: Sequence[Sample]) -> bytes | None:
    """Write a line for each look and pool; None where no autoscaler was seen."""
    if not any(sample.pools for sample in samples):
        return None
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(_COLUMNS)
    last: object = None
    for sample in samples:
        if sample.pools is last:  # there are more samples than looks
            continue
        last = sample.pools
        lines.writerows(
            (
                round(sample.at_s, 3), sample.in_flight, sample.queued, size.pool, size.desired,
                size.ready, size.pending, size.draining, size.limited_by,
            )
            for size in sample.pools
        )  # fmt: skip
    return text.getvalue().encode()
