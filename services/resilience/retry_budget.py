"""A budget that keeps retries a small share of requests. Pure."""

from __future__ import annotations


class RetryBudget:
    """Every request earns `ratio` of a retry, up to `reserve`, which is there from the start.

    The reserve lets a quiet cluster retry; the ratio keeps an overloaded one from drowning in
    its own retries.
    """

    def __init__(self, ratio: float = 0.1, reserve: float = 10.0) -> None:
        if not 0 <= ratio <= 1 or reserve < 1:
            raise ValueError("ratio must be in [0, 1] and reserve at least 1")
        self._ratio = ratio
        self._reserve = reserve
        self._balance = reserve

    @property
    def balance(self) -> float:
        """Retries that may be made now."""
        return self._balance

    def note_request(self) -> None:
        """Earn for one first attempt."""
        self._balance = min(self._reserve, self._balance + self._ratio)

    def take(self) -> bool:
        """Spend one retry, or say that there is none."""
        if self._balance < 1:
            return False
        self._balance -= 1
        return True
