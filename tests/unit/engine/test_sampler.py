"""Sampling: right distributions, the OpenAI rules, and nothing that depends on the batch."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.sampling import SamplingParams
from services.engine import sampler
from services.engine.plan import SampleTask
from services.engine.sampler import BadLogits, is_plain_greedy, sample, uniform

VOCAB = 1000
RNG = np.random.default_rng(5)
LOGITS = (RNG.standard_normal(VOCAB) * 3).astype(np.float32)
NO_PROMPT = np.array([], dtype=np.uint32)


def make_task(
    params: SamplingParams,
    index: int = 0,
    choice: int = 0,
    prompt: npt.NDArray[np.uint32] = NO_PROMPT,
    generated: list[int] | None = None,
) -> SampleTask:
    """A task."""
    return SampleTask(choice, index, params, prompt, generated or [])


def draws(
    params: SamplingParams, count: int, logits: npt.NDArray[np.float32] = LOGITS
) -> Counter[int]:
    """Tokens drawn at `count` positions."""
    return Counter(sample(logits, make_task(params, index=i), ()).token_id for i in range(count))


def softmax(logits: npt.NDArray[np.float32], temperature: float = 1.0) -> npt.NDArray[np.float64]:
    """Probabilities, the plain way."""
    wide = logits.astype(np.float64) / temperature
    wide = np.exp(wide - wide.max())
    probs: npt.NDArray[np.float64] = wide / wide.sum()
    return probs


def top_p_set(probs: npt.NDArray[np.float64], top_p: float) -> set[int]:
    """The nucleus, the plain way."""
    order = np.argsort(-probs, kind="stable")
    count = int(np.searchsorted(np.cumsum(probs[order]), top_p)) + 1
    return set(order[:count].tolist())


def test_uniform_is_uniform_and_depends_on_each_argument() -> None:
    values = np.array([uniform(1, 0, i) for i in range(4000)])
    assert 0 <= values.min() < 0.01
    assert 0.99 < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02
    histogram, _ = np.histogram(values, bins=20, range=(0, 1))
    assert abs(histogram - 200).max() < 60
    grid = {
        uniform(seed, choice, index)
        for seed in range(9)
        for choice in range(9)
        for index in range(9)
    }
    assert len(grid) == 9**3


def test_uniform_golden() -> None:
    """Every worker and version draws the same numbers."""
    assert uniform(0, 0, 0) == 0.13870941014555427
    assert uniform(2**63 + 5, 3, 1000) == 0.5455311080684758


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = np.zeros(50, dtype=np.float32)
    logits[[7, 30]] = 2.0
    assert sample(logits, make_task(SamplingParams(temperature=0.0)), ()).token_id == 7


def test_temperature_one_follows_the_model() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    counts = draws(SamplingParams(seed=3), 4000, logits)
    for token_id, prob in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert counts[token_id] / 4000 == pytest.approx(prob, abs=0.025)


def test_low_temperature_sharpens() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    probs = softmax(logits, 0.5)
    counts = draws(SamplingParams(temperature=0.5, seed=3), 4000, logits)
    for token_id in range(3):
        assert counts[token_id] / 4000 == pytest.approx(probs[token_id], abs=0.025)
    assert set(draws(SamplingParams(temperature=1e-9), 50)) == {int(LOGITS.argmax())}


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_keeps_exactly_the_nucleus(top_p: float) -> None:
    probs = softmax(LOGITS)
    nucleus = top_p_set(probs, top_p)
    counts = draws(SamplingParams(top_p=top_p, seed=1), 3000)
    assert set(counts) <= nucleus
    likely = {i for i in nucleus if probs[i] * 3000 / probs[list(nucleus)].sum() > 15}
    assert likely <= set(counts)


def test_top_p_over_a_flat_distribution_keeps_more_than_the_first_candidates() -> None:
    flat = np.zeros(20_000, dtype=np.float32)
    counts = draws(SamplingParams(top_p=0.5, seed=1), 500, flat)
    assert max(counts) < 10_000  # ties: lowest ids are kept
    assert max(counts) > 8_000


@pytest.mark.parametrize("top_k", [1, 2, 40])
def test_top_k_keeps_the_k_most_probable(top_k: int) -> None:
    kept = set(np.argsort(-LOGITS, kind="stable")[:top_k].tolist())
    assert set(draws(SamplingParams(top_k=top_k, temperature=2.0), 800)) <= kept


def test_top_p_counts_within_top_k() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    # Of the two most probable, the first holds 4/7 of their mass.
    assert set(draws(SamplingParams(top_k=2, top_p=0.55), 300, logits)) == {0}
    assert set(draws(SamplingParams(top_k=2, top_p=0.6), 300, logits)) == {0, 1}


def test_min_p_drops_what_is_far_below_the_best() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    assert set(draws(SamplingParams(min_p=0.29), 500, logits)) == {0, 1, 2}
    assert set(draws(SamplingParams(min_p=0.9), 100, logits)) == {0}


@given(
    st.integers(0, 2**63),
    st.floats(0.1, 3),
    st.sampled_from([1.0, 0.95, 0.3]),
    st.sampled_from([0, 1, 5, 5000]),
    st.sampled_from([0.0, 0.1]),
)
def test_a_draw_is_repeatable_and_possible(
    seed: int, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    params = SamplingParams(
        seed=seed, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
    )
    first = sample(LOGITS, make_task(params, index=3), ())
    assert first == sample(LOGITS.copy(), make_task(params, index=3), ())
    assert softmax(LOGITS, temperature)[first.token_id] > 0


def test_seeds_choices_and_positions_differ() -> None:
    """RB-076: not all requests draw the same "random" tokens."""

    def text(seed: int, choice: int) -> tuple[int, ...]:
        params = SamplingParams(seed=seed)
        return tuple(
            sample(LOGITS, make_task(params, index=i, choice=choice), ()).token_id for i in range(8)
        )

    assert len({text(seed, choice) for seed in range(5) for choice in range(4)}) == 20


# -- penalties and masks ------------------------------------------------------------------------


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    logits = np.array([3.0, 2.9, 2.0, 0.0], dtype=np.float32)
    prompt = np.array([0, 0, 0], dtype=np.uint32)
    params = SamplingParams(temperature=0.0, presence_penalty=0.2)
    assert sample(logits, make_task(params, prompt=prompt), ()).token_id == 0
    assert sample(logits, make_task(params, prompt=prompt, generated=[0]), ()).token_id == 1
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5)
    assert sample(logits, make_task(params, generated=[0, 0, 1]), ()).token_id == 1
    assert sample(logits, make_task(params, generated=[0, 0, 0, 1, 1]), ()).token_id == 2
    assert logits.tolist() == [3.0, np.float32(2.9), 2.0, 0.0]


def test_repetition_counts_prompt_and_output_and_handles_negative_logits() -> None:
    logits = np.array([3.0, 2.0, -1.0, -1.1], dtype=np.float32)
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    prompt = np.array([0], dtype=np.uint32)
    assert sample(logits, make_task(params, prompt=prompt), ()).token_id == 1
    assert sample(logits, make_task(params, prompt=prompt, generated=[1]), ()).token_id == 0
    low = np.array([-1.0, -1.1], dtype=np.float32)  # a seen negative logit falls further
    assert sample(low, make_task(params, prompt=prompt), ()).token_id == 1


def test_tokens_that_end_a_choice_wait_for_min_tokens() -> None:
    logits = np.array([5.0, 4.0, 3.0], dtype=np.float32)
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(1,))
    picked = [sample(logits, make_task(params, index=i), (0,)).token_id for i in range(4)]
    assert picked == [2, 2, 0, 0]
    lenient = SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True)
    assert sample(logits, make_task(lenient), (0,)).token_id == 0


def test_what_is_plain_greedy() -> None:
    for params, expected in (
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(temperature=0.5), False),
        (SamplingParams(temperature=0.0, logprobs=True), False),
        (SamplingParams(temperature=0.0, presence_penalty=0.1), False),
        (SamplingParams(temperature=0.0, min_tokens=5), False),
    ):
        assert is_plain_greedy(make_task(params), (0,)) is expected


# -- log probabilities and bad rows -------------------------------------------------------------


def test_logprobs_are_the_models_own() -> None:
    params = SamplingParams(
        temperature=0.3, top_k=3, presence_penalty=2.0, logprobs=True, top_logprobs=5
    )
    sampled = sample(LOGITS, make_task(params, generated=[int(LOGITS.argmax())]), ())
    logprobs, probs = sampled.logprobs, softmax(LOGITS)
    assert logprobs is not None
    assert logprobs.token_id == sampled.token_id
    assert logprobs.logprob == pytest.approx(math.log(probs[sampled.token_id]), abs=1e-9)
    best = np.argsort(-LOGITS, kind="stable")[:5].tolist()
    assert [token_id for token_id, _ in logprobs.top] == best
    assert [value for _, value in logprobs.top] == pytest.approx(np.log(probs[best]), abs=1e-9)


@pytest.mark.parametrize("at", [0, 500, VOCAB - 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_refused(at: int, temperature: float, value: float) -> None:
    logits = LOGITS.copy()
    logits[at] = value
    with pytest.raises(BadLogits):
        sample(logits, make_task(SamplingParams(temperature=temperature)), ())


def test_a_row_without_any_possible_token_is_refused() -> None:
    logits = np.array([1.0, 2.0], dtype=np.float32)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=2, stop_token_ids=(0, 1))
        with pytest.raises(BadLogits):
            sample(logits, make_task(params), ())


def in_order(values: npt.NDArray[np.float32]) -> list[int]:
    """All ids, highest value first, lowest id first on ties: the plain way."""
    return sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))


def awkward_rows(size: int) -> list[npt.NDArray[np.float32]]:
    """Rows with ties, both zeros, infinities, and one value above all others."""
    rng = np.random.default_rng(size)
    plain = rng.standard_normal(size).astype(np.float32)
    ties = np.round(plain * 2)  # holds -0.0 and 0.0
    masked = np.where(rng.random(size) < 0.3, np.float32(-np.inf), plain)
    peaked = plain.copy()
    peaked[size // 2] = 30.0
    return [plain, ties, masked, peaked, np.zeros(size, np.float32), -np.abs(plain)]


@pytest.mark.parametrize("size", [1, 63, 64, 129, 700, 5000])
def test_top_tokens_are_those_of_a_plain_sort(size: int) -> None:
    for values in awkward_rows(size):
        expected = in_order(values)
        for count in {1, 2, min(5, size), min(40, size), size}:
            if count <= size:
                assert sampler._top(values, count).tolist() == expected[:count]


@pytest.mark.parametrize("size", [1, 64, 700, 5000])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.9999, 1.0])
def test_the_nucleus_is_the_shortest_beginning_of_a_plain_sort(size: int, top_p: float) -> None:
    for logits in awkward_rows(size):
        probs = np.exp(logits - logits.max())
        order = in_order(probs)
        wanted = top_p * float(probs.sum(dtype=np.float64))
        held, length = 0.0, 0
        while length < size and held < wanted:
            held += float(probs[order[length]])
            length += 1
        found = sampler._nucleus(probs, None, top_p).tolist()
        assert sorted(found) == sorted(order[: max(length, 1)])


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1.0])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_smallest_repetition_penalty_still_draws_a_token(temperature: float, top_p: float) -> None:
    """A penalty near 0 is allowed; it made logits infinite and ended the request as internal."""
    params = SamplingParams(
        temperature=temperature, top_p=top_p, repetition_penalty=1e-38, max_tokens=9
    )
    best = int(LOGITS.argmax())
    prompt = np.array([best, int(LOGITS.argmin())], dtype=np.uint32)
    assert sample(LOGITS, make_task(params, prompt=prompt), ()).token_id == best
