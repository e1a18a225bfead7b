"""Names and shapes of the tensors a model must have, in Hugging Face naming."""

from __future__ import annotations

from collections.abc import Iterator

from services.models.config import ModelConfig


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map every tensor the model reads to its shape, in the order of computation."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
    }
    for layer in range(config.num_layers):
        shapes.update(_layer(config, f"model.layers.{layer}."))
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _layer(config: ModelConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inter = config.hidden_size, config.intermediate_size
    attn, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    yield f"{prefix}input_layernorm.weight", (hidden,)
    for part, rows in (("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size)):
        yield f"{attn}{part}_proj.weight", (rows, hidden)
        if config.attention_bias:
            yield f"{attn}{part}_proj.bias", (rows,)
    if config.qk_norm:
        yield f"{attn}q_norm.weight", (config.head_dim,)
        yield f"{attn}k_norm.weight", (config.head_dim,)
    yield f"{attn}o_proj.weight", (hidden, config.q_size)
    if config.output_bias:
        yield f"{attn}o_proj.bias", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield f"{mlp}gate_proj.weight", (inter, hidden)
    yield f"{mlp}up_proj.weight", (inter, hidden)
    yield f"{mlp}down_proj.weight", (hidden, inter)
