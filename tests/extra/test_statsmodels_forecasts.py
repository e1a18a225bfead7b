"""Forecasts of seasons and by ARIMA, where statsmodels is installed."""

from __future__ import annotations

from math import pi, sin
from random import Random

import pytest

from services.autoscaler.policy import HoltWinters, Predictive, Predictor, PredictorType
from services.autoscaler.predictors import Fit, check_predictor, fit_history

pytest.importorskip("statsmodels", reason="statsmodels is not installed")


def waves(num: int, period: int) -> list[float]:
    """Return a load that swings between 200 and 1,800, with some noise."""
    rng = Random(7)
    return [1000 + 800 * sin(2 * pi * i / period) + rng.gauss(0, 20) for i in range(num)]


def fit(
    type_: PredictorType, history: list[float], steps: int, season_s: int
) -> list[float] | None:
    """Return what is expected of the next minutes."""
    predictor = Predictor(type=type_, holt_winters=HoltWinters(season_seconds=season_s))
    return fit_history(Fit(predictor, 60, tuple(history), steps))


@pytest.mark.parametrize(("period", "num", "width"), [(60, 180, 1), (1440, 4320, 15)])
def test_season_is_known_after_two_of_them(period: int, num: int, width: int) -> None:
    load = waves(num + 30, period)

    expected = fit(PredictorType.HOLT_WINTERS, load[:num], 30, period * 60)

    assert expected is not None
    for i, value in enumerate(expected):
        part = load[num + i * width : num + (i + 1) * width]
        assert value == pytest.approx(sum(part) / len(part), abs=120)
    assert fit(PredictorType.HOLT_WINTERS, load[: 2 * period - 1], 30, period * 60) is None


def test_arima_goes_on_with_the_slope() -> None:
    load = waves(244, 1440)

    expected = fit(PredictorType.ARIMA, load[:240], 4, 86_400)

    assert expected is not None
    assert expected == pytest.approx([1693, 1695, 1696, 1698], abs=60)
    assert fit(PredictorType.ARIMA, load[:19], 4, 86_400) is None


@pytest.mark.parametrize("type_", [PredictorType.ARIMA, PredictorType.HOLT_WINTERS])
def test_load_that_never_changes_goes_on(type_: PredictorType) -> None:
    check_predictor(Predictive.model_validate({"mode": "Forecast", "predictor": {"type": type_}}))

    assert fit(type_, [500.0] * 240, 4, 3600) == pytest.approx([500.0] * 4, rel=1e-3)
