"""When sessions begin: processes in open loop, and users who wait for answers. Pure."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, count
from typing import ClassVar, Literal, Self, TypeAlias

from pydantic import model_validator

from services.common.errors import ConfigError
from services.common.settings import Section, setting

_RATE_STEPS = 10_000  # of the mean of a rate over time


def _rate(description: str) -> float:
    """Declare a rate of sessions."""
    rate: float = setting(..., description, unit="sessions/s", gt=0, le=1e6, allow_inf_nan=False)
    return rate


class Open(Section):
    """Sessions begin whatever the server does."""

    has_end: ClassVar[bool] = False
    kind: str

    def instants(self, rng: random.Random) -> Iterator[float]:
        """Give the seconds at which sessions begin, from 0 on and without end."""
        raise NotImplementedError

    def mean_rps(self, until_s: float) -> float:
        """Return the mean rate from 0 to then."""
        raise NotImplementedError

    def scaled(self, factor: float) -> Self:
        """Return the same process with that many times the rate."""
        raise NotImplementedError

    def at_rate(self, rate_rps: float, until_s: float) -> Self:
        """Return the same process with another mean rate from 0 to then."""
        return self.scaled(rate_rps / self.mean_rps(until_s))


class _Steady(Open):
    rate_rps: float = _rate("mean rate")

    def mean_rps(self, until_s: float) -> float:
        return self.rate_rps

    def scaled(self, factor: float) -> Self:
        return self.model_copy(update={"rate_rps": self.rate_rps * factor})


class Constant(_Steady):
    """Equal gaps."""

    kind: Literal["constant"] = "constant"

    def instants(self, rng: random.Random) -> Iterator[float]:
        """Give multiples of the gap."""
        return (n / self.rate_rps for n in count())


class Poisson(_Steady):
    """Independent sessions: gaps are exponential."""

    kind: Literal["poisson"] = "poisson"

    def instants(self, rng: random.Random) -> Iterator[float]:
        """Add up exponential gaps."""
        return accumulate(rng.expovariate(self.rate_rps) for _ in count())


class Gamma(_Steady):
    """Gaps of a gamma distribution: `cv2` 1 is Poisson, above it sessions come in clumps."""

    kind: Literal["gamma"] = "gamma"
    cv2: float = setting(..., "squared coefficient of variation of the gaps", gt=0, le=1_000)

    def instants(self, rng: random.Random) -> Iterator[float]:
        """Add up gamma gaps."""
        shape, scale = 1 / self.cv2, self.cv2 / self.rate_rps
        return accumulate(rng.gammavariate(shape, scale) for _ in count())


class _Varying(Open):
    """A Poisson process whose rate changes with time."""

    def rate_at(self, at_s: float) -> float:
        """Return the rate at an instant."""
        raise NotImplementedError

    @property
    def highest_rps(self) -> float:
        """Return a bound of the rate."""
        raise NotImplementedError

    def instants(self, rng: random.Random) -> Iterator[float]:
        """Draw at the highest rate and keep each instant with the share it has there."""
        highest = self.highest_rps
        for at in accumulate(rng.expovariate(highest) for _ in count()):
            if rng.random() * highest < self.rate_at(at):
                yield at

    def mean_rps(self, until_s: float) -> float:
        step = until_s / _RATE_STEPS
        return sum(self.rate_at((n + 0.5) * step) for n in range(_RATE_STEPS)) / _RATE_STEPS


class Burst(_Varying):
    """A base rate, and again and again a higher one: first `off_s`, then `on_s`."""

    kind: Literal["burst"] = "burst"
    base_rps: float = _rate("rate between bursts")
    peak_rps: float = _rate("rate in a burst")
    on_s: float = setting(..., "length of a burst", unit="s", gt=0)
    off_s: float = setting(..., "time before and between bursts", unit="s", gt=0)

    def rate_at(self, at_s: float) -> float:
        """Return one of the two rates."""
        return self.base_rps if at_s % (self.off_s + self.on_s) < self.off_s else self.peak_rps

    @property
    def highest_rps(self) -> float:
        """Return the greater of the two."""
        return max(self.base_rps, self.peak_rps)

    def scaled(self, factor: float) -> Self:
        """Scale both rates."""
        changes = {"base_rps": self.base_rps * factor, "peak_rps": self.peak_rps * factor}
        return self.model_copy(update=changes)


class Ramp(_Varying):
    """A rate that grows or falls evenly, and then stays."""

    kind: Literal["ramp"] = "ramp"
    from_rps: float = _rate("rate at the start")
    to_rps: float = _rate("rate at the end and from then on")
    over_s: float = setting(..., "length of the ramp", unit="s", gt=0)

    def rate_at(self, at_s: float) -> float:
        """Return the rate on the line."""
        share = min(at_s / self.over_s, 1.0)
        return self.from_rps + (self.to_rps - self.from_rps) * share

    @property
    def highest_rps(self) -> float:
        """Return the greater end."""
        return max(self.from_rps, self.to_rps)

    def scaled(self, factor: float) -> Self:
        """Scale both ends."""
        changes = {"from_rps": self.from_rps * factor, "to_rps": self.to_rps * factor}
        return self.model_copy(update=changes)


class Step(Section):
    """One rate for some time."""

    rate_rps: float = _rate("rate")
    for_s: float = setting(..., "how long; the last step stays", unit="s", gt=0)


class Steps(_Varying):
    """Rates one after another."""

    kind: Literal["steps"] = "steps"
    steps: tuple[Step, ...] = setting(..., "the rates", min_length=1)

    def rate_at(self, at_s: float) -> float:
        """Return the rate of the step an instant is in."""
        ends = list(accumulate(step.for_s for step in self.steps))
        return self.steps[min(bisect_right(ends, at_s), len(ends) - 1)].rate_rps

    @property
    def highest_rps(self) -> float:
        """Return the highest step."""
        return max(step.rate_rps for step in self.steps)

    def scaled(self, factor: float) -> Self:
        """Scale every step."""
        steps = tuple(Step(rate_rps=s.rate_rps * factor, for_s=s.for_s) for s in self.steps)
        return self.model_copy(update={"steps": steps})


class Diurnal(_Varying):
    """A day in short: a rate that swings around its mean, and begins at its lowest."""

    kind: Literal["diurnal"] = "diurnal"
    mean_rate_rps: float = _rate("mean rate over a period")
    swing: float = setting(0.5, "part of the mean it goes up and down by", ge=0, le=1)
    period_s: float = setting(86_400.0, "length of a day", unit="s", gt=0)

    def rate_at(self, at_s: float) -> float:
        """Return the rate on the wave."""
        return self.mean_rate_rps * (1 - self.swing * math.cos(math.tau * at_s / self.period_s))

    @property
    def highest_rps(self) -> float:
        """Return the top of the wave."""
        return self.mean_rate_rps * (1 + self.swing)

    def scaled(self, factor: float) -> Self:
        """Scale the wave."""
        return self.model_copy(update={"mean_rate_rps": self.mean_rate_rps * factor})


class Unpaced(Section):
    """Arrivals that are no rate of their own."""

    kind: str

    def at_rate(self, rate_rps: float, until_s: float) -> Self:
        """Refuse."""
        raise ConfigError(f"arrivals of kind {self.kind} have no rate that could be changed")


class Trace(Unpaced):
    """Instants of a recorded trace; a workload that is the same trace keeps row beside row."""

    has_end: ClassVar[bool] = True
    kind: Literal["trace"] = "trace"
    file: str = setting(
        "", "a trace, beside the scenario; empty = the workload's own rows", public=True
    )
    speedup: float = setting(1.0, "so many times as fast", gt=0, le=1e6)
    from_s: float = setting(0.0, "what of the recorded time is used", unit="s", ge=0)
    to_s: float | None = setting(None, "its end; absent = the trace's", unit="s", gt=0)

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if self.to_s is not None and self.to_s <= self.from_s:
            raise ValueError("to_s must be greater than from_s")
        return self


class Offline(Unpaced):
    """Everything is there at the start."""

    has_end: ClassVar[bool] = True
    kind: Literal["offline"] = "offline"
    sessions: int = setting(..., "how many", unit="sessions", gt=0, le=1_000_000)


class Concurrency(Unpaced):
    """A closed loop: so many sessions are always under way, whatever that makes of the rate."""

    has_end: ClassVar[bool] = False
    kind: Literal["concurrency"] = "concurrency"
    sessions: int = setting(..., "sessions at once", unit="sessions", gt=0, le=65_536)


class Users(Unpaced):
    """A closed loop: people who begin a session, read, think, and begin the next."""

    has_end: ClassVar[bool] = False
    kind: Literal["users"] = "users"
    users: int = setting(..., "people", unit="users", gt=0, le=65_536)
    think_s: float = setting(..., "mean time between sessions, exponential", unit="s", gt=0)


OpenArrivals: TypeAlias = Constant | Poisson | Gamma | Burst | Ramp | Steps | Diurnal
Arrivals: TypeAlias = OpenArrivals | Trace | Offline | Concurrency | Users
