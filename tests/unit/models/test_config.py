from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import ModelFileError
from services.models.config import ModelConfig, RopeScaling

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def make(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**BASE, **changes})


def test_defaults_follow_the_format() -> None:
    config = make()
    assert (config.head_dim, config.rope_theta, config.rms_norm_eps) == (16, 10_000.0, 1e-6)
    assert (config.tie_word_embeddings, config.attention_bias, config.qk_norm) == (False,) * 3
    assert config.eos_token_ids == ()
    assert config.bos_token_id is None
    assert (config.q_size, config.kv_size) == (64, 32)


def test_missing_kv_heads_means_one_per_query_head() -> None:
    raw = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
    assert ModelConfig.from_hf(raw).num_kv_heads == 4


@pytest.mark.parametrize(
    ("family", "bias", "expected"),
    [
        ("llama", False, (False, False, False)),
        ("llama", True, (True, True, False)),
        ("mistral", True, (False, False, False)),
        ("qwen2", False, (True, False, False)),
        ("qwen3", False, (False, False, True)),
        ("qwen3", True, (True, True, True)),
    ],
)
def test_biases_and_norms_follow_the_family(
    family: str, bias: bool, expected: tuple[bool, bool, bool]
) -> None:
    config = make(model_type=family, attention_bias=bias)
    assert (config.attention_bias, config.output_bias, config.qk_norm) == expected


def test_eos_may_be_one_id_or_several() -> None:
    assert make(eos_token_id=2).eos_token_ids == (2,)
    assert make(eos_token_id=[5, 2, 5]).eos_token_ids == (5, 2)


def test_both_spellings_of_rope_are_read_alike() -> None:
    old = make(rope_theta=5e5, rope_scaling={**LLAMA3, "type": "llama3"})
    new = make(rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert old.rope == new.rope
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert make(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == RopeScaling(
        "linear", 2.0
    )


def test_rope_string_tells_every_rotation_apart() -> None:
    ropes = {
        make().rope,
        make(rope_theta=1e6).rope,
        make(rope_scaling={"type": "linear", "factor": 2}).rope,
        make(rope_scaling={"type": "linear", "factor": 4}).rope,
        make(rope_scaling=LLAMA3).rope,
        make(rope_scaling={**LLAMA3, "high_freq_factor": 5.0}).rope,
    }
    assert len(ropes) == 6
    assert json.loads(make().rope) == {"kind": "default", "theta": 10_000.0}


def test_context_is_cut_to_a_sliding_window() -> None:
    assert make(model_type="mistral", sliding_window=512).max_position_embeddings == 512
    assert make(model_type="mistral", sliding_window=None).max_position_embeddings == 2048
    qwen = {"model_type": "qwen2", "sliding_window": 512}
    assert make(**qwen).max_position_embeddings == 2048
    assert make(**qwen, use_sliding_window=True).max_position_embeddings == 512
    full = ["full_attention"] * 2
    assert make(**qwen, use_sliding_window=True, layer_types=full).max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe"),
        ({"model_type": None}, "model_type"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "dynamic"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        make(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0},
        {"hidden_size": -64},
        {"hidden_size": 64.0},
        {"hidden_size": True},
        {"hidden_size": "64"},
        {"hidden_size": 1 << 40},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"num_key_value_heads": 8},
        {"head_dim": 15},
        {"head_dim": 1 << 20},
        {"num_attention_heads": 5, "num_key_value_heads": 5},
        {"vocab_size": 1 << 30},
        {"max_position_embeddings": 1 << 40},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1e-6},
        {"rope_theta": float("inf")},
        {"rope_theta": 0},
        {"rope_scaling": "llama3"},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": -1}},
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
        {"eos_token_id": 300},
        {"eos_token_id": -1},
        {"eos_token_id": "2"},
        {"eos_token_id": list(range(100))},
        {"tie_word_embeddings": "yes"},
        {"use_sliding_window": 1},
    ],
)
def test_hostile_values_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json"):
        make(**changes)
