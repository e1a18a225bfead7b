"""How a series goes on: a Kalman filter of our own; seasons and ARIMA by statsmodels. Pure.

The filter follows a level and a trend. Only the ratio of its variances matters: a series in other
units has the same gains. statsmodels is an extra: it is loaded where a policy needs it, at best
before the first tick.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import ceil, isfinite
from typing import Any

from services.autoscaler.policy import (
    Kalman,
    Predictive,
    PredictiveMode,
    Predictor,
    PredictorType,
)
from services.autoscaler.quantity import parse_quantity
from services.autoscaler.state import Series
from services.common.errors import ConfigError

_MODULES = {
    PredictorType.HOLT_WINTERS: "statsmodels.tsa.holtwinters",
    PredictorType.ARIMA: "statsmodels.tsa.arima.model",
}
_SEASONS = 3  # kept, as many as seasonal smoothing gains by
_MAX_SEASON_POINTS = 96  # a season is looked at in so many parts: fits stay within a tick
_ARIMA_POINTS = 240
_MIN_ARIMA_POINTS = 20
_ARIMA_ORDER = (2, 1, 1)
_UNKNOWN = 1e6  # variance of what nothing is known of, in measurements' variances


@dataclass(frozen=True, slots=True)
class Fit:
    """What a predictor is to go on from."""

    predictor: Predictor
    interval_s: int
    history: tuple[float, ...]
    steps: int  # to look ahead


def check_predictor(predictive: Predictive) -> None:
    """Load what the predictor of a policy needs; ConfigError where it is not installed."""
    if predictive.mode is not PredictiveMode.OFF and predictive.predictor.type in _MODULES:
        _statsmodels(predictive.predictor.type)


def advance_level(series: Series, kalman: Kalman, point: float, steps: int) -> Series:
    """Return level and trend after some steps, with a measurement at the last of them."""
    noise = float(parse_quantity(kalman.r))
    if series.num_points == 0:
        unknown = _UNKNOWN * max(noise, 1e-9)
        return replace(series, level=point, trend=0.0, covariance=(noise, 0.0, unknown))
    q_level, q_trend = (float(parse_quantity(q)) for q in (kalman.q_level, kalman.q_trend))
    level, trend = series.level, series.trend
    p_level, p_cross, p_trend = series.covariance
    for _ in range(min(steps, _ARIMA_POINTS)):
        level += trend
        p_level += 2 * p_cross + p_trend + q_level
        p_cross += p_trend
        p_trend += q_trend
    spread = p_level + noise
    gain_level, gain_trend = (p_level / spread, p_cross / spread) if spread > 0 else (1.0, 0.0)
    off = point - level
    covariance = (
        (1 - gain_level) * p_level,
        (1 - gain_level) * p_cross,
        p_trend - gain_trend * p_cross,
    )
    return replace(
        series, level=level + gain_level * off, trend=trend + gain_trend * off,
        covariance=covariance,
    )  # fmt: skip


def num_points_kept(predictive: Predictive) -> int:
    """Return how many points a predictor looks back on."""
    predictor = predictive.predictor
    if predictor.type is PredictorType.HOLT_WINTERS:
        season_s = predictor.holt_winters.season_seconds
        return _SEASONS * max(2, ceil(season_s / predictive.interval_seconds))
    return _ARIMA_POINTS if predictor.type is PredictorType.ARIMA else 0


def fit_history(fit: Fit) -> list[float] | None:
    """Return what is expected of each step to come; None while there is too little to go by."""
    if fit.predictor.type is PredictorType.ARIMA:
        return _arima(fit) if len(fit.history) >= _MIN_ARIMA_POINTS else None
    season = max(2, ceil(fit.predictor.holt_winters.season_seconds / fit.interval_s))
    return _holt_winters(fit, season) if len(fit.history) >= 2 * season else None


def _holt_winters(fit: Fit, season: int) -> list[float] | None:
    # Points are put together so that they end with the newest; a part's mean stands for it.
    width = ceil(season / _MAX_SEASON_POINTS)
    parts = len(fit.history) // width
    history = fit.history[-parts * width :]
    means = [sum(history[i * width : (i + 1) * width]) / width for i in range(parts)]
    model = _statsmodels(fit.predictor.type).ExponentialSmoothing(
        means, trend="add", damped_trend=True, seasonal="add",
        seasonal_periods=max(2, round(season / width)), initialization_method="heuristic",
    )  # fmt: skip
    return _forecast(model, ceil(fit.steps / width))


def _arima(fit: Fit) -> list[float] | None:
    model = _statsmodels(fit.predictor.type).ARIMA(list(fit.history), order=_ARIMA_ORDER)
    return _forecast(model, fit.steps)


# Any: statsmodels has no types.
def _statsmodels(wanted_by: PredictorType) -> Any:
    try:
        return import_module(_MODULES[wanted_by])
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"predictor {wanted_by.value} needs statsmodels: install isthmus[forecast], or use "
            "Kalman"
        ) from error


def _forecast(model: Any, steps: int) -> list[float] | None:
    with warnings.catch_warnings():
        # A fit that did not quite converge is still a forecast; one that is no number is none.
        warnings.simplefilter("ignore")
        values: Sequence[float] = [float(v) for v in model.fit().forecast(steps)]
    return list(values) if all(isfinite(v) for v in values) else None
