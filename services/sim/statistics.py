"""What a load is like: lengths, how unevenly it arrives, and what could be cached of it. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.common.quantile import nearest_rank
from services.sim.workload import Workload, ideal_hit, ideal_token_hit

PEAK_WINDOWS_S = (1, 10, 60)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts or of answers."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class LoadStatistics:
    """One load in figures."""

    num_requests: int
    duration_s: float  # from the first arrival to the last
    rate: float | None  # requests a second; None where all arrive at once
    inputs: Lengths
    outputs: Lengths
    gap_cv2: float | None  # variance of the gaps over the square of their mean; 1 = Poisson
    peak_to_mean: dict[int, float]  # by seconds of the window that has most arrivals
    ideal_block_hit: float  # by a cache that forgets nothing
    ideal_token_hit: float


def load_statistics(workload: Workload) -> LoadStatistics:
    """Look at a whole load; it holds at least one request."""
    times = [arrival.at_s for arrival in workload.arrivals]
    duration_s = times[-1] - times[0]
    return LoadStatistics(
        num_requests=len(times),
        duration_s=duration_s,
        rate=len(times) / duration_s if duration_s else None,
        inputs=_lengths([a.num_tokens for a in workload.arrivals]),
        outputs=_lengths([a.output_tokens for a in workload.arrivals]),
        gap_cv2=_gap_cv2(times),
        peak_to_mean={
            width: _peak(times, width) * duration_s / (width * len(times))
            for width in PEAK_WINDOWS_S
            if duration_s >= width
        },
        ideal_block_hit=ideal_hit(workload),
        ideal_token_hit=ideal_token_hit(workload),
    )


def _lengths(tokens: Sequence[int]) -> Lengths:
    ordered = sorted(tokens)
    return Lengths(
        statistics.fmean(ordered), *(nearest_rank(ordered, share) for share in (0.5, 0.9, 0.99))
    )


def _gap_cv2(times: Sequence[float]) -> float | None:
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = statistics.fmean(gaps) if gaps else 0.0
    return statistics.pvariance(gaps) / mean**2 if mean else None


def _peak(times: Sequence[float], width_s: int) -> int:
    """Return the arrivals of the fullest of the windows that follow one another."""
    return max(Counter(int((at - times[0]) // width_s) for at in times).values())
