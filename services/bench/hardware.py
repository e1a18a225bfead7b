"""What this machine can do at best, measured: reading memory and multiplying matrices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

from services.models.config import ModelConfig
from services.models.tensors import expected_tensors

READ_BYTES = 256 << 20  # far above any cache
FLOAT_BYTES = 4
REPEATS = 5


class Hardware:
    """References with the threads torch is set to use; every call measures anew."""

    def __init__(self, config: ModelConfig) -> None:
        self._memory = torch.ones(READ_BYTES // FLOAT_BYTES)
        generator = torch.Generator().manual_seed(0)
        rows = 2 * config.intermediate_size
        # The widest projection of the model: the shape that is easiest to multiply fast.
        self._weight = torch.randn(rows, config.hidden_size, generator=generator)
        self._x = torch.randn(512, config.hidden_size, generator=generator)

    def read_gb_s(self) -> float:
        """Bandwidth of summing memory that is in no cache."""
        return READ_BYTES / _median_s(self._memory.sum) / 1e9

    def matmul_gflop_s(self) -> float:
        """Rate of torch's float32 product of 512 tokens and one projection."""
        flop = 2.0 * self._weight.numel() * len(self._x)
        return flop / _median_s(lambda: linear(self._x, self._weight)) / 1e9


def _median_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of float32 weights that a decode step reads: all of them but single embeddings."""
    total = 0
    for name, shape in expected_tensors(config).items():
        is_table = name == "model.embed_tokens.weight" and not config.tie_word_embeddings
        total += 0 if is_table else FLOAT_BYTES * torch.Size(shape).numel()
    return total


def flop_per_token(config: ModelConfig, *, with_head: bool) -> float:
    """Operations of one token in the projections; attention over the context is left out."""
    head = FLOAT_BYTES * config.vocab_size * config.hidden_size
    return 2.0 * (weight_bytes(config) - (0 if with_head else head)) / FLOAT_BYTES
