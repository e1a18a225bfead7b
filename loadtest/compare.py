"""Is B better than A? Two runs of one load beside each other, metric by metric. Pure.

Requests come in clusters: a block of the interleaved run, or a slice of time. What one cluster
shares (a queue, a noisy minute) makes its requests alike, so clusters are what is resampled. A
difference counts when swapping the arms of clusters at random hardly ever makes one as large
(exact under equal arms, whatever the requests of a cluster share), corrected by Holm for the
number of metrics; its size is told by a bootstrap interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from loadtest.percentiles import is_too_few
from loadtest.records import RequestRecord, Status
from loadtest.result import CompareResult, MetricChange, RunResult
from loadtest.slo import Slo
from services.common.quantile import rank_of
from services.common.settings import Section, setting

Verdict = Literal["better", "worse", "inconclusive"]
EXIT_CODES: Mapping[Verdict, int] = {"better": 0, "worse": 1, "inconclusive": 2}

PAIRED = "ttft_paired_ms"  # the median of what a request waited longer in B
_RESAMPLES = 2_000
_SWAPS = 1 << 14
_SEED = 20_261  # of resampling: equal inputs give equal verdicts

Floats = npt.NDArray[np.float64]


class Threshold(Section):
    """A change that is smaller does not matter."""

    absolute: float = setting(0.0, "in the metric's own unit", ge=0)
    relative: float = setting(0.02, "part of A's value", ge=0)

    def of(self, value: float) -> float:
        """Return the larger of the two."""
        return max(self.absolute, self.relative * abs(value))


class CompareRules(Section):
    """When a difference counts."""

    confidence: float = setting(
        0.99, "of intervals, and of all verdicts of a comparison together", gt=0.5, lt=1
    )
    latency: Threshold = setting(Threshold(absolute=1.0), "of metrics in milliseconds")
    other: Threshold = setting(Threshold(), "of goodput and cost")
    metrics: dict[str, Threshold] = setting({}, "of single metrics, by name")
    usd_per_hour_a: float | None = setting(None, "price of A's machines", unit="USD/h", gt=0)
    usd_per_hour_b: float | None = setting(None, "price of B's machines", unit="USD/h", gt=0)

    def threshold(self, name: str, value: float) -> float:
        """Return what a change of this metric has to reach."""
        usual = self.latency if name.endswith("_ms") else self.other
        return self.metrics.get(name, usual).of(value)


@dataclass(frozen=True, slots=True)
class Arm:
    """One side: its result, its requests, and how they are clustered."""

    name: str
    result: RunResult
    records: Sequence[RequestRecord]  # measured ones
    cluster_of: Callable[[RequestRecord], int]  # 0 and up, the same in both arms
    length_s: float  # of what was measured
    ended_s: float
    usd_per_hour: float | None = None


def compare(
    a: Arm, b: Arm, slo: Slo, rules: CompareRules, *, is_paired: bool, warnings: Sequence[str] = ()
) -> CompareResult:
    """Judge every metric that both arms have.

    Args:
        is_paired: requests of equal number are equal in both arms.
    """
    num_clusters = 1 + max((arm.cluster_of(r) for arm in (a, b) for r in arm.records), default=0)
    measures = _measures(a, b, slo, num_clusters, is_paired=is_paired)
    tests = [_test(measure, num_clusters, rules) for measure in measures]
    corrected = holm([test.p_value for test in tests])
    metrics = tuple(
        _change(test, p_value, rules) for test, p_value in zip(tests, corrected, strict=True)
    )
    verdict, reason = _overall(metrics)
    return CompareResult(
        name_a=a.name,
        name_b=b.name,
        a=a.result,
        b=b.result,
        confidence=rules.confidence,
        metrics=metrics,
        verdict=verdict,
        verdict_reason=reason,
        warnings=tuple(warnings),
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct for asking several questions at once; None = not asked."""
    asked = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(asked):
        highest = max(highest, min(1.0, p * (len(asked) - rank)))
        corrected[index] = highest
    return corrected


def differences(a: RunResult, b: RunResult) -> Iterator[str]:
    """Say what differs between two runs beside what is compared, or makes one of them doubtful."""
    if a.scenario_digest != b.scenario_digest:
        yield "the scenarios differ: the arms did not get the same load"
    elif a.seed != b.seed:
        yield f"the seeds differ ({a.seed} and {b.seed}): the arms got other requests"
    for key in sorted({*a.machine, *b.machine} - {"commit"}):
        one, other = a.machine.get(key), b.machine.get(key)
        if one != other:
            yield f"the clients ran on other machines: {key} is {one} and {other}"
    for name, result in (("A", a), ("B", b)):
        if result.verdict != "OK":
            yield f"{name} is {result.verdict}: {result.verdict_reason}"


# -- what is measured ------------------------------------------------------------------------------


Statistic = Callable[[Floats], Floats]
"""From how often each cluster counts, [resamples, clusters], to one value a resample."""


