"""A circuit breaker that judges the share of failures in a window. Pure: `now` is given."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from services.common.errors import ERROR_TABLE


class Outcome(Enum):
    """What a call says about the health of whom it was made to."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"  # says nothing: the client's fault, or a full queue


class BreakerState(Enum):
    """CLOSED lets calls pass, OPEN none, HALF_OPEN one at a time as a probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When to open, and for how long."""

    window_s: float = 10.0
    min_calls: int = 5  # a share of fewer calls means nothing
    failure_share: float = 0.5
    open_s: float = 2.0
    max_calls: int = 512  # remembered


class CircuitBreaker:
    """Opens when too large a share of the recent calls failed.

    A probe that never reports back does not block the breaker for ever: after `open_s` the
    next caller may probe.
    """

    def __init__(self, config: BreakerConfig | None = None) -> None:
        self._config = config or BreakerConfig()
        self._calls: deque[tuple[float, bool]] = deque()
        self._num_failures = 0  # among them
        self._state = BreakerState.CLOSED
        self._since = 0.0  # of OPEN, or of the probe in HALF_OPEN

    @property
    def state(self) -> BreakerState:
        """State as of the last call of a method."""
        return self._state

    def can_call(self, now: float) -> bool:
        """Say whether `acquire` would let a call pass; changes nothing."""
        return self._state is BreakerState.CLOSED or now >= self._since + self._config.open_s

    def acquire(self, now: float) -> bool:
        """Let a call pass or not; the call it lets pass while not closed is the probe."""
        if not self.can_call(now):
            return False
        if self._state is not BreakerState.CLOSED:
            self._state, self._since = BreakerState.HALF_OPEN, now
        return True

    def record(self, outcome: Outcome, now: float) -> None:
        """Learn how a call ended. NEUTRAL neither opens nor closes nor resets anything."""
        if outcome is Outcome.NEUTRAL:
            return
        failed = outcome is Outcome.FAILURE
        if self._state is BreakerState.HALF_OPEN:
            self._calls.clear()
            self._num_failures = 0
            self._state = BreakerState.OPEN if failed else BreakerState.CLOSED
            self._since = now
            return
        self._calls.append((now, failed))
        self._num_failures += failed
        self._forget(now)
        if self._state is BreakerState.CLOSED and self._is_bad():
            self._state, self._since = BreakerState.OPEN, now

    def _is_bad(self) -> bool:
        if len(self._calls) < self._config.min_calls:
            return False
        return self._num_failures / len(self._calls) >= self._config.failure_share

    def _forget(self, now: float) -> None:
        """Drop what is old or too much; counted while going, as this happens for every call."""
        calls, config = self._calls, self._config
        while len(calls) > config.max_calls or (calls and now - calls[0][0] > config.window_s):
            self._num_failures -= calls.popleft()[1]


# Answers that blame the sender or the moment, not the worker.
_NEUTRAL_CODES = frozenset(
    {"cancelled", "deadline_exceeded", "slow_reader", "draining", "stale_incarnation", "fenced"}
)


def outcome_of(code: str | None) -> Outcome:
    """Classify the end of a work item; None is success. 4xx and "queue full" are neutral."""
    if code is None:
        return Outcome.SUCCESS
    spec = ERROR_TABLE.get(code)
    if code in _NEUTRAL_CODES or (spec is not None and spec.http_status < 500):
        return Outcome.NEUTRAL
    return Outcome.FAILURE
