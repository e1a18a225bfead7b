from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

from services.common.errors import ModelFileError
from services.models.gguf_convert import convert_gguf, unpermute
from services.models.gguf_file import GgufFile
from services.models.resolved import read_config
from tests.support.toy_gguf import permute, write_toy_gguf
from tests.support.toy_model import make_toy_model


def convert(tmp_path: Path, family: str = "llama", **options: Any) -> tuple[Path, Path]:
    source = make_toy_model(tmp_path / "source", family)
    write_toy_gguf(tmp_path / "toy.gguf", source, **options)
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "toy.gguf", out)
    return source, out


@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_unpermute_undoes_the_converters_row_order(num_heads: int) -> None:
    rows = np.random.default_rng(0).standard_normal((num_heads * 6, 5)).astype(np.float32)
    np.testing.assert_array_equal(unpermute(permute(rows, num_heads), num_heads), rows)
    np.testing.assert_array_equal(unpermute(permute(rows[:, 0], num_heads), num_heads), rows[:, 0])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_conversion_gives_back_config_and_weights(tmp_path: Path, family: str) -> None:
    source, out = convert(tmp_path, family)
    assert read_config(out) == read_config(source)
    expected = load_file(source / "model.safetensors")
    converted = load_file(out / "model.safetensors")
    assert converted.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(converted[name], array, err_msg=name)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>"
    assert settings["bos_token"] is None
    assert "im_start" in settings["chat_template"]


def test_quantised_matrices_are_dequantised_before_rows_move(tmp_path: Path) -> None:
    qtype = GGMLQuantizationType.Q8_0
    source, out = convert(tmp_path, qtype=qtype)
    name = "model.layers.1.self_attn.q_proj.weight"
    original = load_file(source / "model.safetensors")[name]
    rounded = dequantize(quantize(original, qtype), qtype)
    np.testing.assert_array_equal(load_file(out / "model.safetensors")[name], rounded)


def test_a_file_without_output_matrix_has_tied_embeddings(tmp_path: Path) -> None:
    source = make_toy_model(tmp_path / "source", tie_word_embeddings=True)
    write_toy_gguf(tmp_path / "toy.gguf", source)
    (tmp_path / "out").mkdir()
    convert_gguf(tmp_path / "toy.gguf", tmp_path / "out")
    assert read_config(tmp_path / "out").tie_word_embeddings
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    fields = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    _, out = convert(tmp_path, fields=fields)
    scaling = read_config(out).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("linear", 4.0)


def llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray[Any, Any]:
    """The divisors a converter stores, computed one frequency at a time."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            share = (8192 / wavelength - 1.0) / 3.0
            divisors.append(1.0 / ((1.0 - share) / factor + share))
    return np.array(divisors, dtype=np.float32)


def test_llama3_rope_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    divisors = llama3_divisors(16, 500_000.0, 32.0)
    _, out = convert(
        tmp_path,
        fields={"llama.rope.freq_base": 500_000.0},
        tensors={"rope_freqs.weight": divisors},
    )
    scaling = read_config(out).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("llama3", 32.0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fields": {"general.architecture": "gemma"}}, "gemma"),
        ({"fields": {"llama.expert_count": 8}}, "experts"),
        ({"fields": {"split.count": 3}}, "merge the parts"),
        ({"fields": {"llama.block_count": None}}, "block_count is missing"),
        ({"fields": {"llama.block_count": 3}}, "blk.2.attn_norm.weight is missing"),
        ({"fields": {"llama.block_count": 1}}, "blk.1"),
        ({"fields": {"llama.block_count": 1_000_000}}, "num_hidden_layers"),
        ({"fields": {"llama.embedding_length": 128}}, "shape"),
        ({"fields": {"llama.attention.head_count": 3}}, "num_key_value_heads"),
        ({"fields": {"llama.attention.head_count_kv": 4}}, "shape"),
        ({"fields": {"llama.rope.dimension_count": 8}}, "partial rotary"),
        ({"fields": {"llama.attention.value_length": 8}}, "different sizes"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
        ({"fields": {"tokenizer.ggml.pre": "tekken"}}, "tekken"),
        ({"fields": {"tokenizer.ggml.model": "rwkv"}}, "rwkv"),
        ({"fields": {"tokenizer.ggml.tokens": None}}, "tokens is missing"),
        ({"fields": {"tokenizer.ggml.tokens": ["a", "a"]}}, "twice"),
        ({"fields": {"tokenizer.ggml.merges": ["q q"]}}, "does not fit"),
        ({"fields": {"tokenizer.ggml.token_type": [1, 2]}}, "token types"),
        ({"fields": {"tokenizer.ggml.eos_token_id": 300}}, "eos_token_id"),
        ({"tensors": {"blk.0.attn_qkv.weight": np.ones(4, dtype=np.float32)}}, "attn_qkv"),
        ({"tensors": {"rope_freqs.weight": np.full(8, 3.0, dtype=np.float32)}}, "no supported"),
        ({"tensors": {"rope_freqs.weight": np.zeros(8, dtype=np.float32)}}, "divisors"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ModelFileError, match=why):
        convert(tmp_path, **options)


def test_progress_rises_to_one(tmp_path: Path) -> None:
    write_toy_gguf(tmp_path / "toy.gguf", make_toy_model(tmp_path / "source"))
    (tmp_path / "out").mkdir()
    shares: list[float] = []
    convert_gguf(tmp_path / "toy.gguf", tmp_path / "out", lambda _what, s: shares.append(s))
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_a_full_disk_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1 << 16))
    with pytest.raises(ModelFileError, match="MiB"):
        convert(tmp_path)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_mutants_of_the_metadata_convert_or_are_refused(tmp_path: Path) -> None:
    """Past the parser, the tokenizer library and the dequantiser see hostile values too.

    The class of CVE-2026-53923: what is dequantised must be exactly what the file holds.
    """
    source = make_toy_model(tmp_path / "source", num_layers=1, hidden=32)
    path = write_toy_gguf(tmp_path / "toy.gguf", source)
    raw = path.read_bytes()
    with GgufFile(path) as file:
        num_metadata_bytes = min(tensor.begin for tensor in file.tensors.values())
    rng = random.Random(5)
    outcomes = {"converted": 0, "refused": 0}
    for _ in range(600):
        mutant = bytearray(raw)
        for _ in range(rng.randint(1, 2)):
            value = rng.choice((0, 1, 2, 3, 8, 9, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            mutant[rng.randrange(num_metadata_bytes)] = value
        path.write_bytes(mutant)
        try:
            convert_gguf(path, tmp_path)
            outcomes["converted"] += 1
        except ModelFileError:
            outcomes["refused"] += 1
    assert outcomes["converted"] > 30
    assert outcomes["refused"] > 200
