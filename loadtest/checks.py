"""Questions about a run itself: can its figures be trusted? Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Literal

from loadtest.intervals import rise_p_value, settled_from
from loadtest.records import RequestRecord, Sample, Status
from loadtest.result import Check, FaultOutcome
from services.common.quantile import rank_of
from services.common.wording import counted

Verdict = Literal["OK", "CLIENT_BOUND", "UNSTEADY", "SATURATED", "FAILED", "INTERRUPTED"]

_MAX_LITTLES_ERROR = 0.05
_MAX_RATE_ERROR = 0.01
_MIN_DELAY_LIMIT_S = 0.005
_DELAY_SHARE_OF_TTFT = 0.02
_SLICES = 12  # of a run, in which a trend is looked for
_MIN_IN_SLICE = 5
_TREND_LEVEL = 0.01
_TREND_FACTOR = 1.25  # least change between first and last quarter: a drift is no overload
_MIN_TO_SETTLE = 50
_START_FACTOR = 3.0
# What makes a run useless comes first; a client that is late makes everything after it doubtful.
_VERDICTS: tuple[tuple[str, Verdict], ...] = (
    ("tokens", "FAILED"),
    ("faults", "FAILED"),
    ("dispatch", "CLIENT_BOUND"),
    ("loop_lag", "CLIENT_BOUND"),
    ("rate", "CLIENT_BOUND"),
    ("saturation", "SATURATED"),
    ("steady", "UNSTEADY"),
    ("littles_law", "UNSTEADY"),
)


@dataclass(frozen=True, slots=True)
class Window:
    """What was measured, from one instant to another."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.end_s - self.start_s

    def slice_of(self, at_s: float, num_slices: int) -> int | None:
        """Return the number of the equal part an instant is in."""
        if not self.start_s <= at_s < self.end_s:
            return None
        return min(num_slices - 1, int((at_s - self.start_s) / self.length_s * num_slices))


@dataclass(frozen=True, slots=True)
class Evidence:
    """What checks look at."""

    window: Window
    ended_s: float
    measured: Sequence[RequestRecord]  # in the order they were due
    everything: Sequence[RequestRecord]  # with warm-up and cool-down
    samples: Sequence[Sample] = field(default=())
    is_open: bool = True  # requests are due whatever becomes of those before
    is_stationary: bool = True  # and at a rate that does not change
    has_instants: bool = True  # no request waits for room in the client


def check_run(evidence: Evidence) -> tuple[Check, ...]:
    """Ask every question that this run can answer; one that ended in its warm-up answers none."""
    if evidence.window.length_s <= 0:
        return ()
    checks = [_littles_law(evidence)]
    if evidence.has_instants:
        checks.append(_dispatch(evidence))
    if any(sample.loop_lag_s is not None for sample in evidence.samples):
        checks.append(_loop_lag(evidence))
    if evidence.is_open:
        checks.append(_rate(evidence))
    if evidence.is_stationary:
        checks += [_steady(evidence), _saturation(evidence)]
    return tuple(checks)


def check_answers(
    records: Iterable[RequestRecord], faults: Sequence[FaultOutcome]
) -> tuple[Check, ...]:
    """Ask whether answers were whole, and whether the faults the run was to bring were brought."""
    lost = repeated = 0
    for record in records:
        lost += record.num_lost
        repeated += record.num_repeated
    checks = []
    if faults or lost or repeated:
        told = f"{counted(lost, 'token')} lost and {repeated} repeated in whole answers"
        checks.append(_none_of("tokens", lost + repeated, told))
    if faults:
        failed = [fault for fault in faults if fault.failure]
        why = "".join(f"; {f.action} {f.process}: {f.failure}" for f in failed)
        told = f"{len(faults) - len(failed)} of {counted(len(faults), 'fault')} brought{why}"
        checks.append(_none_of("faults", len(failed), told))
    return tuple(checks)


def judge(checks: Iterable[Check], measured: Sequence[RequestRecord]) -> tuple[Verdict, str]:
    """Say what the run is worth, and why."""
    if not measured:
        return "FAILED", "no request was measured"
    if not any(record.status is Status.OK for record in measured):
        return "FAILED", f"none of {counted(len(measured), 'request')} succeeded"
    failed = {check.name: check.message for check in checks if not check.is_ok}
    for name, verdict in _VERDICTS:
        if name in failed:
            return verdict, failed[name]
    return "OK", "every check passed"


