"""The highest rate that keeps an SLO: which rate to try next, and when to believe. Pure.

Rates grow or shrink by a factor until one is met and the next is missed, then the bracket is
halved. The rate that is left runs again; all these runs together have to be clearly good enough,
or a lower rate is tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loadtest.intervals import wilson
from loadtest.result import Interval, Probe

State = Literal["met", "missed", "unresolved"]
Verdict = Literal["FOUND", "UNRESOLVED", "NONE"]

_MAX_ROUNDS = 4  # of re-runs, each at a lower rate
_MIN_LOOK = 50  # requests
_LOOK_GROWTH = 1.5
# Looking again and again finds an extreme sooner or later: each look asks for more than the end.
_LOOK_CONFIDENCE = 0.995
_MIN_KNEE = 0.05  # distance from the straight line, in parts of the whole curve


@dataclass(frozen=True, slots=True)
class SearchOrder:
    """What is searched, and how finely."""

    target_share: float  # of requests that must be good
    start_rps: float
    min_rps: float
    max_rps: float
    precision: float = 0.05  # relative width of the last bracket
    growth: float = 2.0
    num_verify: int = 3
    confidence: float = 0.95
    max_probes: int = 40

    def __post_init__(self) -> None:
        if not 0 < self.min_rps <= self.start_rps <= self.max_rps:
            raise ValueError("rates must be 0 < min <= start <= max")
        if not 0 < self.target_share < 1:
            raise ValueError("the target share must be between 0 and 1")
        if self.precision <= 0 or self.growth <= 1 or self.num_verify < 1:
            raise ValueError("precision > 0, growth > 1 and at least one re-run are needed")


class RateSearch:
    """Asks for one probe after another until there is a verdict."""

    def __init__(self, order: SearchOrder) -> None:
        self._order = order
        self._low: float | None = None  # the highest rate that was met
        self._high: float | None = None  # the lowest that was missed
        self._candidate: float | None = None  # runs again
        self._round = 0
        self.num_reruns = 0  # of any rate, with the one that comes
        self.probes: list[Probe] = []
        self.verified: list[Probe] = []
        self.verdict: Verdict | None = None
        self.reason = ""

    def next_rate(self) -> float | None:
        """Return the rate to try; None = there is a verdict."""
        if self.verdict is None and len(self.probes) >= self._order.max_probes:
            self.give_up(f"{self._order.max_probes} probes were not enough")
        if self.verdict is not None:
            return None
        if self._candidate is None:
            self._candidate = self._settled()
        if self._candidate is not None:
            self.num_reruns += 1
            return self._candidate
        return self._between() if self.verdict is None else None

    def take(self, probe: Probe) -> None:
        """Note what the rate asked for last gave."""
        assert self.verdict is None
        self.probes.append(probe)
        if self._candidate is not None:
            self.verified.append(probe)
            if len(self.verified) == self._order.num_verify:
                self._judge(self._candidate)
            return
        # An unresolved probe moves the bracket by its value; what is found is run again anyway.
        is_met = probe.state == "met" or (
            probe.state == "unresolved" and probe.attainment.value >= self._order.target_share
        )
        if is_met:
            self._low = probe.offered_rps
        else:
            self._high = probe.offered_rps

    def give_up(self, reason: str) -> None:
        """End without a rate that is sure: time is up, or the client is at its end."""
        self.verdict, self.reason = "UNRESOLVED", reason

    @property
    def best_rps(self) -> float | None:
        """The answer; without a verdict of FOUND the best guess there is."""
        if self.verdict == "NONE":
            return None
        return self._candidate if self._candidate is not None else self._low

    def _settled(self) -> float | None:
        """Return the rate to run again once the bracket is narrow or at its limit."""
        order, low, high = self._order, self._low, self._high
        if low is not None and low >= order.max_rps:
            return low
        if high is not None and high <= order.min_rps:
            self.verdict = "NONE"
            self.reason = f"{high:g} requests/s, the lowest rate that may be tried, misses the SLO"
            return None
        if low is not None and high is not None and high / low <= 1 + order.precision:
            return low
        return None

    def _between(self) -> float:
        order, low, high = self._order, self._low, self._high
        if low is None and high is None:
            return order.start_rps
        if high is None:
            return min(order.max_rps, (low or 0.0) * order.growth)
        if low is None:
            return max(order.min_rps, high / order.growth)
        return math.sqrt(low * high)

    def _judge(self, rate_rps: float) -> None:
        together = pooled([p.attainment for p in self.verified], self._order.confidence)
        share = f"{together.value:.4f} [{together.low:.4f}, {together.high:.4f}]"
        # A queue that grows misses whatever became of those who came first.
        num_missed = sum(probe.state == "missed" for probe in self.verified)
        is_met = state_of(together, self._order.target_share) == "met"
        if is_met and 2 * num_missed < len(self.verified):
            self.verdict = "FOUND"
            self.reason = f"{len(self.verified)} runs at {rate_rps:.4g} requests/s: {share} good"
            if rate_rps >= self._order.max_rps:
                self.reason += "; it is the highest rate that may be tried"
            return
        self._round += 1
        lower = rate_rps / (1 + self._order.precision)
        if self._round == _MAX_ROUNDS or lower < self._order.min_rps:
            self.give_up(f"runs at {rate_rps:.4g} requests/s are not clearly good enough: {share}")
            return
        self._candidate = lower
        self.verified.clear()


def state_of(attainment: Interval, target_share: float) -> State:
    """Say on which side of the target a share is with all of its interval."""
    if attainment.low >= target_share:
        return "met"
    return "missed" if attainment.high < target_share else "unresolved"


def pooled(shares: Sequence[Interval], confidence: float) -> Interval:
    """Return the share of all runs together."""
    good = sum(round(share.value * share.count) for share in shares)
    return wilson(good, sum(share.count for share in shares), confidence)


class EarlyEnd:
    """Whether a probe that still runs has said enough.

    A queue takes time to build, so a rate that is met has to be so for half of its time.
    """

    def __init__(self, target_share: float, measure_s: float) -> None:
        self._target_share = target_share
        self._measure_s = measure_s
        self._next_look = _MIN_LOOK

    def look(self, verdicts: Sequence[bool | None], elapsed_s: float) -> State | None:
        """Judge what was measured so far, in the order it was due; None = go on.

        Only what came before the first open request counts: quick answers end first, and with
        them alone every rate would look good.
        """
        judged: list[bool] = []
        for verdict in verdicts:
            if verdict is None:
                break
            judged.append(verdict)
        if len(judged) < self._next_look:
            return None
        self._next_look = math.ceil(len(judged) * _LOOK_GROWTH)
        state = state_of(wilson(sum(judged), len(judged), _LOOK_CONFIDENCE), self._target_share)
        if state == "missed" or (state == "met" and elapsed_s >= self._measure_s / 2):
            return state
        return None


def knee_rps(probes: Sequence[Probe]) -> float | None:
    """Return the rate from which on goodput grows slower than load.

    The point farthest above the straight line from the first to the last point of the curve.
    """
    goodput: dict[float, list[float]] = {}
    for probe in probes:
        goodput.setdefault(probe.offered_rps, []).append(probe.goodput_rps[1])
    curve = [(rate, sum(found) / len(found)) for rate, found in sorted(goodput.items())]
    if len(curve) < 3:
        return None
    (x0, y0), (x1, y1) = curve[0], curve[-1]
    height = max(y for _, y in curve) - min(y for _, y in curve)
    if height <= 0:
        return None
    above = [((y - y0 - (y1 - y0) * (x - x0) / (x1 - x0)) / height, x) for x, y in curve[1:-1]]
    distance, rate = max(above)
    return rate if distance >= _MIN_KNEE else None
