"""The wire benchmark: known distributions, exact controls, rounding only where there is some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.bench.greedy import Sequences
from services.bench.wire import (
    Difference,
    Setup,
    _Exact,
    compare,
    divergence,
    free_run,
    result_of,
    run,
    write_prompts,
)
from services.kv.convert import round_trip
from services.models.load import load_model

SETUP = Setup(prompts=3, prompt_tokens=40, answer_tokens=12, seed=5)


@pytest.fixture
def sequences(toy_dir: Path) -> Sequences:
    return Sequences(load_model(toy_dir), SETUP.prompts, SETUP.prompt_tokens + SETUP.answer_tokens)


def test_divergence_of_known_distributions() -> None:
    half = np.log(np.array([[0.5, 0.5]], np.float32))
    skewed = np.log(np.array([[0.25, 0.75]], np.float32)) + 7  # logits have no zero
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert divergence(half, skewed)[0] == pytest.approx(expected, abs=1e-6)
    assert divergence(skewed, skewed)[0] == 0.0


def test_a_batch_in_chunks_is_each_sequence_alone(toy_dir: Path, sequences: Sequences) -> None:
    prompts = np.random.default_rng(1).integers(0, 250, (3, 40))
    together = sequences.feed(prompts)
    for row in range(3):
        alone = Sequences(load_model(toy_dir), 1, 64)
        alone.feed(prompts[row : row + 1, :17])
        logits = alone.feed(prompts[row : row + 1, 17:])
        assert np.array_equal(logits[0], together[row])


def test_nothing_rounded_is_nothing_found(sequences: Sequences) -> None:
    prompts = write_prompts(sequences, SETUP.prompt_tokens, np.random.default_rng(5))
    exact = _Exact.of(sequences, prompts, SETUP.answer_tokens)
    control = compare(sequences, exact, ())
    assert control.kl.max() == 0.0
    assert control.same_token.all()
    assert (control.free_tokens == SETUP.answer_tokens).all()
    assert np.array_equal(free_run(sequences, exact, ()), exact.tokens)


def test_rounding_is_that_of_a_link_and_is_noticed(sequences: Sequences) -> None:
    prompts = write_prompts(sequences, SETUP.prompt_tokens, np.random.default_rng(5))
    exact = _Exact.of(sequences, prompts, SETUP.answer_tokens)
    fine, rough = (compare(sequences, exact, (name,)) for name in ("bfloat16", "int8"))
    assert 0.0 < fine.kl.mean() < rough.kl.mean() < 0.1
    sequences.restore(exact.prompt_kv, exact.prompt_tokens)
    sequences.round(("int8",))
    rounded = sequences.state()
    used = sequences.layout.blocks_for(SETUP.prompt_tokens)
    for block in range(used):
        expected = round_trip(sequences.layout, exact.prompt_kv[block], ("int8",))
        assert np.array_equal(rounded[block], expected)
    assert np.array_equal(rounded[used], exact.prompt_kv[used])  # beyond the prompt: as it was


def test_bars_miss_what_is_too_far_off() -> None:
    control = Difference(np.zeros(4), np.ones(4, bool), np.full(2, 3))
    good = Difference(np.full(4, 1e-5), np.ones(4, bool), np.full(2, 3))
    assert result_of({"int8": good}, control, SETUP).exit_code == 0
    far = Difference(np.full(4, 1.0), np.ones(4, bool), np.full(2, 3))
    assert result_of({"int8": far}, control, SETUP).exit_code == 1
    other = Difference(np.full(4, 1e-4), np.zeros(4, bool), np.zeros(2, np.int64))
    assert result_of({"int8": other}, control, SETUP).exit_code == 1
    broken = Difference(np.full(4, 1e-9), np.ones(4, bool), np.full(2, 3))
    assert result_of({"int8": good}, broken, SETUP).exit_code == 1


def test_the_command_measures_what_is_smaller_than_stored(toy_dir: Path) -> None:
    threads = torch.get_num_threads()
    try:
        wide = run(str(toy_dir), SETUP, dtype="float32", threads=1)
        narrow = run(str(toy_dir), SETUP, dtype="bfloat16", threads=1)
    finally:
        torch.set_num_threads(threads)
    assert {bar.name for bar in wide.bars} >= {"bfloat16_kl_mean_nats", "int8_kl_mean_nats"}
    assert not any(bar.name.startswith("bfloat16") for bar in narrow.bars)
    # One byte a value and two for each row of 16 or more values, of four bytes or two.
    assert 0.25 < float(wide.figures["int8_bytes_share"] or 0) < 0.3
    assert 0.5 < float(narrow.figures["int8_bytes_share"] or 0) < 0.6
