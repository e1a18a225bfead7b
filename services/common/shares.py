"""What a share that was counted says about the one behind it."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson_bounds(successes: int, count: int, confidence: float) -> tuple[float, float]:
    """Return the Wilson score interval of a share; with no trials nothing is known."""
    if count == 0:
        return 0.0, 1.0
    share = successes / count
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    weight = z * z / count
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    # At the ends rounding must not push the bound past the share itself.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == count else min(1.0, centre + half)
    return low, high
