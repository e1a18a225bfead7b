"""From measured times of a worker to its performance model: least squares on relative errors."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.sim.performance import DecodePace, FitQuality, PrefillPace

_LEAST_S = 1e-9  # of what a model file wants above zero


@dataclass(frozen=True, slots=True)
class PromptSample:
    """One prompt, computed with nothing beside it."""

    uncached_tokens: int
    cached_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepSample:
    """Steps that each made a token for some answers."""

    num_answers: int
    resident_tokens: float
    seconds: float  # of one


class TooFewSamples(ValueError):
    """The samples do not tell the coefficients apart."""


def fit_prefill(samples: Sequence[PromptSample]) -> PrefillPace:
    """Find the coefficients of a prompt's time."""
    rows = [
        (1.0, s.uncached_tokens, s.uncached_tokens * (s.cached_tokens + s.uncached_tokens / 2))
        for s in samples
    ]
    fixed_s, token_s, context_s = _solve(rows, [s.seconds for s in samples])
    return PrefillPace(fixed_s=fixed_s, token_s=max(token_s, _LEAST_S), context_s=context_s)


def fit_decode(samples: Sequence[StepSample], max_batch: int) -> DecodePace:
    """Find the coefficients of a step's time."""
    rows = [(1.0, s.num_answers, s.resident_tokens) for s in samples]
    fixed_s, request_s, token_s = _solve(rows, [s.seconds for s in samples])
    return DecodePace(
        fixed_s=max(fixed_s, _LEAST_S), request_s=request_s, token_s=token_s, max_batch=max_batch
    )


def quality(prompts: Sequence[float], steps: Sequence[float]) -> FitQuality:
    """Sum up relative errors."""
    return FitQuality(
        prefill_p50=statistics.median(prompts),
        prefill_max=max(prompts),
        decode_p50=statistics.median(steps),
        decode_max=max(steps),
    )


def _solve(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Solve for coefficients that are not negative; every sample counts alike, long or short."""
    matrix, wanted = np.array(rows, dtype=np.float64), np.array(seconds)
    if np.any(wanted <= 0):
        raise TooFewSamples("a sample took no time")
    # Columns of like size: tokens squared and ones differ by ten orders of magnitude.
    scale = np.abs(matrix).max(axis=0)
    weighed = matrix / scale / wanted[:, None]
    if np.linalg.matrix_rank(weighed) < len(scale):
        raise TooFewSamples("the samples do not tell the coefficients apart")
    kept = list(range(len(scale)))
    while True:
        found = np.linalg.lstsq(weighed[:, kept], np.ones(len(wanted)), rcond=None)[0]
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]  # a time does not fall with more work
    solved = np.zeros(len(scale))
    solved[kept] = found
    return [float(value) for value in solved / scale]
