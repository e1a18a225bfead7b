"""The default model's real weights and tokenizer, against transformers and known ids."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from kernels import dispatch
from services.common.model_manifest import read_manifest
from services.models import catalog
from services.models.base import Model
from services.models.decoder import Decoder
from services.models.load import load_model
from tests.support.paged import PagedDriver

pytestmark = pytest.mark.integration

CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TEXTS = (
    CHAT,
    "The quick brown fox jumps over 13 lazy dogs, and 2,048 times again.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "日本語のテキスト、絵文字 👩‍👩‍👧‍👦 と数字 12345。",
    "def f(x):\n\treturn {'a': x ** 2}  # comment\n\n\n",
)


@pytest.fixture(scope="module")
def model(smollm2_dir: Path) -> Model:
    return load_model(smollm2_dir)


@pytest.fixture(scope="module")
def theirs(smollm2_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_logits_equal_those_of_transformers(
    model: Model, theirs: Any, tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text).ids
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    one_shot = PagedDriver(model).step({"a": ids})
    assert (one_shot - expected).abs().max() < 1e-3
    driver = PagedDriver(model, seed=3)
    middle, decode = len(ids) // 2, len(ids) - 6
    rows = [driver.step({"a": ids[:middle]}), driver.step({"a": ids[middle:decode]})]
    rows += [driver.step({"a": [token_id]}) for token_id in ids[decode:]]
    assert (torch.cat(rows) - expected).abs().max() < 1e-3


def test_greedy_answer_is_the_one_transformers_gives(
    model: Model, theirs: Any, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(CHAT).ids
    expected = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)
    driver = PagedDriver(model)
    logits = driver.step({"a": ids}, rows=[len(ids) - 1])
    answer: list[int] = []
    while len(answer) < 12:
        answer.append(int(logits[-1].argmax()))
        if answer[-1] in model.config.eos_token_ids:
            break
        logits = driver.step({"a": answer[-1:]})
    assert answer == expected[0, len(ids) :].tolist()
    assert "Paris" in tokenizer.decode(answer)


def test_the_fused_step_has_the_bits_of_the_single_ops(smollm2_dir: Path) -> None:
    model = load_model(smollm2_dir)
    assert isinstance(model, Decoder)
    if model._decoder.native is None:
        pytest.skip(f"there is no fused step: {dispatch.describe('cpu')}")
    fused = PagedDriver(model, seed=8)
    steps: list[tuple[dict[str, list[int]], list[int]]] = [
        ({"a": list(range(100, 133))}, [32]),
        ({"a": [7], "b": list(range(40, 60))}, [0, 20]),
        ({"b": [9], "a": [49_151], "c": [1]}, [2, 0, 1]),
    ]
    got = [fused.step(work, rows) for work, rows in steps]
    model._decoder = replace(model._decoder, native=None)
    plain = PagedDriver(model, seed=8)
    for logits, (work, rows) in zip(got, steps, strict=True):
        assert torch.equal(logits, plain.step(work, rows))
    assert torch.equal(fused.pool.nan_to_num(7.0), plain.pool.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Hello world", ["Hello", "Ġworld"]),
        ("It's 1,234", ["It", "'s", "Ġ", "1", ",", "2", "3", "4"]),
        ("a  b\n\n c", ["a", "Ġ", "Ġb", "ĊĊ", "Ġc"]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
        ("é 😀", ["Ã©", "ĠðŁĺ", "Ģ"]),
    ],
)
def test_text_is_cut_into_known_tokens(tokenizer: Tokenizer, text: str, tokens: list[str]) -> None:
    assert tokenizer.encode(text).tokens == tokens


@pytest.mark.parametrize("text", [*TEXTS, "\x00\x1f\u200d\ufeff", "🇳🇱" * 20, " " * 50, "\n" * 9])
def test_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_manifest_says_what_the_cluster_needs(smollm2_dir: Path) -> None:
    manifest = read_manifest(smollm2_dir)
    assert (manifest.name, manifest.family, manifest.context_length) == ("smollm2", "llama", 8192)
    assert (manifest.num_layers, manifest.num_kv_heads, manifest.head_dim) == (30, 3, 64)
    assert (manifest.vocab_size, manifest.eos_token_ids) == (49_152, (2,))
    assert manifest.bos_token_id is None
    settings = json.loads((smollm2_dir / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in settings["chat_template"]


def test_the_cached_model_is_found_at_once(smollm2_dir: Path) -> None:
    times = []
    for _ in range(5):
        started = time.monotonic()
        assert catalog.resolve("smollm2") == smollm2_dir
        times.append(time.monotonic() - started)
    assert min(times) < 0.05


def test_the_cached_model_loads_in_half_a_second(smollm2_dir: Path) -> None:
    """CPU time of the best of several loads: on an idle machine that is no less than wall time."""
    times = []
    for _ in range(6):
        started = time.process_time()
        load_model(smollm2_dir)
        times.append(time.process_time() - started)
    assert min(times) < 0.5
