"""A planner for SLAs in the way of Dynamo's, by its published formulas. Pure.

Every interval the load of the next one is predicted and divided by what a profiled replica carries
within its SLA. Factors compare what is measured with what the profile says: a prefill pool that
answers earlier than profiled gets fewer replicas, a decode pool that is slower a tighter target.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.sim.autoscaling.profile import Profile
from services.sim.cluster import DECODE, PREFILL
from services.sim.controller import Observation, Orders


class Predictor(Protocol):
    """Says what comes after a row of values."""

    def add(self, value: float) -> None:
        """Take the next one."""
        ...

    def next(self) -> float:
        """Say the one after it."""
        ...


@dataclass(slots=True)
class Constant:
    """What is goes on."""

    value: float = 0.0

    def add(self, value: float) -> None:
        """Take the next one."""
        self.value = value

    def next(self) -> float:
        """Say the last one again."""
        return self.value


@dataclass(slots=True)
class Trend:
    """A level and a trend, smoothed (Holt)."""

    level_share: float = 0.8
    trend_share: float = 0.5
    _level: float | None = None
    _trend: float = 0.0

    def add(self, value: float) -> None:
        """Take the next one."""
        if self._level is None:
            self._level = value
            return
        before = self._level
        self._level = before + self._trend
        self._level += self.level_share * (value - self._level)
        self._trend += self.trend_share * (self._level - before - self._trend)

    def next(self) -> float:
        """Say the one after it; nothing is negative."""
        return max(0.0, (self._level or 0.0) + self._trend)


@dataclass(frozen=True, slots=True)
class Interval:
    """What was measured over one interval, means by request."""

    num_requests: float
    isl: float
    osl: float
    ttft_s: float
    itl_s: float
    request_s: float  # from arrival to the last token


def prefill_replicas(
    num_requests: float, isl: float, interval_s: float, *, tokens_s: float, correction: float
) -> int:
    """Return replicas for a load; above its profile's TTFT a pool is not given more for that."""
    return math.ceil(num_requests * isl / interval_s * min(1.0, correction) / tokens_s)


def decode_replicas(num_requests: float, osl: float, interval_s: float, *, tokens_s: float) -> int:
    """Return replicas for a load."""
    return math.ceil(num_requests * osl / interval_s / tokens_s)


def corrected_itl_s(itl_s: float, correction: float) -> float:
    """Return the target to look up in the profile; a factor that cannot be is left out."""
    return itl_s / correction if correction > 0 else itl_s


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """One planner."""

    ttft_s: float
    itl_s: float
    min_replicas: int = 1
    max_replicas: int = 100
    has_correction: bool = True


@dataclass(slots=True)
class Planner:
    """A controller: both pools by what is predicted."""

    config: PlannerConfig
    profile: Profile
    requests: Predictor
    isl: Predictor = field(default_factory=Constant)
    osl: Predictor = field(default_factory=Constant)
    pools: frozenset[str] = frozenset({PREFILL, DECODE})
    tick_s: float = 60.0

    def orders(self, seen: Observation) -> Orders:
        """Size both pools; without a request there is nothing to go by."""
        measured = _measured(seen)
        if measured is None:
            return Orders()
        sizes = self.plan(measured, max(1, seen.pools[DECODE].num_live))
        return Orders({pool: size for pool, size in sizes.items() if pool in self.pools})

    def plan(self, measured: Interval, num_decode: int) -> Mapping[str, int]:
        """Return what the next interval needs."""
        config, profile = self.config, self.profile
        self.requests.add(measured.num_requests)
        self.isl.add(measured.isl)
        self.osl.add(measured.osl)
        num_requests, isl, osl = self.requests.next(), self.isl.next(), self.osl.next()
        by_prefill = by_decode = 1.0
        if config.has_correction:
            by_prefill = measured.ttft_s / profile.ttft_s(measured.isl)
            at_once = measured.num_requests / num_decode * measured.request_s / self.tick_s
            context = measured.isl + measured.osl / 2
            by_decode = measured.itl_s / profile.itl_s(at_once, context)
        itl_s = corrected_itl_s(config.itl_s, by_decode)
        wanted = {
            PREFILL: prefill_replicas(
                num_requests, isl, self.tick_s,
                tokens_s=profile.prefill_tokens_s(isl), correction=by_prefill,
            ),
            DECODE: decode_replicas(
                num_requests, osl, self.tick_s,
                tokens_s=profile.decode_tokens_s(itl_s, isl + osl / 2),
            ),
        }  # fmt: skip
        least, most = config.min_replicas, config.max_replicas
        return {pool: min(max(size, least), most) for pool, size in wanted.items()}


def _measured(seen: Observation) -> Interval | None:
    ended = [r for r in seen.ended if r.ttft_s is not None and r.e2e_s is not None]
    if not ended or not seen.num_arrived:
        return None

    def mean(values: list[float]) -> float:
        return statistics.fmean(values) if values else 0.0

    return Interval(
        num_requests=seen.num_arrived,
        isl=seen.arrived_tokens / seen.num_arrived,
        osl=mean([r.output_tokens for r in ended]),
        ttft_s=mean([_known(r.ttft_s) for r in ended]),
        itl_s=mean([r.tpot_s for r in ended if r.tpot_s is not None]),
        request_s=mean([_known(r.e2e_s) for r in ended]),
    )


def _known(value: float | None) -> float:
    assert value is not None, "those without it were left out"
    return value