@dataclass(frozen=True, slots=True)
class _Measure:
    """One metric: its value in mixtures of clusters, and what tells its arms apart."""

    name: str
    a: Statistic | None = None
    b: Statistic | None = None
    change: Statistic | None = None  # of pairs, where there is no value of an arm alone
    contrasts: Floats | None = None  # B - A by cluster; swapping the arms of one turns its sign
    reason: str = ""  # why there is nothing to judge

    def changes(self, weights: Floats) -> Floats:
        """Return B - A in mixtures."""
        if self.change is not None:
            return self.change(weights)
        assert self.a is not None
        assert self.b is not None
        return self.b(weights) - self.a(weights)


_LATENCIES: Mapping[str, Callable[[RequestRecord], float | None]] = {
    "ttft": lambda record: record.ttft_s,
    "tpot": lambda record: record.tpot_s,
    "e2e": lambda record: record.e2e_s,
}


def _measures(a: Arm, b: Arm, slo: Slo, num_clusters: int, *, is_paired: bool) -> list[_Measure]:
    arms = (a, b)
    measures = []
    for figure, read in _LATENCIES.items():
        placed = [_values(arm, read) for arm in arms]
        for share in (0.5, 0.99):
            name = f"{figure}_p{round(share * 100)}_ms"
            measures.append(_percentile(name, placed[0], placed[1], share, num_clusters))
    if is_paired:
        measures.append(_paired(_pairs(a, b), num_clusters))
    goods = [[r for r in arm.records if slo.judge(r, arm.ended_s)] for arm in arms]
    lengths = [np.full(num_clusters, arm.length_s / num_clusters) for arm in arms]
    if slo.has_limits:
        counts = [
            _sums(((arm.cluster_of(r), 1.0) for r in good), num_clusters)
            for arm, good in zip(arms, goods, strict=True)
        ]
        measures.append(_ratio("goodput_rps", counts, lengths))
    if a.usd_per_hour is not None and b.usd_per_hour is not None:
        million_tokens = [
            _sums(((arm.cluster_of(r), r.osl / 1e6) for r in good), num_clusters)
            for arm, good in zip(arms, goods, strict=True)
        ]
        usd = [lengths[0] * a.usd_per_hour / 3600, lengths[1] * b.usd_per_hour / 3600]
        measures.append(_ratio("usd_per_m_good", usd, million_tokens))
    return measures


_Placed = Sequence[tuple[int, float]]  # clusters and values


def _values(arm: Arm, read: Callable[[RequestRecord], float | None]) -> _Placed:
    return [
        (arm.cluster_of(record), value * 1000)
        for record in arm.records
        if record.status is Status.OK and (value := read(record)) is not None
    ]


def _pairs(a: Arm, b: Arm) -> _Placed:
    """Return how much longer each request waited for its first token in B."""
    other = {record.number: record for record in b.records if record.status is Status.OK}
    return [
        (a.cluster_of(record), (twin.ttft_s - record.ttft_s) * 1000)
        for record in a.records
        if record.status is Status.OK
        and record.ttft_s is not None
        and (twin := other.get(record.number)) is not None
        and twin.ttft_s is not None
    ]


def _percentile(name: str, a: _Placed, b: _Placed, share: float, num_clusters: int) -> _Measure:
    fewest = min(len(a), len(b))
    if is_too_few(fewest, share):
        return _Measure(name, reason=f"{fewest} values cannot bear this percentile")
    # How many of each cluster lie beyond the percentile of both arms together, less what was to be
    # expected: swapping arms leaves that percentile where it is.
    everything = sorted(value for _, value in (*a, *b))
    limit = everything[rank_of(len(everything), share) - 1]
    expected = sum(value > limit for value in everything) / len(everything)
    beyond = [
        _sums(((cluster, (value > limit) - expected) for cluster, value in arm), num_clusters)
        for arm in (a, b)
    ]
    return _Measure(
        name,
        _weighted_percentile(a, share, num_clusters),
        _weighted_percentile(b, share, num_clusters),
        contrasts=beyond[1] - beyond[0],
    )


def _paired(pairs: _Placed, num_clusters: int) -> _Measure:
    if is_too_few(len(pairs), 0.5):
        return _Measure(PAIRED, reason=f"{len(pairs)} pairs are too few")
    signs = _sums(((cluster, np.sign(change)) for cluster, change in pairs), num_clusters)
    median = _weighted_percentile(pairs, 0.5, num_clusters)
    return _Measure(PAIRED, change=median, contrasts=signs)


def _weighted_percentile(placed: _Placed, share: float, num_clusters: int) -> Statistic:
    ordered = sorted((value, cluster) for cluster, value in placed)
    values = np.array([value for value, _ in ordered])
    is_in = np.zeros((len(ordered), num_clusters))
    is_in[np.arange(len(ordered)), [cluster for _, cluster in ordered]] = 1.0
    up_to = np.cumsum(is_in, axis=0)  # [values, clusters]: of each cluster, so many are no larger

    def statistic(weights: Floats) -> Floats:
        # A hair less than the exact rank: shares times counts are not exact in floats.
        ranks = np.maximum(1, np.ceil(weights @ up_to[-1] * share - 1e-9))
        low = np.zeros(len(weights), dtype=np.int64)
        high = np.full(len(weights), len(values) - 1)
        while (low < high).any():
            middle = (low + high) // 2
            is_enough = (up_to[middle] * weights).sum(axis=1) >= ranks
            low, high = np.where(is_enough, low, middle + 1), np.where(is_enough, middle, high)
        found: Floats = values[low]
        return found

    return statistic


