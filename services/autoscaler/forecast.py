"""How many replicas the load that is to come will need: a floor under what metrics ask for. Pure.

Load is gathered into points, one an interval. Each new point gives a new forecast, which holds
until the next: the most that is expected between now and the look-ahead. What is ordered now works
then.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from services.autoscaler.capacity import rated
from services.autoscaler.observation import Load
from services.autoscaler.policy import Pool, Predictive, PredictiveMode, PredictorType, Role
from services.autoscaler.predictors import Fit, advance_level, fit_history, num_points_kept
from services.autoscaler.proposals import round_up
from services.autoscaler.sizing import Sizing
from services.autoscaler.state import Series


def with_load(sizing: Sizing, load: Load, predictive: Predictive) -> Sizing:
    """Take what came in since the tick before."""
    tokens = load.prompt_tokens if sizing.pool.role is Role.PREFILL else load.output_tokens
    series = _gathered(sizing.state.series, predictive, float(tokens), load)
    return replace(sizing, state=replace(sizing.state, series=series))


def with_forecast(sizing: Sizing, predictive: Predictive) -> Sizing:
    """Raise to what is expected to be needed."""
    if predictive.mode is PredictiveMode.OFF:
        return sizing
    pace = rated(predictive.capacity_model, sizing.state.capacity, sizing.seen.profile_tokens_s)
    ahead = sizing.state.series.ahead
    if pace is None or ahead is None or pace <= 0:
        return sizing
    floor = round_up(ahead * _headroom(sizing.pool) / pace)
    sizing = replace(sizing, forecast=floor)
    if predictive.mode is PredictiveMode.FORECAST_DRY_RUN or sizing.is_held:
        return sizing
    reason = f"{ahead:.0f} tokens/s expected, {pace:.0f} a replica"
    return sizing.moved(max(sizing.desired, floor), "forecast", reason)


def _headroom(pool: Pool) -> float:
    # Prefill's pace is that of no pause at all; decode's is at a target that leaves room.
    check = pool.behavior.scale_down.consolidation_check
    if pool.role is Role.DECODE or not check.enabled:
        return 1.0
    return 1 + check.headroom_percent / 100


def _gathered(series: Series, predictive: Predictive, tokens: float, load: Load) -> Series:
    tokens += series.open_tokens
    span_s = load.span_s + series.open_span_s
    if span_s < predictive.interval_seconds:
        return replace(series, open_tokens=tokens, open_span_s=span_s)
    point, at = tokens / span_s, load.measured_at
    # Time that nobody counted goes by all the same.
    gap_s = span_s if series.point_at is None else max(at - series.point_at, span_s)
    steps = max(1, round(gap_s / predictive.interval_seconds))
    series = advance_level(series, predictive.predictor.kalman, point, steps)
    kept = num_points_kept(predictive)
    missing = min(steps - 1, kept) if series.history else 0
    filled = series.history[-1:] * missing
    history = (*series.history, *filled, point)[-kept:] if kept else ()
    series = replace(
        series, open_tokens=0.0, open_span_s=0.0, point_at=at, history=history,
        num_points=series.num_points + 1,
    )  # fmt: skip
    return replace(series, ahead=_expected(series, predictive, point))


def _expected(series: Series, predictive: Predictive, point: float) -> float | None:
    predictor = predictive.predictor
    steps = ceil(predictive.look_ahead_seconds / predictive.interval_seconds)
    if predictor.type is PredictorType.CONSTANT:
        return point
    if predictor.type is PredictorType.KALMAN:
        if series.num_points < predictor.kalman.min_points:
            return None
        return max(series.level, series.level + steps * series.trend, 0.0)
    fit = fit_history(Fit(predictor, predictive.interval_seconds, series.history, steps))
    return None if fit is None else max(*fit, 0.0)
