"""What the router learns of the ways between workers: their speed, and which are broken. Pure.

A link may be bad while both its ends are healthy, so pairs have breakers of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from statistics import median

from services.common.decayed import Ewma
from services.common.ids import WorkerId
from services.resilience.breaker import BreakerConfig, CircuitBreaker, Outcome
from services.router.policy import Links, Pair

MAX_PAIRS = 4096  # remembered; the one used longest ago goes first
_ALPHA = 0.2
_WARMUP = 2  # first handoffs of a pair open connections and map memory
_MIN_TOKENS = 64  # smaller handoffs measure the fixed cost
_UNLIKE = 1.5  # a pair this much faster or slower than the median one has a price of its own
# Two handoffs in a row that failed are enough: the way around costs little, a third failure a lot.
_BREAKER = BreakerConfig(window_s=60.0, min_calls=2, failure_share=0.75, open_s=10.0)


@dataclass(slots=True)
class _PairState:
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(_BREAKER))
    token_s: Ewma = field(default_factory=lambda: Ewma(_ALPHA))
    num_seen: int = 0


class PairBook:
    """Every pair that exchanged KV or tried to."""

    def __init__(self, max_pairs: int = MAX_PAIRS) -> None:
        self._pairs: OrderedDict[Pair, _PairState] = OrderedDict()
        self._max_pairs = max_pairs
        self._links: Links | None = None  # as told last; None once something has changed

    def __len__(self) -> int:
        """Return the number of pairs remembered."""
        return len(self._pairs)

    def sent(self, pair: Pair, now: float) -> None:
        """A ticket was passed on: with the breaker half open, it is the probe."""
        state = self._pairs.get(pair)
        if state is not None:
            state.breaker.acquire(now)
            self._links = None

    def exchanged(self, pair: Pair, num_tokens: int, handoff_s: float, now: float) -> None:
        """A handoff went well: so many tokens' KV, which kept the client waiting so long."""
        state = self._state(pair)
        state.breaker.record(Outcome.SUCCESS, now)
        if num_tokens < _MIN_TOKENS or handoff_s < 0:
            return
        state.num_seen += 1
        if state.num_seen > _WARMUP:
            state.token_s.add(handoff_s / num_tokens)

    def failed(self, pair: Pair, now: float) -> None:
        """The pair could not exchange KV."""
        self._state(pair).breaker.record(Outcome.FAILURE, now)

    def forget(self, worker_id: WorkerId) -> None:
        """Drop a worker that is gone, or has begun another life."""
        for pair in [p for p in self._pairs if worker_id in p]:
            del self._pairs[pair]
        self._links = None

    def links(self, now: float) -> Links:
        """Return what the policy needs: the usual link, and the pairs that are not usual."""
        if self._links is None or self._links.broken:  # which of them is so changes with time
            self._links = self._look(now)
        return self._links

    def _look(self, now: float) -> Links:
        means = {p: s.token_s.value for p, s in self._pairs.items()}
        known = {p: token_s for p, token_s in means.items() if token_s is not None}
        usual = median(known.values()) if known else 0.0
        unlike = {p: t for p, t in known.items() if not usual <= t * _UNLIKE <= usual * _UNLIKE**2}
        broken = frozenset(p for p, s in self._pairs.items() if not s.breaker.can_call(now))
        return Links(usual, unlike, broken)

    def _state(self, pair: Pair) -> _PairState:
        self._links = None
        state = self._pairs.pop(pair, None) or _PairState()
        self._pairs[pair] = state
        if len(self._pairs) > self._max_pairs:
            self._pairs.popitem(last=False)
        return state
