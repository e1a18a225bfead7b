"""Geometry of a decoder-only model, read from a Hugging Face config.json; needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import ModelFileError

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# Caps far above any real model: a config.json is input, and sizes derived from it are allocated.
_MAX_HIDDEN = 1 << 16
_MAX_LAYERS = 1 << 10
_MAX_HEADS = 1 << 10
_MAX_HEAD_DIM = 1 << 10
_MAX_INTERMEDIATE = 1 << 20
_MAX_VOCAB = 1 << 21
_MAX_POSITIONS = 1 << 24
_MAX_EOS_IDS = 64

_ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched: `linear` or `llama3`."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0  # llama3 only, as are the next two
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and constants of one model; every field was checked against caps."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool  # bias on q, k and v
    output_bias: bool  # bias on the attention's output projection
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def q_size(self) -> int:
        """Columns of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def rope(self) -> str:
        """Rope configuration as canonical JSON: equal strings mean equal rotations."""
        fields: dict[str, object] = {"kind": "default", "theta": self.rope_theta}
        scaling = self.rope_scaling
        if scaling is not None:
            fields |= {"kind": scaling.kind, "factor": scaling.factor}
        if scaling is not None and scaling.kind == "llama3":
            fields |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original": scaling.original_max_position_embeddings,
            }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json; refuse by name whatever would change the numbers and is not built."""
        family = _family(raw)
        _refuse_unsupported(raw)
        hidden_size = _int(raw, "hidden_size", _MAX_HIDDEN)
        num_heads = _int(raw, "num_attention_heads", _MAX_HEADS)
        num_kv_heads = _int(raw, "num_key_value_heads", _MAX_HEADS, default=num_heads)
        if num_heads % num_kv_heads:
            raise _bad("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} heads")
        head_dim = _head_dim(raw, hidden_size, num_heads)
        vocab_size = _int(raw, "vocab_size", _MAX_VOCAB)
        bias = _bool(raw, "attention_bias", False) and family != "mistral"
        theta, scaling = _rope(raw)
        return cls(
            family=family,
            hidden_size=hidden_size,
            num_layers=_int(raw, "num_hidden_layers", _MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=_int(raw, "intermediate_size", _MAX_INTERMEDIATE),
            vocab_size=vocab_size,
            max_position_embeddings=_positions(raw, family),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=_float(raw, "rms_norm_eps", low=0.0, high=0.1, default=1e-6),
            tie_word_embeddings=_bool(raw, "tie_word_embeddings", False),
            attention_bias=bias or family == "qwen2",
            output_bias=bias and family != "qwen2",
            qk_norm=family == "qwen3",
            eos_token_ids=_token_ids(raw, "eos_token_id", vocab_size),
            bos_token_id=next(iter(_token_ids(raw, "bos_token_id", vocab_size)), None),
        )


def _bad(name: str, why: str) -> ModelFileError:
    return ModelFileError(f"config.json: {name}: {why}")


def _family(raw: Mapping[str, Any]) -> str:
    family = raw.get("model_type")
    if family not in SUPPORTED_FAMILIES:
        known = ", ".join(SUPPORTED_FAMILIES)
        raise _bad("model_type", f"{str(family)[:64]!r} is not supported; supported: {known}")
    return str(family)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config"):
        raise _bad("quantization_config", "quantised checkpoints are not supported")
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise _bad("hidden_act", f"{str(act)[:64]!r} is not supported, only silu")
    if raw.get("mlp_bias"):
        raise _bad("mlp_bias", "biases in the MLP are not supported")
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise _bad("partial_rotary_factor", "partial rotary embeddings are not supported")


def _int(raw: Mapping[str, Any], name: str, cap: int, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        raise _bad(name, "missing or not an integer")
    if not 1 <= value <= cap:
        raise _bad(name, f"{value} is outside 1..{cap}")
    return value


def _float(
    raw: Mapping[str, Any], name: str, *, low: float, high: float, default: float | None = None
) -> float:
    """Read a finite number in the open-closed range (low, high]."""
    value = raw.get(name)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _bad(name, "missing or not a number")
    if not (math.isfinite(value) and low < value <= high):
        raise _bad(name, f"{value} is outside ({low}, {high}]")
    return float(value)


def _bool(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _bad(name, "not true or false")
    return value


def _head_dim(raw: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise _bad("head_dim", f"missing, and {num_heads} heads do not divide {hidden_size}")
    head_dim = _int(raw, "head_dim", _MAX_HEAD_DIM, default=hidden_size // num_heads)
    if head_dim % 2:
        raise _bad("head_dim", f"{head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def _positions(raw: Mapping[str, Any], family: str) -> int:
    """Trained context, cut to the sliding window if there is one.

    Attention here always sees the whole context; up to the window's length that is the same.
    """
    positions = _int(raw, "max_position_embeddings", _MAX_POSITIONS)
    layer_types = raw.get("layer_types")
    is_on = _bool(raw, "use_sliding_window", not family.startswith("qwen"))
    windowed = is_on and raw.get("sliding_window") is not None
    if isinstance(layer_types, list) and layer_types:
        unknown = sorted(
            {str(t)[:64] for t in layer_types} - {"full_attention", "sliding_attention"}
        )
        if unknown:
            raise _bad("layer_types", f"{unknown[0]!r} is not supported")
        windowed = windowed and "sliding_attention" in layer_types
    if windowed:
        positions = min(positions, _int(raw, "sliding_window", _MAX_POSITIONS))
    return positions


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`."""
    params = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(params, Mapping):
        raise _bad("rope_scaling", "not an object")
    source = params if params.get("rope_theta") is not None else raw
    theta = _float(source, "rope_theta", low=0.0, high=1e12, default=10_000.0)
    if params.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise _bad("partial_rotary_factor", "partial rotary embeddings are not supported")
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in _ROPE_KINDS:
        known = ", ".join(_ROPE_KINDS)
        raise _bad("rope_scaling", f"{str(kind)[:64]!r} is not supported; supported: {known}")
    if kind == "default":
        return theta, None
    factor = _float(params, "factor", low=0.0, high=1e6)
    if kind == "linear":
        return theta, RopeScaling(kind, factor)
    low = _float(params, "low_freq_factor", low=0.0, high=1e6)
    high = _float(params, "high_freq_factor", low=0.0, high=1e6)
    if high <= low:
        raise _bad("rope_scaling", f"high_freq_factor {high} is not above low_freq_factor {low}")
    original = _int(params, "original_max_position_embeddings", _MAX_POSITIONS)
    return theta, RopeScaling(kind, factor, low, high, original)


def _token_ids(raw: Mapping[str, Any], name: str, vocab_size: int) -> tuple[int, ...]:
    """Read an id, a list of ids or nothing; the ids in order, each once."""
    value = raw.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > _MAX_EOS_IDS:
        raise _bad(name, f"more than {_MAX_EOS_IDS} ids")
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise _bad(name, "not an integer")
        if not 0 <= token_id < vocab_size:
            raise _bad(name, f"{token_id} is outside the vocabulary of {vocab_size}")
    return tuple(dict.fromkeys(ids))