def _sums(placed: Iterable[tuple[int, float]], num_clusters: int) -> Floats:
    """Add up by cluster."""
    sums = np.zeros(num_clusters)
    for cluster, value in placed:
        sums[cluster] += value
    return sums


def _ratio(name: str, above: Sequence[Floats], below: Sequence[Floats]) -> _Measure:
    if any(part.sum() <= 0 for part in below):
        return _Measure(name, reason="one arm has no good request")

    def statistic(arm: int) -> Statistic:
        # A resample may hold nothing good: then the ratio is as bad as it gets.
        return lambda weights: weights @ above[arm] / np.maximum(weights @ below[arm], 1e-12)

    ratio = (above[0] + above[1]).sum() / (below[0] + below[1]).sum()  # of both arms together
    excess = [over - ratio * under for over, under in zip(above, below, strict=True)]
    return _Measure(name, statistic(0), statistic(1), contrasts=excess[1] - excess[0])


# -- whether it counts -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Test:
    measure: _Measure
    a: float | None = None
    b: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


def _test(measure: _Measure, num_clusters: int, rules: CompareRules) -> _Test:
    if measure.contrasts is None:
        return _Test(measure)
    rng = np.random.default_rng(_SEED)
    once = np.ones((1, num_clusters))
    drawn = rng.multinomial(num_clusters, [1 / num_clusters] * num_clusters, _RESAMPLES)
    resampled = np.sort(measure.changes(drawn.astype(np.float64)))
    tail = (1 - rules.confidence) / 2
    by_chance = np.abs(_signs(num_clusters, rng) @ measure.contrasts)
    return _Test(
        measure,
        a=None if measure.a is None else float(measure.a(once)[0]),
        b=None if measure.b is None else float(measure.b(once)[0]),
        change=float(measure.changes(once)[0]),
        low=float(resampled[rank_of(_RESAMPLES, tail) - 1]),
        high=float(resampled[rank_of(_RESAMPLES, 1 - tail) - 1]),
        p_value=float(np.mean(by_chance >= abs(measure.contrasts.sum()) - 1e-9)),
    )


def _signs(num_clusters: int, rng: np.random.Generator) -> Floats:
    """Return which clusters change sides: every way there is, or many at random and none."""
    if 2**num_clusters <= _SWAPS:
        swaps = (np.arange(2**num_clusters)[:, None] >> np.arange(num_clusters)) & 1
    else:
        swaps = rng.integers(0, 2, (_SWAPS, num_clusters))
        swaps[0] = 0  # what happened is one of the ways
    signs: Floats = 1.0 - 2.0 * swaps.astype(np.float64)
    return signs


def _change(test: _Test, p_value: float | None, rules: CompareRules) -> MetricChange:
    verdict, reason, threshold = _verdict(test, p_value, rules)
    return MetricChange(
        name=test.measure.name,
        a=test.a,
        b=test.b,
        change=test.change,
        low=test.low,
        high=test.high,
        threshold=threshold,
        p_value=p_value,
        is_paired=test.measure.change is not None,
        is_better_lower=test.measure.name != "goodput_rps",
        verdict=verdict,
        reason=reason,
    )


def _verdict(
    test: _Test, p_value: float | None, rules: CompareRules
) -> tuple[Verdict, str, float | None]:
    if p_value is None or test.change is None or test.low is None or test.high is None:
        return "inconclusive", test.measure.reason, None
    threshold = rules.threshold(test.measure.name, test.a or 0.0)
    if p_value > 1 - rules.confidence or test.low <= 0 <= test.high:
        return "inconclusive", "equal arms would differ as much", threshold
    if abs(test.change) < threshold:
        return "inconclusive", "the change is too small to matter", threshold
    is_lower = test.change < 0
    is_better = is_lower == (test.measure.name != "goodput_rps")
    direction = "lower" if is_lower else "higher"
    return ("better" if is_better else "worse"), f"B is {direction}", threshold


def _overall(metrics: Sequence[MetricChange]) -> tuple[Verdict, str]:
    """One metric that got worse makes it worse: whoever accepts the trade says so in the rules."""
    order: tuple[Verdict, ...] = ("worse", "better")
    for verdict in order:
        names = [metric.name for metric in metrics if metric.verdict == verdict]
        if names:
            return verdict, f"{verdict}: {', '.join(names)}"
    unknown = [metric for metric in metrics if metric.p_value is None]
    told = "no metric differs by more than chance and its threshold"
    if unknown:
        told += f"; not judged for want of requests: {', '.join(m.name for m in unknown)}"
    return "inconclusive", told
