"""From values to places on an axis, with ticks at round values. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_MAX_LOG_TICKS = 6
_LOG_FROM_RATIO = 20.0  # below it a linear axis shows as much and is easier to read


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis: values `low` to `high` on pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def at(self, value: float) -> float:
        """Where a value stands; one beyond the axis stands at its end."""
        value = min(max(value, self.low), self.high)
        share = (self._of(value) - self._of(self.low)) / (self._of(self.high) - self._of(self.low))
        return self.start + share * (self.end - self.start)

    def _of(self, value: float) -> float:
        return math.log10(value) if self.is_log else value


def linear_scale(
    low: float,
    high: float,
    start: float,
    end: float,
    *,
    steps: Sequence[float] = (),
    is_whole: bool = False,
) -> Scale:
    """Make an axis that begins and ends at ticks.

    Args:
        steps: distances of ticks to prefer where one is long enough, such as those of clocks.
        is_whole: ticks between whole numbers mean nothing.
    """
    size = max(abs(low), abs(high))
    if high - low <= _EQUAL * size:  # nothing but rounding between them, or nothing
        low, high = low - size / 2, high + size / 2
    if size < _NOTHING:
        low, high = 0.0, 1.0
    least = max((high - low) / _MAX_STEPS, 1.0 if is_whole else 0.0)
    while True:
        step = next((step for step in steps if step >= least), None) or _step(least)
        first, last = math.floor(low / step + _SLACK), math.ceil(high / step - _SLACK)
        if last - first <= _MAX_STEPS:
            break
        least = step * (1 + 2 * _SLACK)  # its ends lie beyond those of the values: the next one
    # A multiple of the step, not a sum of steps, which would gather rounding errors.
    ticks = tuple(number * step for number in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], start, end, ticks)


_SLACK = 1e-9
_EQUAL = 1e-6
_NOTHING = 1e-12  # smaller than anything that is measured, and what floats still divide
_MAX_STEPS = 5


def _step(least: float) -> float:
    size = 10.0 ** math.floor(math.log10(least))
    return next(step * size for step in _STEPS if step * size >= least * (1 - _SLACK))


def log_scale(low: float, high: float, start: float, end: float, gap: float = 0.0) -> Scale:
    """Make a logarithmic axis that ends at 1, 2 or 5 times a power of ten; values are positive.

    Args:
        gap: pixels between ticks, so that what stands there has room.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    round_values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    least = max(value for value in round_values if value <= low * (1 + _SLACK))
    most = min(value for value in round_values if value >= high * (1 - _SLACK) and value > least)
    pixels_a_power = abs(end - start) / math.log10(most / least)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        wanted = [factor * 10.0**power for power in powers for factor in factors]
        ticks = [value for value in wanted if least <= value <= most]
        closest = min((math.log10(b / a) for a, b in pairwise(ticks)), default=math.inf)
        if len(ticks) <= _MAX_LOG_TICKS and closest * pixels_a_power >= gap:
            break
    if len(ticks) == 1:
        ticks = [least, most]
    every = math.ceil(len(ticks) / _MAX_LOG_TICKS)
    return Scale(least, most, start, end, tuple(ticks[::every]), is_log=True)


def suits_log(values: Iterable[float]) -> bool:
    """Whether values are positive and spread so far that a linear axis would hide the small."""
    known = list(values)
    return bool(known) and min(known) > _NOTHING and max(known) / min(known) >= _LOG_FROM_RATIO
