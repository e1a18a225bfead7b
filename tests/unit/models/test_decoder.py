from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kernels import dispatch
from services.models.base import Model
from services.models.decoder import Decoder
from services.models.load import load_model
from services.models.resolved import build_manifest, write_manifest
from tests.support.paged import PagedDriver
from tests.support.toy_model import make_toy_model, toy_tokenizer

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 307,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # large enough that a wrong sign or order cannot hide
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    ("llama", {"attention_bias": True, "num_key_value_heads": 1}),
    ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e3}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    ("mistral", {"sliding_window": None, "head_dim": 8}),
    ("qwen2", {}),
    ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}),
]
# What each sequence gets in a step, and the rows whose logits are wanted (None = all).
MIXED_STEPS: list[tuple[dict[str, list[int]], list[int] | None]] = [
    ({"a": [5, 9, 250, 7] * 5}, [19]),
    ({"a": [11], "b": [4, 8, 15] * 11}, [0]),
    ({"a": [12], "b": [16], "c": [23, 42] * 9}, None),
    ({"c": [3, 1, 4, 1, 5], "a": [9], "d": [6] * 17}, []),
    ({"d": [8], "c": [2], "b": [7], "a": [290]}, [3, 0, 2]),
]
IDS = [(i * 37 + 5) % 290 + 3 for i in range(75)]


