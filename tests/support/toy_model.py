"""A tiny random model in a resolved directory, made in milliseconds, for fast tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.models.resolved import build_manifest, write_manifest
from services.models.safetensors_file import TensorSpec, write_float32

TOY_CONTEXT = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOY_EOS_ID = 2  # <|im_end|>

# Enough merges that common words are not one token per byte; the order is the rank.
_MERGES = (
    "Ġ t", "h e", "Ġ a", "i n", "Ġt he", "e r", "o n", "r e", "Ġ s", "a t", "e n", "o r", "Ġ w",
    "i s", "Ġ o", "n d", "i t", "e s", "Ġ c", "Ġa nd", "in g", "o u", "Ġ b", "Ġo f", "l l", "e d",
    "Ġ f", "Ġ p", "a n", "Ġt o", "a l", "Ġ in", "a r", "Ġ m", "Ġ h", "Ġ d", "l e", "o w", "s t",
    "h i", "Ġ l",
)  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_toy_model(
    model_dir: Path,
    family: str = "llama",
    seed: int = 0,
    num_layers: int = 2,
    hidden: int = 64,
    *,
    tie_word_embeddings: bool = False,
    context: int = TOY_CONTEXT,
) -> Path:
    """Write a random model of `family` (llama, mistral, qwen2, qwen3) and return its directory.

    Equal arguments give equal files, hence equal digests. Weights are scaled so that greedy
    output wanders through the vocabulary instead of repeating one token.
    """
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = toy_tokenizer()
    tokenizer.save(str(model_dir / "tokenizer.json"))
    config = _config(family, num_layers, hidden, tokenizer.get_vocab_size(), context)
    config["tie_word_embeddings"] = tie_word_embeddings
    (model_dir / "config.json").write_text(json.dumps(config))
    (model_dir / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": None,
                "eos_token": "<|im_end|>",
                "chat_template": CHAT_TEMPLATE,
                "model_max_length": context,
            }
        )
    )
    specs = list(_specs(config, family))
    write_float32(model_dir / "model.safetensors", specs, _weights(specs, seed))
    name = f"toy-{family}"
    write_manifest(model_dir, build_manifest(model_dir, name=name, source="toy"))
    return model_dir


def toy_tokenizer() -> Tokenizer:
    """Byte-level BPE: 3 special tokens, 256 bytes, a few merges."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [merge.replace(" ", "") for merge in _MERGES]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(left, right) for left, right in (merge.split(" ") for merge in _MERGES)],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def _config(
    family: str, num_layers: int, hidden: int, vocab_size: int, context: int
) -> dict[str, object]:
    num_heads = 4
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 2,
        "head_dim": hidden // num_heads,
        "intermediate_size": 2 * hidden,
        "vocab_size": vocab_size,
        "max_position_embeddings": context,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": TOY_EOS_ID,
        "bos_token_id": None,
    }


def _specs(config: dict[str, object], family: str) -> Iterator[TensorSpec]:
    def size(name: str) -> int:
        value = config[name]
        assert isinstance(value, int)
        return value

    hidden, inter = size("hidden_size"), size("intermediate_size")
    head_dim = size("head_dim")
    q_size = size("num_attention_heads") * head_dim
    kv_size = size("num_key_value_heads") * head_dim
    yield TensorSpec("model.embed_tokens.weight", (size("vocab_size"), hidden))
    for i in range(size("num_hidden_layers")):
        layer = f"model.layers.{i}."
        for part, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            yield TensorSpec(f"{layer}self_attn.{part}_proj.weight", (rows, hidden))
            if family == "qwen2":
                yield TensorSpec(f"{layer}self_attn.{part}_proj.bias", (rows,))
        if family == "qwen3":
            yield TensorSpec(f"{layer}self_attn.q_norm.weight", (head_dim,))
            yield TensorSpec(f"{layer}self_attn.k_norm.weight", (head_dim,))
        yield TensorSpec(f"{layer}self_attn.o_proj.weight", (hidden, q_size))
        yield TensorSpec(f"{layer}mlp.gate_proj.weight", (inter, hidden))
        yield TensorSpec(f"{layer}mlp.up_proj.weight", (inter, hidden))
        yield TensorSpec(f"{layer}mlp.down_proj.weight", (hidden, inter))
        yield TensorSpec(f"{layer}input_layernorm.weight", (hidden,))
        yield TensorSpec(f"{layer}post_attention_layernorm.weight", (hidden,))
    yield TensorSpec("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield TensorSpec("lm_head.weight", (size("vocab_size"), hidden))


def _weights(specs: list[TensorSpec], seed: int) -> Iterator[NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    for spec in specs:
        draw = rng.standard_normal(spec.shape, dtype=np.float32)
        if spec.name.endswith("norm.weight"):
            yield 1.0 + np.float32(0.1) * draw
        elif len(spec.shape) == 1 or "embed_tokens" in spec.name:
            yield draw
        else:
            yield draw * np.float32(1.5 / np.sqrt(spec.shape[-1]))
