"""A model over a pool of its own, a batch of sequences of equal length: prefill, round KV, go on.

Smaller than an engine, so that the logits of every step can be seen and the KV between prefill
and decode be changed as a link would change it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.kv.convert import round_trip
from services.kv.layout import KvLayout
from services.models.base import Model, StepBatch

_CHUNK = 128  # tokens of each sequence in one step

Tokens = npt.NDArray[np.int64]  # [num_seqs, num_tokens]
Logits = npt.NDArray[np.float32]  # [num_seqs, vocab_size]


class Sequences:
    """KV of `num_seqs` sequences with room for `max_tokens` each."""

    def __init__(self, model: Model, num_seqs: int, max_tokens: int) -> None:
        config = model.config
        dtype = str(model.dtype).removeprefix("torch.")
        self.layout = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
        self._model = model
        self.num_seqs = num_seqs
        self._width = self.layout.blocks_for(max_tokens)
        num_blocks = num_seqs * self._width
        self._bytes = np.zeros((num_blocks, self.layout.block_bytes), np.uint8)
        shape = (num_blocks, *self.layout.block_shape)
        self._pool = torch.from_numpy(self._bytes).view(model.dtype).view(shape)
        tables = torch.arange(num_blocks, dtype=torch.int32).view(num_seqs, self._width)
        self._tables = tables
        self.length = 0

    def feed(self, tokens: Tokens) -> Logits:
        """Compute tokens after those before; return the logits after the last."""
        logits = np.empty(0, np.float32)
        for start in range(0, tokens.shape[1], _CHUNK):
            logits = self._step(tokens[:, start : start + _CHUNK])
        return logits

    def round(self, dtypes: tuple[str, ...]) -> None:
        """Do to the KV so far what a link through these dtypes does."""
        for seq in range(self.num_seqs):
            first = seq * self._width
            for block in range(first, first + self.layout.blocks_for(self.length)):
                self._bytes[block] = round_trip(self.layout, self._bytes[block], dtypes)

    def state(self) -> npt.NDArray[np.uint8]:
        """Return a copy of the KV, to come back to."""
        return self._bytes.copy()

    def restore(self, state: npt.NDArray[np.uint8], length: int) -> None:
        """Go back to a state."""
        self._bytes[:] = state
        self.length = length

    def _step(self, tokens: Tokens) -> Logits:
        count = tokens.shape[1]
        positions = np.arange(self.length, self.length + count)
        size = self.layout.block_size
        first_slots = np.arange(self.num_seqs)[:, None] * self._width * size
        starts = np.arange(self.num_seqs + 1) * count
        self.length += count
        batch = StepBatch(
            token_ids=_tensor(tokens.reshape(-1)),
            positions=_tensor(np.tile(positions, self.num_seqs)),
            slot_mapping=_tensor((first_slots + positions).reshape(-1)),
            block_tables=self._tables,
            query_starts=_tensor(starts.astype(np.int32)),
            context_lens=torch.full((self.num_seqs,), self.length, dtype=torch.int32),
            logit_rows=_tensor(starts[1:] - 1),
        )
        with torch.inference_mode():
            logits: Logits = self._model.forward(batch, self._pool).numpy()
        return logits


def _tensor(values: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
