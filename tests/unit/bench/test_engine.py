"""The engine benchmark: limits, ratios within rounds, and an engine that does what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.bench import engine as bench
from services.bench.driven_engine import DrivenEngine, EngineMisbehaved, Spent
from services.bench.engine import Case, Round
from services.bench.hardware import Hardware, flop_per_token, weight_bytes
from services.bench.result import Bar, BenchResult
from services.models.config import ModelConfig
from services.models.load import load_model
from services.models.resolved import read_config
from services.models.safetensors_file import SafetensorsFile


@pytest.fixture
def config(toy_dir: Path) -> ModelConfig:
    return read_config(toy_dir)


@pytest.fixture
def driven(toy_dir: Path) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(load_model(toy_dir), toy_dir, num_tokens=480, seed=1)
    yield engine
    engine.close()


def test_weights_are_counted_as_a_step_reads_them(toy_dir: Path, config: ModelConfig) -> None:
    (path,) = toy_dir.glob("*.safetensors")
    tensors = SafetensorsFile(path).tensors
    stored = sum(4 * torch.Size(info.shape).numel() for info in tensors.values())
    table = 4 * config.vocab_size * config.hidden_size
    assert not config.tie_word_embeddings
    assert weight_bytes(config) == stored - table
    head = 2.0 * config.vocab_size * config.hidden_size
    assert flop_per_token(config, with_head=True) == weight_bytes(config) / 2
    assert flop_per_token(config, with_head=False) == weight_bytes(config) / 2 - head


def test_decode_is_limited_by_reading_or_by_multiplying(config: ModelConfig) -> None:
    kv = 2 * config.num_layers * config.kv_size * 512 * 4
    reading = bench.decode_limit_tok_s(config, 8, read_gb_s=1.0, matmul_gflop_s=1e9)
    assert reading == pytest.approx(8 * 1e9 / (weight_bytes(config) + 8 * kv))
    multiplying = bench.decode_limit_tok_s(config, 8, read_gb_s=1e9, matmul_gflop_s=1.0)
    assert multiplying == pytest.approx(1e9 / flop_per_token(config, with_head=True))


def make_round(config: ModelConfig, speed: float, their_tok_s: float | None) -> Round:
    """Every case at that share of its limit, on a machine whose rates do not matter."""

    def case(num_tokens: int, limit: float, theirs: float | None) -> Case:
        seconds = num_tokens / (limit * speed)
        return Case(num_tokens, Spent(seconds, 0.9 * seconds, 16), 10.0, 100.0, theirs)

    def decode_limit(batch: int) -> float:
        return bench.decode_limit_tok_s(config, batch, read_gb_s=10.0, matmul_gflop_s=100.0)

    prefill_limit = bench.prefill_limit_tok_s(config, matmul_gflop_s=100.0)
    return Round(
        {b: case(16 * b, decode_limit(b), their_tok_s) for b in bench.BATCHES},
        {p: case(p, prefill_limit, None) for p in bench.PROMPTS},
        case(512, prefill_limit, None),
    )


def bars(result: BenchResult) -> dict[str, Bar]:
    return {bar.name: bar for bar in result.bars}


def test_bars_are_medians_of_ratios_within_rounds(config: ModelConfig) -> None:
    rounds = [make_round(config, speed, None) for speed in (0.2, 0.5, 0.8)]
    result = bench.result_of(rounds, config, 2, kernels="test")
    found = bars(result)
    assert len(found) == 2 * (len(bench.BATCHES) + len(bench.PROMPTS))
    assert found["decode_b8: share of the machine's limit"].value == pytest.approx(0.5)
    assert found["prefill_2048: share of the machine's limit"].value == pytest.approx(0.5)
    assert found["decode_b1: share of time outside the model"].value == pytest.approx(0.1)
    assert [bar.is_met for bar in result.bars] == [True, False] * 5
    assert result.exit_code == 1
    result.to_json()


def test_transformers_have_a_row_and_a_bar_only_where_they_ran(config: ModelConfig) -> None:
    fast = bench.result_of([make_round(config, 0.5, 1.0)], config, 1, kernels="test")
    assert fast.reference["decode_b32_transformers_tok_s"] == 1.0
    assert bars(fast)["decode_b32: ours / transformers"].is_met
    slow = bench.result_of([make_round(config, 0.5, 1e12)], config, 1, kernels="test")
    assert not bars(slow)["decode_b32: ours / transformers"].is_met
    alone = bench.result_of([make_round(config, 0.5, None)], config, 1, kernels="test")
    assert not any("transformers" in name for name in (*alone.reference, *bars(alone)))


def test_decodes_the_batch_it_is_asked_for(driven: DrivenEngine) -> None:
    for batch in (1, 3, 3):  # again and again in one pool
        spent = driven.decode(batch, 40, 20)
        assert spent.num_turns == 20
        assert 0 < spent.model_s < spent.turn_s
        assert 0 < spent.outside_share < 1
    load = driven._scheduler.load()
    assert (load.requests_open, load.blocks_in_use) == (0, 0)


def test_prefills_fresh_prompts(driven: DrivenEngine) -> None:
    for _ in range(3):
        spent = driven.prefill(130)
        assert spent.num_turns >= 1
        assert 0 < spent.model_s < spent.turn_s
    assert driven._scheduler.load().requests_open == 0


def test_a_batch_that_does_not_fit_is_no_figure(driven: DrivenEngine) -> None:
    with pytest.raises(EngineMisbehaved):
        driven.decode(20, 40, 4)


def test_the_machine_can_read_and_multiply(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.bench.hardware.READ_BYTES", 1 << 20)
    hardware = Hardware(config)
    assert hardware.read_gb_s() > 0
    assert hardware.matmul_gflop_s() > 0


def test_a_cached_prefix_is_found_and_not_counted(driven: DrivenEngine) -> None:
    spent = driven.prefill(40, after=64)
    assert (spent.num_turns >= 1, spent.turn_s > 0) == (True, True)
    with pytest.raises(EngineMisbehaved, match="48 tokens were cached instead of 50"):
        driven.prefill(40, after=50)
