"""Means and sums of what happened lately: what is older weighs less. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf


@dataclass(slots=True)
class Ewma:
    """Mean in which a sample weighs `alpha` and all before it the rest; None before the first."""

    alpha: float
    value: float | None = None

    def add(self, sample: float) -> None:
        """Take one sample."""
        if self.value is None:
            self.value = sample
        else:
            self.value += self.alpha * (sample - self.value)


class DecayedSums:
    """Sums that are added to together, and fall by a factor of e in every `tau_s`."""

    def __init__(self, count: int, tau_s: float) -> None:
        self._tau_s = tau_s
        self._at = -inf
        self.values = [0.0] * count

    def add(self, now: float, *more: float) -> None:
        """Add to each sum."""
        faded = exp(-max(0.0, now - self._at) / self._tau_s)
        self._at = now
        self.values = [old * faded + new for old, new in zip(self.values, more, strict=True)]