def open_time_s(record: RequestRecord, window: Window, ended_s: float) -> float:
    """Return how long a request was in flight within a window."""
    if record.sent_s is None:
        return 0.0
    until = ended_s if record.done_s is None else record.done_s
    return max(0.0, min(until, window.end_s) - max(record.sent_s, window.start_s))


def _littles_law(evidence: Evidence) -> Check:
    """Requests in flight are their rate times their time: else they came or went unseen."""
    window = evidence.window
    sent = [
        record
        for record in evidence.everything
        if record.sent_s is not None and window.start_s <= record.sent_s < window.end_s
    ]
    whole = Window(float("-inf"), float("inf"))
    expected = sum(open_time_s(r, whole, evidence.ended_s) for r in sent) / window.length_s
    if not expected:
        return _not_judged("littles_law", "nothing was in flight")
    seen = [s.in_flight for s in evidence.samples if window.start_s <= s.at_s < window.end_s]
    if seen:
        in_flight = fmean(seen)
    else:
        times = [open_time_s(r, window, evidence.ended_s) for r in evidence.everything]
        in_flight = sum(times) / window.length_s
    error = abs(in_flight / expected - 1)
    return Check(
        name="littles_law",
        is_ok=error <= _MAX_LITTLES_ERROR,
        value=error,
        limit=_MAX_LITTLES_ERROR,
        message=(
            f"{in_flight:.2f} requests were in flight; their rate times their time is "
            f"{expected:.2f}, {error:.1%} off. More than {_MAX_LITTLES_ERROR:.0%} says that the "
            "window is short beside the requests, or that load was not steady"
        ),
    )


def _delay_limit_s(evidence: Evidence) -> float:
    ttfts = sorted(r.ttft_s for r in evidence.measured if r.ttft_s is not None)
    median = ttfts[rank_of(len(ttfts), 0.5) - 1] if ttfts else 0.0
    return max(_MIN_DELAY_LIMIT_S, _DELAY_SHARE_OF_TTFT * median)


def _dispatch(evidence: Evidence) -> Check:
    delays = [r.dispatch_delay_s for r in evidence.measured if r.dispatch_delay_s is not None]
    return _lateness("dispatch", delays, _delay_limit_s(evidence), "requests were sent")


def _loop_lag(evidence: Evidence) -> Check:
    window = evidence.window
    lags = [
        sample.loop_lag_s
        for sample in evidence.samples
        if sample.loop_lag_s is not None and window.start_s <= sample.at_s < window.end_s
    ]
    what = "the client's event loop came"
    return _lateness("loop_lag", lags, _delay_limit_s(evidence), what)


def _lateness(name: str, delays: list[float], limit_s: float, what: str) -> Check:
    if not delays:
        return _not_judged(name, "nothing was sent")
    value = sorted(delays)[rank_of(len(delays), 0.99) - 1]
    when = "in time" if value <= limit_s else "late"
    return Check(
        name=name,
        is_ok=value <= limit_s,
        value=value,
        limit=limit_s,
        message=(
            f"{what} {when}: the 99th percentile of the delay is {value * 1000:.2f} ms, "
            f"{limit_s * 1000:.2f} ms are allowed"
        ),
    )


def _rate(evidence: Evidence) -> Check:
    """Compare the rate that was sent with the one that was planned, over the same requests."""
    planned = [record.scheduled_s for record in evidence.measured]
    sent = [record.sent_s for record in evidence.measured if record.sent_s is not None]
    missing = len(planned) - len(sent)  # for want of room in the client
    span_s, sent_span_s = (max(s) - min(s) if len(s) > 1 else 0.0 for s in (planned, sent))
    if not span_s:
        return _not_judged("rate", "all requests were due at once")
    # Both spans are between the first and the last: a delay that all have changes no rate.
    stretch = sent_span_s / span_s if len(sent) > 1 else 1.0
    error = abs(len(sent) / len(planned) / stretch - 1) if stretch else 1.0
    unsent = f"; {counted(missing, 'request')} never" if missing else ""
    return Check(
        name="rate",
        is_ok=error <= _MAX_RATE_ERROR,
        value=error,
        limit=_MAX_RATE_ERROR,
        message=(
            f"the rate that was sent is {error:.2%} off the planned one, "
            f"{_MAX_RATE_ERROR:.0%} is allowed{unsent}"
        ),
    )


