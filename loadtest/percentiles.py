"""Exact percentiles, and how sure a sample makes one of them. Pure.

A percentile is a value that was measured (nearest rank). Its interval is made of order statistics:
the number of values below the true percentile is binomial whatever their distribution, so two
ranks bound it. Where fewer than ten values lie beyond it, it is not told at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loadtest.result import Distribution, Percentile
from services.common.quantile import DIGITS, rank_of

SHARES = (0.5, 0.9, 0.95, 0.99)
CURVE_STEPS = 200
_MIN_BEYOND = 10
_FAR_SDS = 12  # standard deviations from the mean; beyond them a binomial's mass is below 1e-30

Values = npt.NDArray[np.float64]


def distribution(
    values: Sequence[float] | Values,
    *,
    confidence: float,
    weights: Sequence[int] | None = None,
    curve_steps: int = 0,
) -> Distribution:
    """Describe a sample.

    With `weights` each value stands for so many things (the gap before a chunk for its tokens).
    Intervals and the refusal still count values: tokens that came together are one observation.
    """
    sample = _Sample.of(values, weights)
    if sample is None:
        percentiles = tuple(Percentile(share=s, value=None, too_few=True) for s in SHARES)
        return Distribution(count=0, mean=None, minimum=None, maximum=None, percentiles=percentiles)
    steps = range(curve_steps + 1) if curve_steps else ()
    return Distribution(
        count=sample.total,
        mean=sample.mean,
        minimum=sample.at_rank(1),
        maximum=sample.at_rank(sample.total),
        percentiles=tuple(sample.percentile(share, confidence) for share in SHARES),
        curve=tuple(sample.at_share(step / curve_steps) for step in steps),
    )


def share_of(figures: Distribution, share: float) -> float | None:
    """Return one percentile's value; None where the sample cannot bear it."""
    return next((p.value for p in figures.percentiles if p.share == share), None)


def is_too_few(count: int, share: float) -> bool:
    """Whether a sample of this size cannot bear this percentile."""
    return round(count * (1 - share), DIGITS) < _MIN_BEYOND


def rank_interval(count: int, share: float, confidence: float) -> tuple[int | None, int | None]:
    """Return two ranks, from 1, that hold a percentile between them with this confidence.

    None where no value of the sample bounds it on that side.
    """
    tail = (1 - confidence) / 2
    first, masses = _binomial(count, share)
    below = 0.0  # P(fewer than `rank` values below the percentile)
    low = high = None
    for k, mass in enumerate(masses, start=first):
        below += mass
        if below <= tail:
            low = k + 1
        if below >= 1 - tail:
            high = k + 1
            break
    if low is None and first > 0:
        low = first  # all of the mass left out below `first` is less than any tail
    return low, high if high is not None and high <= count else None


def _binomial(count: int, share: float) -> tuple[int, list[float]]:
    """Return the masses around the mean, and the number of the first."""
    reach = _FAR_SDS * math.sqrt(count * share * (1 - share)) + _FAR_SDS
    first = max(0, math.floor(count * share - reach))
    last = min(count, math.ceil(count * share + reach))
    log_mass = (
        math.lgamma(count + 1) - math.lgamma(first + 1) - math.lgamma(count - first + 1)
    ) + first * math.log(share) + (count - first) * math.log1p(-share)  # fmt: skip
    masses = [math.exp(log_mass)]
    odds = share / (1 - share)
    for k in range(first, last):
        masses.append(masses[-1] * odds * (count - k) / (k + 1))
    return first, masses


class _Sample:
    """Sorted values and how many things each and all before it stand for."""

    def __init__(self, ordered: Values, ends: npt.NDArray[np.int64], mean: float) -> None:
        self._ordered = ordered
        self._ends = ends
        self.mean = mean
        self.count = len(ordered)
        self.total = int(ends[-1])

    @classmethod
    def of(cls, values: Sequence[float] | Values, weights: Sequence[int] | None) -> _Sample | None:
        array = np.asarray(values, dtype=np.float64)
        if not len(array):
            return None
        if weights is None:
            ends = np.arange(1, len(array) + 1, dtype=np.int64)
            return cls(np.sort(array), ends, float(array.mean()))
        counts = np.asarray(weights, dtype=np.int64)
        order = np.argsort(array, kind="stable")
        mean = float(np.average(array, weights=counts))
        return cls(array[order], np.cumsum(counts[order]), mean)

    def at_rank(self, rank: int) -> float:
        return float(self._ordered[np.searchsorted(self._ends, rank)])

    def at_share(self, share: float) -> float:
        return self.at_rank(rank_of(self.total, share))

    def percentile(self, share: float, confidence: float) -> Percentile:
        if is_too_few(self.count, share):
            return Percentile(share=share, value=None, too_few=True)
        low, high = rank_interval(self.count, share, confidence)
        return Percentile(
            share=share,
            value=self.at_share(share),
            low=None if low is None else self.at_rank(self._spread(low)),
            high=None if high is None else self.at_rank(self._spread(high)),
        )

    def _spread(self, rank: int) -> int:
        """Turn a rank among values into one among the things they stand for."""
        return -(-rank * self.total // self.count)
