"""What a worker's memory holds, from a model's configuration alone: no weights, no torch. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.kv.layout import KvLayout
from services.models.config import ModelConfig
from services.models.tensors import expected_tensors

# Bits of a weight. Integers are of matrices in groups with a 16-bit scale each; vectors, embedding
# and output head stay 16 bits wide.
_WEIGHT_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}
WEIGHT_TYPES = tuple(_WEIGHT_BITS)
_GROUP_WEIGHTS = 128
_SCALE_BITS = 16
_LOGIT_BYTES = 4
# Interpreter, torch, gRPC and transfer threads of a worker on a CPU, measured.
CPU_OVERHEAD_BYTES = 270 << 20
# Context, workspaces and fragmentation on a GPU. An assumption: no worker has run on one.
GPU_OVERHEAD_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """How a worker would hold a model."""

    weights: str = "bfloat16"  # of WEIGHT_TYPES
    kv_dtype: str = "bfloat16"  # of services.kv.layout.KV_DTYPES
    step_tokens: int = 2048  # computed in one step, at most
    max_num_seqs: int = 256  # of which a step makes a token
    is_cpu: bool = False

    @property
    def overhead_bytes(self) -> int:
        """Memory that is neither model nor KV."""
        return CPU_OVERHEAD_BYTES if self.is_cpu else GPU_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """What a worker's memory holds; KV takes the rest."""

    weights_bytes: int
    activation_bytes: int  # of a full step, at its peak
    overhead_bytes: int
    block_bytes: int  # of KV
    num_weights: int

    @property
    def fixed_bytes(self) -> int:
        """All but KV."""
        return self.weights_bytes + self.activation_bytes + self.overhead_bytes

    def blocks_in(self, memory_bytes: int) -> int:
        """Return how many KV blocks fit beside all the rest; 0 = not even that fits."""
        return max(0, memory_bytes - self.fixed_bytes) // self.block_bytes

    def total_bytes(self, num_blocks: int) -> int:
        """Return what a worker with so many KV blocks needs."""
        return self.fixed_bytes + num_blocks * self.block_bytes


def worker_memory(config: ModelConfig, shape: WorkerShape) -> WorkerMemory:
    """Add up a worker's memory.

    Raises:
        ValueError: a type of weights or KV that is not known.
    """
    if shape.weights not in _WEIGHT_BITS:
        raise ValueError(f"weights {shape.weights!r}: one of {', '.join(WEIGHT_TYPES)}")
    layout = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim, shape.kv_dtype)
    if problem := layout.problem():
        raise ValueError(problem)
    tensors = expected_tensors(config)
    return WorkerMemory(
        weights_bytes=_weights_bytes(config, tensors, shape),
        activation_bytes=_activation_bytes(config, shape),
        overhead_bytes=shape.overhead_bytes,
        block_bytes=layout.block_bytes,
        num_weights=sum(math.prod(size) for size in tensors.values()),
    )


def _weights_bytes(
    config: ModelConfig, tensors: dict[str, tuple[int, ...]], shape: WorkerShape
) -> int:
    bits = sum(
        math.prod(size) * _bits_of(name, size, shape.weights) for name, size in tensors.items()
    )
    if shape.is_cpu and shape.weights == "float32" and config.tie_word_embeddings:
        # The head is packed for its kernel, the embedding stays as it is: no longer one tensor.
        bits += config.vocab_size * config.hidden_size * _WEIGHT_BITS["float32"]
    return math.ceil(bits / 8)


def _bits_of(name: str, size: tuple[int, ...], weights: str) -> float:
    bits = _WEIGHT_BITS[weights]
    if bits >= _SCALE_BITS:
        return bits
    if len(size) < 2 or "embed_tokens" in name or "lm_head" in name:
        return 16
    return bits + _SCALE_BITS / _GROUP_WEIGHTS


def _activation_bytes(config: ModelConfig, shape: WorkerShape) -> int:
    """Count what one layer keeps at once for every token of a step, and the logits after it."""
    itemsize = 4 if shape.weights == "float32" else 2
    attention = 2 * config.q_size + 2 * config.kv_size
    per_token = 3 * config.hidden_size + attention + 3 * config.intermediate_size
    logits = config.vocab_size * (_LOGIT_BYTES + (itemsize if itemsize < _LOGIT_BYTES else 0))
    return shape.step_tokens * per_token * itemsize + shape.max_num_seqs * logits
