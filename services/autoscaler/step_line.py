"""How long a step of decode takes by its number of answers, and what that makes at most. Pure.

A step takes a time of its own and some for each answer, so twice the answers are less than twice
the tokens a second, and a replica with few of them shows less than half of what it can do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.autoscaler.observation import StepSeen
from services.autoscaler.state import StepLine

_KEPT = 0.99  # of the weight of what was seen, a tick
_LEAST_SPREAD = 0.05  # of the answers' mean, squared: steps of one size tell no line
_MIN_WEIGHT = 10.0  # steps before there is one
_FURTHEST = 4.0  # times the mean of the answers seen: the line is not followed further


@dataclass(frozen=True, slots=True)
class Full:
    """What bounds the answers of one replica; None = does not."""

    itl_s: float | None
    most_answers: float | None


def with_steps(line: StepLine, seen: Iterable[StepSeen]) -> StepLine:
    """Add the steps of a tick."""
    steps = list(seen)
    if not steps:
        return line
    return StepLine(
        weight=line.weight * _KEPT + len(steps),
        answers=line.answers * _KEPT + sum(s.num_answers for s in steps),
        answers2=line.answers2 * _KEPT + sum(s.num_answers**2 for s in steps),
        seconds=line.seconds * _KEPT + sum(s.step_s for s in steps),
        answers_seconds=line.answers_seconds * _KEPT + sum(s.num_answers * s.step_s for s in steps),
    )


def full_tokens_s(line: StepLine, full: Full) -> float | None:
    """Return the tokens a second of a replica that is as full as it may be; None = not known."""
    if line.weight < _MIN_WEIGHT:
        return None
    mean, mean_s = line.answers / line.weight, line.seconds / line.weight
    spread = line.answers2 / line.weight - mean**2
    if spread < _LEAST_SPREAD * mean**2:
        return None
    slope_s = (line.answers_seconds / line.weight - mean * mean_s) / spread
    # A step with more answers is no shorter, and none is shorter than nothing.
    slope_s = min(max(slope_s, 0.0), mean_s / mean)
    fixed_s = mean_s - slope_s * mean
    limits = [] if full.most_answers is None else [full.most_answers]
    if full.itl_s is not None and slope_s > 0:
        limits.append((full.itl_s - fixed_s) / slope_s)
    if not limits:
        return None
    answers = max(1.0, min(*limits, _FURTHEST * mean))
    return answers / (fixed_s + slope_s * answers)