def random_model(model_dir: Path, family: str, changes: dict[str, Any]) -> Tensor:
    """Save a random transformers model in `model_dir`, resolved; return its logits for IDS."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **{**SMALL, **changes})
    make: Any = AutoModelForCausalLM.from_config  # untyped in transformers
    theirs = make(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name or name.endswith("bias"):  # their start values 1 and 0 hide errors
                parameter.add_(torch.randn_like(parameter) * 0.3)
        expected: Tensor = theirs.eval()(torch.tensor([IDS])).logits[0]
    theirs.save_pretrained(model_dir)
    toy_tokenizer().save(str(model_dir / "tokenizer.json"))
    write_manifest(model_dir, build_manifest(model_dir, name="random", source="test"))
    return expected


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_logits_equal_those_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    expected = random_model(tmp_path, family, changes)
    assert expected.std() > 0.3
    model = load_model(tmp_path)
    one_shot = PagedDriver(model).step({"a": IDS})
    assert one_shot.dtype == torch.float32
    assert (one_shot - expected).abs().max() < 1e-3

    driver = PagedDriver(model, seed=9)
    rows = [driver.step({"a": IDS[:33]}), driver.step({"b": IDS[:7], "a": IDS[33:64]})[7:]]
    rows += [driver.step({"a": [IDS[i]], "b": [5]})[:1] for i in range(64, 75)]
    assert (torch.cat(rows) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_tokens_logits_depend_on_nothing_but_its_sequence(tmp_path: Path, family: str) -> None:
    """Bit for bit: chunks, neighbours and block places do not matter."""
    if dispatch.cpu_kernels(torch.empty(0)) is None:
        pytest.skip(f"only the C library promises this: {dispatch.describe('cpu')}")
    model = load_model(make_toy_model(tmp_path, family, num_layers=3))
    whole = PagedDriver(model).step({"a": IDS})
    for seed, cuts in enumerate(([1, 16, 17, 40], [15, 16, 31, 74], [64], list(range(1, 75)))):
        driver = PagedDriver(model, seed=seed)
        rows: list[Tensor] = []
        bounds = [0, *cuts, len(IDS)]
        for i, (lo, hi) in enumerate(pairwise(bounds)):
            if i % 2:
                rows.append(driver.step({"n": IDS[: i % 7 + 1], "a": IDS[lo:hi]})[i % 7 + 1 :])
            else:
                rows.append(driver.step({"a": IDS[lo:hi], "m": [7]})[: hi - lo])
        assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("chunk", [64, 100, 256, 1000])
def test_chunk_size_never_shows_and_no_unwritten_memory_is_read(toy_dir: Path, chunk: int) -> None:
    """RB-086: a long prompt over a poisoned pool, in chunks of any size."""
    if dispatch.cpu_kernels(torch.empty(0)) is None:
        pytest.skip(f"only the C library promises this: {dispatch.describe('cpu')}")
    model = load_model(toy_dir)
    prompt = [(i * i * 31 + i) % 290 + 3 for i in range(1000)]
    expected = PagedDriver(model, num_blocks=70).step({"a": prompt}, rows=[999])
    assert not expected.isnan().any()
    driver = PagedDriver(model, num_blocks=70, seed=chunk)
    for lo in range(0, 1000, chunk):
        size = min(chunk, 1000 - lo)
        last = driver.step({"a": prompt[lo : lo + size]}, rows=[size - 1])
    assert torch.equal(last, expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_plain_torch_serves_where_the_library_cannot(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = random_model(tmp_path, family, {})
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda _tensor: None)
    driver = PagedDriver(load_model(tmp_path))
    rows = [driver.step({"a": IDS[:40]}), driver.step({"a": IDS[40:], "b": IDS[:3]})[:35]]
    assert (torch.cat(rows) - expected).abs().max() < 1e-3


def test_only_wanted_rows_are_computed_and_none_is_fine(toy_dir: Path) -> None:
    model = load_model(toy_dir)
    whole = PagedDriver(model).step({"a": IDS[:20], "b": IDS[:9]})
    some = PagedDriver(model).step({"a": IDS[:20], "b": IDS[:9]}, rows=[28, 19])
    assert torch.allclose(some, whole[[28, 19]], atol=1e-5)
    driver = PagedDriver(model)
    nothing = driver.step({"a": IDS[:20]}, rows=[])
    assert (nothing.shape, nothing.dtype) == ((0, model.config.vocab_size), torch.float32)
    # The KV of a step without logits is complete all the same.
    after = driver.step({"a": IDS[20:21]})
    expected = PagedDriver(model).step({"a": IDS[:21]})[20:]
    assert torch.allclose(after, expected, atol=1e-5)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    make_toy_model(tmp_path)
    exact = PagedDriver(load_model(tmp_path)).step({"a": IDS})
    model = load_model(tmp_path, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    rough = PagedDriver(model).step({"a": IDS})
    assert rough.dtype == torch.float32
    relative = (rough - exact).norm() / exact.norm()
    assert 1e-4 < relative < 0.05


def test_model_says_what_it_is(toy_dir: Path) -> None:
    model = load_model(toy_dir)
    assert (
        model.config.vocab_size == json.loads((toy_dir / "config.json").read_text())["vocab_size"]
    )
    assert (model.device.type, model.dtype) == ("cpu", torch.float32)


def by_ops(model: Model) -> Model:
    """Make the model compute op by op, over the same weights."""
    assert isinstance(model, Decoder)
    model._decoder = replace(model._decoder, native=None)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_the_fused_step_has_the_bits_of_the_single_ops(
    tmp_path: Path, family: str, kv_dtype: torch.dtype
) -> None:
    """Prefill chunks and decodes of shuffled blocks in one step; logits and pool bit for bit."""
    if dispatch.cpu_kernels(torch.empty(0)) is None:
        pytest.skip(f"there is no fused step: {dispatch.describe('cpu')}")
    model_dir = make_toy_model(tmp_path, family, num_layers=3)
    fused, plain = load_model(model_dir), by_ops(load_model(model_dir))
    assert isinstance(fused, Decoder)
    assert fused._decoder.native is not None
    drivers = [PagedDriver(model, seed=4, kv_dtype=kv_dtype) for model in (fused, plain)]
    for work, rows in MIXED_STEPS:
        got, expected = (driver.step(work, rows) for driver in drivers)
        assert torch.equal(got, expected)
        assert got.isfinite().all()
        assert torch.equal(*(driver.pool.nan_to_num(7.0) for driver in drivers))


def test_weights_are_held_once(tmp_path: Path) -> None:
    """What the fused step points at is what the single ops read: one copy of every panel."""
    if dispatch.cpu_kernels(torch.empty(0)) is None:
        pytest.skip(f"nothing is packed: {dispatch.describe('cpu')}")
    model = load_model(make_toy_model(tmp_path))
    assert isinstance(model, Decoder)
    packed = model._decoder
    for layer in packed.layers:
        for part in (layer.qkv, layer.attn_out, layer.gate_up, layer.down):
            assert part.weight is None
            assert part.panels is not None
    assert packed.native is not None
    pointed_at = packed.native._alive[0]
    assert all(a is b for a, b in zip(pointed_at, packed.layers, strict=True))
