"""Writes a toy model as a GGUF file, the way llama.cpp's converter lays it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

_LAYER = {
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
_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """Translate a Hugging Face tensor name."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def permute(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Put row i of a head's first half beside row i of its second half."""
    head_rows = rows.shape[0] // num_heads
    order = [
        head * head_rows + half * (head_rows // 2) + i
        for head in range(num_heads)
        for i in range(head_rows // 2)
        for half in (0, 1)
    ]
    return rows[order]


def write_toy_gguf(
    path: Path,
    model_dir: Path,
    *,
    qtype: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str = "gpt-2",
    fields: dict[str, Any] | None = None,
    tensors: dict[str, NDArray[np.float32]] | None = None,
) -> Path:
    """Write `model_dir` (made by make_toy_model) as GGUF; matrices are stored as `qtype`.

    `fields` overrides metadata (None leaves a field out); `tensors` adds tensors.
    """
    config = json.loads((model_dir / "config.json").read_text())
    arch = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**_metadata(model_dir, config, arch, pre), **(fields or {})}.items():
        if value is not None:
            _add(writer, key, value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, array in load_file(model_dir / "model.safetensors").items():
        part = name.split(".")[-2]
        stored = permute(array, heads[part]) if arch == "llama" and part in heads else array
        if stored.ndim == 2 and qtype is not GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), quantize(stored, qtype), raw_dtype=qtype)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored))
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(model_dir: Path, config: dict[str, Any], arch: str, pre: str) -> dict[str, Any]:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    return {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(vocab))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
