"""Percentiles that were measured, not interpolated."""

from __future__ import annotations

import math
from collections.abc import Sequence

DIGITS = 9  # of products of shares and counts: 0.55 of 100 is 55, whatever floats say


def rank_of(count: int, share: float) -> int:
    """Return the rank, from 1, of a percentile among so many values."""
    return max(1, math.ceil(round(share * count, DIGITS)))


def nearest_rank(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all do not exceed.

    Args:
        values: in any order, at least one.
        share: 0 to 1.
    """
    ordered = sorted(values)
    return ordered[rank_of(len(ordered), share) - 1]
