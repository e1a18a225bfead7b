"""Intervals of shares, and whether a series rises. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

from loadtest.result import Interval
from services.common.shares import wilson_bounds

_MAX_EXACT = 60  # points; beyond it the tail is below any level that is asked for


def wilson(successes: int, count: int, confidence: float) -> Interval:
    """Return a share with its Wilson score interval; with no trials nothing is known."""
    low, high = wilson_bounds(successes, count, confidence)
    share = successes / count if count else 0.0
    return Interval(value=share, low=low, high=high, count=count)


def rise_p_value(series: Sequence[float]) -> float:
    """Return how likely a series without trend would rise as clearly (Mann-Kendall, exact).

    The chance that as many pairs are in rising order when every order is equally likely; ties
    count as falling, so that a constant series never rises.
    """
    count = len(series)
    if not 2 <= count <= _MAX_EXACT:
        raise ValueError(f"{count} points; a trend is asked of 2 to {_MAX_EXACT}")
    rising = sum(b > a for a, b in combinations(series, 2))
    orders = _orders_by_rising_pairs(count)
    return sum(orders[rising:]) / math.factorial(count)


@lru_cache(maxsize=_MAX_EXACT)
def _orders_by_rising_pairs(count: int) -> tuple[int, ...]:
    """Return the number of orders of `count` values that have 0, 1, 2 ... rising pairs."""
    orders = [1]
    for size in range(2, count + 1):
        longer = [0] * (len(orders) + size - 1)
        for rising, number in enumerate(orders):
            for more in range(size):  # the newest value is above so many of those before it
                longer[rising + more] += number
        orders = longer
    return tuple(orders)


def settled_from(series: Sequence[float]) -> int:
    """Return how many points to leave out at the start, by MSER-5.

    The series is cut where the standard error of the mean of what remains is least, in batches of
    five. A result beyond half of the series says that it never settled.
    """
    # From the first value on, because squares of what all values share would drown differences.
    values = [value - series[0] for value in series]
    starts = range(0, len(values) - _BATCH + 1, _BATCH)
    batches = [sum(values[at : at + _BATCH]) / _BATCH for at in starts]
    best_at, best = 0, math.inf
    total = squares = 0.0
    for at in range(len(batches) - 1, -1, -1):
        total += batches[at]
        squares += batches[at] ** 2
        left = len(batches) - at
        if left < _MIN_LEFT:
            continue
        error = max(0.0, squares - total * total / left) / left**2
        if error <= best:
            best_at, best = at, error
    return best_at * _BATCH


_BATCH = 5
_MIN_LEFT = 5  # batches: the error of fewer is small by chance
