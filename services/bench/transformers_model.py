"""Hugging Face transformers on the same weights, threads and dtype: a reference if installed."""

from __future__ import annotations

import importlib.util
import inspect
import time
from pathlib import Path
from typing import Any

import torch


def is_installed() -> bool:
    """Say whether the package is there; it is no dependency of ours at run time."""
    return importlib.util.find_spec("transformers") is not None


class TransformersModel:
    """Greedy decoding with a KV cache, as its `generate` does, without its bookkeeping."""

    def __init__(self, model_dir: Path, *, seed: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        quiet: Any = logging  # its functions are untyped
        quiet.disable_progress_bar()
        # Any: transformers has no types we could check.
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        # The argument's name depends on the version.
        takes = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in takes else "past_key_values"
        self._vocab = int(self._model.config.vocab_size)
        self._generator = torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def prefill_tok_s(self, num_tokens: int) -> float:
        """Rate of one forward pass over a random prompt, logits of the last token only."""
        started = time.perf_counter()
        self._prefill(num_tokens)
        return num_tokens / (time.perf_counter() - started)

    @torch.inference_mode()
    def decode_tok_s(self, num_seqs: int, context: int, num_steps: int, warm_up: int = 2) -> float:
        """Rate of decode steps of `num_seqs` sequences that have a copy each of one context."""
        output = self._prefill(context)
        cache = output.past_key_values
        cache.batch_repeat_interleave(num_seqs)
        token_ids = output.logits[:, -1].argmax(-1, keepdim=True).repeat(num_seqs, 1)
        started = time.perf_counter()
        for step in range(warm_up + num_steps):
            if step == warm_up:
                started = time.perf_counter()
            output = self._model(token_ids, use_cache=True, **{self._cache_name: cache})
            token_ids = output.logits[:, -1].argmax(-1, keepdim=True)
        return num_seqs * num_steps / (time.perf_counter() - started)

    def _prefill(self, num_tokens: int) -> Any:
        token_ids = torch.randint(0, self._vocab, (1, num_tokens), generator=self._generator)
        return self._model(token_ids, use_cache=True, logits_to_keep=1)
