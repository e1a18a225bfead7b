"""Counts of durations in buckets of equal ratio: small, and two of them can be added or parted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import log

from services.common.quantile import rank_of

_LEAST_S = 1e-4  # all below is one bucket
_RATIO = 1.05  # from one bucket to the next: a quantile is off by 2.5 % at most
_LOG_RATIO = log(_RATIO)
MAX_BUCKET = 360  # 4,000 s


def bucket_of(seconds: float) -> int:
    """Return the bucket of a duration."""
    if seconds <= _LEAST_S:
        return 0
    return min(MAX_BUCKET, 1 + int(log(seconds / _LEAST_S) / _LOG_RATIO))


def seconds_of(bucket: int) -> float:
    """Return the duration in the middle of a bucket."""
    return _LEAST_S * _RATIO ** (bucket - 0.5) if bucket else 0.0


class LogHistogram:
    """How often durations were seen. Sparse: what was never seen takes no room."""

    __slots__ = ("counts",)

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: Counter[int] = Counter(counts or {})

    def add(self, seconds: Iterable[float]) -> None:
        """Count some durations."""
        self.counts.update(map(bucket_of, seconds))

    def merge(self, other: LogHistogram) -> None:
        """Count what another one counted."""
        self.counts.update(other.counts)

    def since(self, older: LogHistogram) -> LogHistogram:
        """Return what was counted since an older state of the same counts."""
        return LogHistogram(self.counts - older.counts)

    @property
    def num(self) -> int:
        """Durations counted."""
        return self.counts.total()

    def quantile(self, share: float) -> float | None:
        """Return a percentile in seconds; None where nothing was counted."""
        left = rank_of(self.num, share)
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return seconds_of(bucket)
        return None
