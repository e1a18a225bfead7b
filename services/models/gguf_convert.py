"""Turning a GGUF file into float32 safetensors, config.json and tokenizer files."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.common.errors import ModelFileError
from services.common.progress import Progress, silent
from services.models.config import ModelConfig
from services.models.gguf_file import GgufFile
from services.models.gguf_tokenizer import tokenizer_config, write_tokenizer
from services.models.resolved import (
    CONFIG_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
)
from services.models.safetensors_file import TensorSpec, write_float32
from services.models.tensors import expected_tensors

_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"
# Llama 3 stretched frequencies are stored as divisors; these are the constants behind them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def convert_gguf(path: Path, out_dir: Path, progress: Progress | None = None) -> None:
    """Write the Hugging Face files of `path` into `out_dir`, which must exist."""
    report = progress or silent
    report("reading", 0.0)
    with GgufFile(path) as file:
        raw = hf_config(file)
        config = ModelConfig.from_hf(raw)
        names = _source_names(file, config)
        write_tokenizer(file, out_dir / TOKENIZER_NAME)
        _write_json(out_dir / CONFIG_NAME, raw)
        limit = config.max_position_embeddings
        _write_json(out_dir / TOKENIZER_CONFIG_NAME, tokenizer_config(file, limit))
        specs = [TensorSpec(name, shape) for name, shape in expected_tensors(config).items()]
        _check_space(out_dir, specs)
        arrays = _dequantised(file, config, specs, names, report)
        write_float32(out_dir / WEIGHTS_NAME, specs, arrays)
    report("dequantising", 1.0)


def _check_space(out_dir: Path, specs: list[TensorSpec]) -> None:
    """Refuse before the first byte rather than fill the disk."""
    needed = 4 * sum(math.prod(spec.shape) for spec in specs)
    free = shutil.disk_usage(out_dir).free
    if needed > free:
        raise ModelFileError(
            f"the converted model takes {needed >> 20} MiB, the cache's disk has {free >> 20} MiB"
        )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Translate the metadata into the fields of a config.json."""
    arch = file.text("general.architecture")
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelFileError(f"{file.name}: architecture {arch!r} is not supported ({known} are)")
    if file.integer(f"{arch}.expert_count"):
        raise ModelFileError(f"{file.name}: mixtures of experts are not supported")
    if (file.integer("split.count") or 1) > 1:
        raise ModelFileError(f"{file.name}: one part of a split model; merge the parts first")
    num_heads = _required(file, f"{arch}.attention.head_count")
    hidden = _required(file, f"{arch}.embedding_length")
    head_dim = file.integer(f"{arch}.attention.key_length") or hidden // max(1, num_heads)
    _check_rotary(file, arch, head_dim)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{file.name}: no two-dimensional token_embd.weight")
    config: dict[str, Any] = {
        "model_type": arch,
        "hidden_size": hidden,
        "num_hidden_layers": _required(file, f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.integer(f"{arch}.attention.head_count_kv") or num_heads,
        "head_dim": head_dim,
        "intermediate_size": _required(file, f"{arch}.feed_forward_length"),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": _required(file, f"{arch}.context_length"),
        "rms_norm_eps": file.number(f"{arch}.attention.layer_norm_rms_epsilon") or 1e-6,
        "rope_theta": file.number(f"{arch}.rope.freq_base") or 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": file.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_ids(file),
    }
    scaling = _rope_scaling(file, arch, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _required(file: GgufFile, key: str) -> int:
    value = file.integer(key)
    if value is None:
        raise ModelFileError(f"{file.name}: metadata field {key} is missing")
    return value


def _eos_ids(file: GgufFile) -> list[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [file.integer(f"tokenizer.ggml.{key}") for key in keys]
    return list(dict.fromkeys(i for i in ids if i is not None))


def _check_rotary(file: GgufFile, arch: str, head_dim: int) -> None:
    rotary = file.integer(f"{arch}.rope.dimension_count")
    if rotary is not None and rotary != head_dim:
        raise ModelFileError(
            f"{file.name}: {rotary} of {head_dim} dimensions are rotated; "
            "partial rotary embeddings are not supported"
        )
    if file.integer(f"{arch}.attention.value_length") not in (None, head_dim):
        raise ModelFileError(f"{file.name}: keys and values of different sizes are not supported")


def _rope_scaling(file: GgufFile, arch: str, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = file.text(f"{arch}.rope.scaling.type") or "none"
    has_factors = _ROPE_FREQS in file.tensors
    if kind == "linear" and not has_factors:
        return {"rope_type": "linear", "factor": file.number(f"{arch}.rope.scaling.factor")}
    if kind != "none":
        raise ModelFileError(f"{file.name}: rope scaling {kind!r} is not supported")
    return _llama3_scaling(file, config) if has_factors else None


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Recover the Llama 3 parameters from the stored divisors; refuse divisors they do not give."""
    stored = file.float32(_ROPE_FREQS)
    half = config["head_dim"] // 2
    if stored.shape != (half,) or not (stored >= 1.0).all():
        raise ModelFileError(f"{file.name}: {_ROPE_FREQS} is not a list of {half} divisors")
    factor = float(stored.max())
    plain = config["rope_theta"] ** -(np.arange(half) / half)
    wavelength = 2 * np.pi / plain
    share = (_LLAMA3_ORIGINAL / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    expected = 1.0 / ((1.0 - share) / factor + share).clip(1.0 / factor, 1.0)
    if not np.allclose(stored, expected, rtol=1e-3):
        raise ModelFileError(f"{file.name}: {_ROPE_FREQS} follows no supported scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _source_names(file: GgufFile, config: ModelConfig) -> dict[str, str]:
    """Map every tensor the model needs to its GGUF name; shapes must match, none may be left."""
    names: dict[str, str] = {}
    for name, shape in expected_tensors(config).items():
        source = _gguf_name(name)
        tensor = file.tensors.get(source)
        if tensor is None:
            raise ModelFileError(f"{file.name}: tensor {source} is missing")
        if tensor.shape != shape:
            raise ModelFileError(
                f"{file.name}: tensor {source} has shape {tensor.shape}, the metadata says {shape}"
            )
        names[name] = source
    unknown = sorted(set(file.tensors) - set(names.values()) - {_ROPE_FREQS})
    if unknown:
        raise ModelFileError(f"{file.name}: tensor {unknown[0][:128]!r} is not supported")
    return names


def _gguf_name(name: str) -> str:
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return _GLOBAL_NAMES[name]
    layer, part, kind = match.groups()
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _dequantised(
    file: GgufFile,
    config: ModelConfig,
    specs: list[TensorSpec],
    names: dict[str, str],
    report: Progress,
) -> Iterator[NDArray[np.float32]]:
    for i, spec in enumerate(specs):
        report("dequantising", i / len(specs))
        array = file.float32(names[spec.name])
        if config.family == "llama" and ".q_proj." in spec.name:
            array = unpermute(array, config.num_heads)
        elif config.family == "llama" and ".k_proj." in spec.name:
            array = unpermute(array, config.num_kv_heads)
        yield array


def unpermute(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order: pairs (i, i + half) of a head stand side by side in the file."""
    halves = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))
