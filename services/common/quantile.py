"""Percentiles that were measured, not interpolated."""

from __future__ import annotations

import math
from collections.abc import Sequence


def nearest_rank(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all do not exceed.

    Args:
        values: in any order, at least one.
        share: 0 to 1.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
