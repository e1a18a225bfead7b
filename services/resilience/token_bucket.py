"""A bucket that fills at a steady rate. Pure: whoever calls gives the time."""

from __future__ import annotations


class TokenBucket:
    """Holds up to `burst`, gains `rate_per_s`, and may owe what it was charged and did not have.

    So a cost that is known only afterwards is charged all the same, and paid off before the next.
    """

    __slots__ = ("_at", "_level", "burst", "rate_per_s")

    def __init__(self, rate_per_s: float, burst: float, now: float) -> None:
        if rate_per_s <= 0 or burst <= 0:
            raise ValueError("rate and burst must be positive")
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._level = burst
        self._at = now

    def level(self, now: float) -> float:
        """What is in it; negative = owed."""
        if now > self._at:
            gained = (now - self._at) * self.rate_per_s
            self._level, self._at = min(self.burst, self._level + gained), now
        return self._level

    def charge(self, amount: float, now: float) -> None:
        """Take some out, whether it is there or not; less than nothing gives back."""
        self._level = min(self.burst, self.level(now) - amount)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until so much is in it; 0 = it is there now."""
        return max(0.0, min(amount, self.burst) - self.level(now)) / self.rate_per_s

    def reshape(self, rate_per_s: float, burst: float, now: float) -> None:
        """Go on with another rate and size."""
        level = self.level(now)
        self.rate_per_s, self.burst, self._level = rate_per_s, burst, min(level, burst)

    def refit(self, level: float, now: float) -> None:
        """Take over a level found elsewhere."""
        self._level, self._at = min(self.burst, level), now