def settling(answered: Sequence[RequestRecord]) -> int:
    """Return how many answers to leave out at the start, by MSER-5 where that is beyond doubt.

    Alone MSER-5 cuts every other run of a busy queue somewhere and keeps its calm part. A cut
    that takes away what is three times off the rest is made in 4 % of such runs.
    """
    ttfts = _ttfts_us(answered)
    cut = settled_from(ttfts) if len(ttfts) >= _MIN_TO_SETTLE else 0
    if not 0 < cut <= len(ttfts) // 2:
        return 0
    start, rest = fmean(ttfts[:cut]), fmean(ttfts[cut:])
    return cut if max(start, rest) >= _START_FACTOR * min(start, rest) else 0


def _ttfts_us(answered: Sequence[RequestRecord]) -> list[int]:
    # Whole numbers: equal times differ by less in floats, and their order would say something.
    return [round((record.ttft_s or 0.0) * 1e6) for record in answered]


def _steady(evidence: Evidence) -> Check:
    """Look for times to the first token that go on rising or falling through the run."""
    answered = [r for r in evidence.measured if r.ttft_s is not None and r.status is Status.OK]
    if len(answered) < _MIN_TO_SETTLE:
        return _not_judged("steady", f"{counted(len(answered), 'answer')} are too few to tell")
    ttfts = _ttfts_us(answered)
    bounds = [len(ttfts) * number // _SLICES for number in range(_SLICES + 1)]
    means = [fmean(ttfts[start:end]) for start, end in pairwise(bounds)]
    (p_up, growth), (p_down, shrinking) = _rise(means), _rise(means[::-1])
    p_value = min(1.0, 2 * min(p_up, p_down))
    factor = growth if p_up < p_down else shrinking
    is_moving = p_value < _TREND_LEVEL and factor >= _TREND_FACTOR
    claim = ("rise" if p_up < p_down else "fall") if is_moving else "have no trend"
    return Check(
        name="steady",
        is_ok=not is_moving,
        value=p_value,
        limit=_TREND_LEVEL,
        message=(
            f"times to the first token {claim} through the run (chance alone: p = {p_value:.2g})"
        ),
    )


def _saturation(evidence: Evidence) -> Check:
    """Look for a queue that grows: requests in flight and times to the first token both rise."""
    window = evidence.window
    ttfts: list[list[float]] = [[] for _ in range(_SLICES)]
    for record in evidence.measured:
        at = window.slice_of(record.scheduled_s, _SLICES)
        ttft_s = record.ttft_s
        if ttft_s is None and record.status in (Status.CENSORED, Status.TIMEOUT):
            until = evidence.ended_s if record.done_s is None else record.done_s
            ttft_s = until - record.scheduled_s  # at least; leaving it out would hide the queue
        if at is not None and ttft_s is not None:
            ttfts[at].append(ttft_s)
    if min(len(part) for part in ttfts) < _MIN_IN_SLICE:
        return _not_judged("saturation", "too few requests to see a trend")
    step_s = window.length_s / _SLICES
    in_flight = []
    for number in range(_SLICES):
        start_s = window.start_s + number * step_s
        part = Window(start_s, start_s + step_s)
        times = [open_time_s(r, part, evidence.ended_s) for r in evidence.everything]
        in_flight.append(sum(times) / step_s)
    rises = [_rise(in_flight), _rise([fmean(part) for part in ttfts])]
    p_value = max(p for p, _ in rises)
    is_rising = p_value < _TREND_LEVEL and min(factor for _, factor in rises) >= _TREND_FACTOR
    claim = "the server is behind and falls further" if is_rising else "no queue grows"
    return Check(
        name="saturation",
        is_ok=not is_rising,
        value=p_value,
        limit=_TREND_LEVEL,
        message=(
            f"{claim}: requests in flight grew {rises[0][1]:.2f} times and times to the first "
            f"token {rises[1][1]:.2f} times over the run (chance alone: p = {p_value:.2g})"
        ),
    )


def _rise(series: Sequence[float]) -> tuple[float, float]:
    """Return how likely chance alone rises so, and the growth from first to last quarter."""
    quarter = len(series) // 4
    first, last = fmean(series[:quarter]), fmean(series[-quarter:])
    return rise_p_value(series), last / first if first > 0 else float(last > 0) * _TREND_FACTOR


def _none_of(name: str, number: int, message: str) -> Check:
    return Check(name=name, is_ok=not number, value=float(number), limit=0.0, message=message)


def _not_judged(name: str, why: str) -> Check:
    return Check(name=name, is_ok=True, value=None, limit=None, message=why)
