"""A token bucket. Pure: `now` is given and may stand still, but not run backwards."""

from __future__ import annotations


class TokenBucket:
    """Allows `rate` a second on average and `burst` at once."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        if rate <= 0 or burst <= 0:
            raise ValueError("rate and burst must be positive")
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = now

    def level(self, now: float) -> float:
        """Return what could be taken at once."""
        return min(self._burst, self._level + max(0.0, now - self._at) * self._rate)

    def take(self, amount: float, now: float) -> float:
        """Take `amount`; return 0.0, or the seconds to wait before it would succeed.

        An amount above the burst never succeeds: the wait is infinite.
        """
        if amount > self._burst:
            return float("inf")
        self._level = self.level(now)
        self._at = max(self._at, now)
        if self._level >= amount:
            self._level -= amount
            return 0.0
        return (amount - self._level) / self._rate
