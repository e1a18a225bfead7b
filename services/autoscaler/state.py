"""What decide() remembers from tick to tick: frozen values that go through JSON and come back.

A controller that starts again goes on with its windows, rates and forecast where the one before it
stopped. Every tuple here is bounded by a window of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True)
class Ask:
    """A size that was asked for, and when."""

    at: float
    replicas: int


@dataclass(frozen=True, slots=True)
class Change:
    """By how much a size was changed, and when."""

    at: float
    delta: int


@dataclass(frozen=True, slots=True)
class StepLine:
    """Steps of decode by their number of answers: sums in which old ones count ever less."""

    weight: float = 0.0
    answers: float = 0.0
    answers2: float = 0.0
    seconds: float = 0.0
    answers_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a warm replica was seen to do: sums in which old work counts ever less."""

    tokens: float = 0.0
    busy_s: float = 0.0
    steps: StepLine = StepLine()
    full_tokens_s: float | None = None  # of decode, as full as its targets allow, by its steps


@dataclass(frozen=True, slots=True)
class Series:
    """A rate in tokens a second, one point an interval, and what is expected of it."""

    open_tokens: float = 0.0  # of the point that is not complete
    open_span_s: float = 0.0
    point_at: float | None = None  # of the last complete one
    num_points: int = 0
    level: float = 0.0
    trend: float = 0.0  # an interval
    covariance: tuple[float, float, float] = (0.0, 0.0, 0.0)  # level, level with trend, trend
    history: tuple[float, ...] = ()  # as many points as the predictor needs, newest last
    ahead: float | None = None  # the most expected until the look-ahead; None = not known yet


@dataclass(frozen=True, slots=True)
class PoolState:
    """One pool."""

    size: int | None = None  # decided last; None = nothing was, or it was not acted on
    changed_at: float | None = None
    highs: tuple[Ask, ...] = ()  # asks of the window for shrinking that no later one exceeds
    lows: tuple[Ask, ...] = ()  # asks of the window for growing that no later one undercuts
    recent: tuple[Ask, ...] = ()  # every ask of the panic window
    panicked_at: float | None = None  # when the last seconds last asked for a multiple
    changes: tuple[Change, ...] = ()  # that a rate policy still looks back on
    leaving: tuple[str, ...] = ()  # named to leave, in this order: named again until they do
    starting: tuple[str, ...] = ()  # seen at the tick before
    failures: int = 0  # of starts in a row that ended before they served
    retry_at: float | None = None  # no start before it
    busy: float | None = None  # replicas that worked, on average over the last tick that told
    capacity: Capacity = Capacity()
    series: Series = Series()


@dataclass(frozen=True, slots=True)
class Flipping:
    """A replica on its way from one pool to the other."""

    replica_id: str
    source: str
    target: str
    since: float


@dataclass(frozen=True, slots=True)
class State:
    """Everything."""

    format: Literal[1] = 1
    at: float | None = None  # of the tick before
    load_at: float | None = None  # of the last load that was counted
    pools: Mapping[str, PoolState] = field(default_factory=dict)
    flips: tuple[Flipping, ...] = ()

    def to_json(self) -> bytes:
        """Return what from_json reads."""
        return _STATE.dump_json(self)


_STATE = TypeAdapter(State)


def from_json(stored: bytes) -> State:
    """Return a stored state; ValueError if it is none, or one of another format."""
    return _STATE.validate_json(stored)
