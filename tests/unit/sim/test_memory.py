from __future__ import annotations

import pytest

from services.models.config import ModelConfig
from services.sim.memory import WorkerShape, worker_memory

SMALL = ModelConfig.from_hf(
    {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "num_hidden_layers": 3,
        "intermediate_size": 128, "max_position_embeddings": 512, "tie_word_embeddings": False,
    }
)  # fmt: skip
# Llama 3.1 8B as published: 8.03 billion weights.
LLAMA_8B = ModelConfig.from_hf(
    {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "num_hidden_layers": 32,
        "intermediate_size": 14336, "max_position_embeddings": 131072,
    }
)  # fmt: skip
MATRICES = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
REST = 2 * 100 * 64 + 7 * 64  # embedding, head, norms


def test_weights_are_counted_tensor_by_tensor() -> None:
    wide, narrow = (worker_memory(SMALL, WorkerShape(weights=w)) for w in ("float32", "bfloat16"))
    assert wide.num_weights == MATRICES + REST
    assert wide.weights_bytes == 4 * wide.num_weights
    assert narrow.weights_bytes == 2 * wide.num_weights


def test_a_known_model_has_its_published_size() -> None:
    memory = worker_memory(LLAMA_8B, WorkerShape())
    assert memory.num_weights == 8_030_261_248
    assert memory.block_bytes == 16 * 2 * 32 * 8 * 128 * 2  # 2 MiB for 16 tokens


@pytest.mark.parametrize(("weights", "bits"), [("int8", 8), ("int4", 4)])
def test_quantised_matrices_bring_their_scales_and_the_rest_stays_wide(
    weights: str, bits: int
) -> None:
    memory = worker_memory(SMALL, WorkerShape(weights=weights))
    assert memory.weights_bytes == MATRICES * (bits + 16 / 128) / 8 + REST * 2


def test_kv_takes_what_the_rest_leaves() -> None:
    memory = worker_memory(LLAMA_8B, WorkerShape())
    blocks = memory.blocks_in(80 << 30)
    assert memory.total_bytes(blocks) <= 80 << 30 < memory.total_bytes(blocks + 1)
    assert memory.blocks_in(8 << 30) == 0
    halved = worker_memory(LLAMA_8B, WorkerShape(kv_dtype="int8")).blocks_in(80 << 30)
    assert 1.9 * blocks < halved < 2 * blocks  # less their scales


def test_a_longer_step_needs_more_for_its_activations() -> None:
    short, long = (worker_memory(SMALL, WorkerShape(step_tokens=n)) for n in (100, 200))
    per_token = 2 * (3 * 64 + 2 * 64 + 2 * 32 + 3 * 128)
    assert long.activation_bytes - short.activation_bytes == 100 * per_token


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="int3"):
        worker_memory(SMALL, WorkerShape(weights="int3"))
    with pytest.raises(ValueError, match="float8"):
        worker_memory(SMALL, WorkerShape(kv_dtype="float8"))
