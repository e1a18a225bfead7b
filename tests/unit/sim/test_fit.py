from __future__ import annotations

import random

import pytest

from services.sim.fit import PromptSample, StepSample, TooFewSamples, fit_decode, fit_prefill
from services.sim.performance import PerformanceModel, default_model


def true_model() -> PerformanceModel:
    """Return workers with every coefficient above zero."""
    kind = default_model()
    prefill = kind.prefill.model_copy(update={"fixed_s": 0.01, "token_s": 1e-3, "context_s": 2e-7})
    decode = kind.decode.model_copy(update={"fixed_s": 0.02, "request_s": 1e-3, "token_s": 3e-7})
    return kind.model_copy(update={"prefill": prefill, "decode": decode})


def prompts(noise: float = 0.0) -> list[PromptSample]:
    """Time prompts as the model says, give or take."""
    rng, kind = random.Random(0), true_model()
    return [
        PromptSample(n, k, kind.prefill_s(n, k) * (1 + rng.uniform(-noise, noise)))
        for n in (64, 256, 1024)
        for k in (0, 512, 1024)
    ]


def test_exact_times_give_the_coefficients_back() -> None:
    found, true = fit_prefill(prompts()), true_model().prefill
    for name in ("fixed_s", "token_s", "context_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6)
    steps = [
        StepSample(b, b * k, true_model().decode_s(b, b * k)) for b in (1, 4, 32) for k in (64, 512)
    ]
    pace = fit_decode(steps, 64)
    true_pace = true_model().decode
    assert pace.max_batch == 64
    for name in ("fixed_s", "request_s", "token_s"):
        assert getattr(pace, name) == pytest.approx(getattr(true_pace, name), rel=1e-6)


def test_noise_moves_predictions_by_no_more_than_itself() -> None:
    kind = true_model().model_copy(update={"prefill": fit_prefill(prompts(noise=0.05))})
    for sample in prompts():
        predicted = kind.prefill_s(sample.uncached_tokens, sample.cached_tokens)
        assert predicted == pytest.approx(sample.seconds, rel=0.06)


def test_a_coefficient_that_would_be_negative_is_zero() -> None:
    """Noise can make longer contexts look faster; a model file refuses such a thing."""
    samples = [PromptSample(n, k, n * 1e-3 - n * k * 1e-8) for n in (64, 256) for k in (0, 512)]
    found = fit_prefill(samples)
    assert found.context_s == 0
    assert found.token_s == pytest.approx(1e-3, rel=0.05)


def test_samples_that_tell_nothing_apart_are_refused() -> None:
    with pytest.raises(TooFewSamples, match="apart"):
        fit_prefill([PromptSample(64, 0, 0.1), PromptSample(128, 0, 0.2)])
    with pytest.raises(TooFewSamples, match="no time"):
        fit_prefill([PromptSample(64, 0, 0.0), *prompts()])
