"""The least cluster that is enough, where more workers of any pool never hurt. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Pair = tuple[int, int]


def least(is_enough: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least number from `low` that is enough; `high` is known to be."""
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return high


def least_pool(is_enough: Callable[[int], bool], guess: int, limit: int) -> int | None:
    """Return the least number of workers up to `limit` that is enough; None = there is none."""
    low, size = 1, min(max(1, guess), limit)
    while not is_enough(size):
        if size == limit:
            return None
        low, size = size + 1, min(limit, 2 * size)
    return least(is_enough, low, size)


@dataclass(frozen=True, slots=True)
class PairSearch:
    """Two pools to be sized together: which pairs are enough, and what one costs."""

    is_enough: Callable[[int, int], bool]
    cost: Callable[[int, int], float]
    limit: int  # workers of a pool

    def run(self, guess: Pair) -> Pair | None:
        """Return the cheapest pair that is enough; None = not even the largest is.

        Pairs that are enough lie above a falling line. Its two ends are found by bisection, then
        it is walked from the one with the fewest of the first pool, past what cannot be cheaper.
        """
        top = self._grown(guess)
        if top is None:
            return None
        # Beyond these sizes of either pool nothing is cheaper than what is enough already.
        most = self.cost(*top)
        wide = (
            self._last(lambda p: self.cost(p, 1) < most, top[0]),
            self._last(lambda d: self.cost(1, d) < most, top[1]),
        )
        first = least(lambda p: self.is_enough(p, wide[1]), 1, top[0])
        fewest = least(lambda d: self.is_enough(wide[0], d), 1, top[1])
        best = (first, least(lambda d: self.is_enough(first, d), fewest, wide[1]))
        for p in range(first + 1, wide[0] + 1):
            if self.cost(p, fewest) >= self.cost(*best):
                break
            best = self._cheaper(p, fewest, best) or best
        return best

    def _grown(self, guess: Pair) -> Pair | None:
        pair = (min(max(1, guess[0]), self.limit), min(max(1, guess[1]), self.limit))
        while not self.is_enough(*pair):
            if pair == (self.limit, self.limit):
                return None
            pair = (min(self.limit, 2 * pair[0]), min(self.limit, 2 * pair[1]))
        return pair

    def _last(self, holds: Callable[[int], bool], size: int) -> int:
        """Return the last size from `size` on, up to the limit, before one for which it fails."""
        while size < self.limit and holds(size + 1):
            size += 1
        return size

    def _cheaper(self, p: int, fewest: int, best: Pair) -> Pair | None:
        """Return a pair with `p` of the first pool that costs less than the best, if one does."""
        high = self._last(lambda d: self.cost(p, d) < self.cost(*best), fewest)
        if not self.is_enough(p, high):
            return None
        return p, least(lambda d: self.is_enough(p, d), fewest, high)


def pair_guess(prefill_s: float, decode_s: float, span_s: float) -> Pair:
    """Guess two pools from the work that arrives in a span: a pool is busy for most of its time."""
    return _workers(prefill_s, span_s), _workers(decode_s, span_s)


def _workers(work_s: float, span_s: float) -> int:
    return max(1, math.ceil(work_s / max(span_s, 1e-9) / 0.7))
