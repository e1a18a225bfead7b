"""A model in a few lines whose next token depends on every KV value it reads through block tables.

The "KV" of a token is one number made of the token, its position and all numbers before it, read
back from the pool. One wrong, stale or unwritten block changes (or breaks) everything after it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.common.sampling import SamplingParams
from services.engine.plan import SampleTask
from services.engine.sampler import sample
from services.kv.block_table import MAX_POOL_BLOCKS, POOL_SHIFT
from services.kv.layout import KvLayout
from services.models.base import StepBatch
from services.models.config import ModelConfig

FAKE_VOCAB = 61
FAKE_LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1)
_NONE = np.empty(0, np.float32)
_MODULUS = (1 << 20) - 3  # values are whole numbers that float32 holds exactly


def _value(token_id: int, position: int, before: npt.NDArray[np.int64]) -> int:
    weights = (np.arange(1, len(before) + 1, dtype=np.int64) * 7919) % 1009 + 1
    return int((token_id * 9973 + position * 31 + int(before @ weights)) % _MODULUS)


def fake_values(token_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """KV numbers of a sequence, computed without any pool."""
    values = np.zeros(len(token_ids), dtype=np.int64)
    for position, token_id in enumerate(token_ids.tolist()):
        values[position] = _value(token_id, position, values[:position])
    return values


def fake_logits(value: int) -> npt.NDArray[np.float32]:
    """Logits after a token with this KV number."""
    mixed = (np.arange(1, FAKE_VOCAB + 1, dtype=np.int64) * (value * 2 + 1)) % 65521
    return (mixed * 33791 % 65521 / 8192).astype(np.float32)


def reference_tokens(
    prompt: npt.NDArray[np.uint32],
    params: SamplingParams,
    *,
    choice: int = 0,
    eos_token_ids: tuple[int, ...] = (),
) -> list[int]:
    """What any engine must generate for one choice."""
    return continued_tokens(
        prompt, fake_values(prompt), [], params, choice=choice, eos_token_ids=eos_token_ids
    )


def continued_tokens(
    prompt: npt.NDArray[np.uint32],
    known: npt.NDArray[np.int64],
    generated: list[int],
    params: SamplingParams,
    *,
    choice: int = 0,
    eos_token_ids: tuple[int, ...] = (),
) -> list[int]:
    """What any engine must generate after these tokens, given the KV numbers it has.

    `known` is of the prompt and of all generated tokens but the newest.
    """
    generated, values = list(generated), list(known)
    if generated:
        values.append(_value(generated[-1], len(values), np.array(values, dtype=np.int64)))
    while len(generated) < params.max_tokens:
        task = SampleTask(choice, len(generated), params, prompt, generated)
        token = sample(fake_logits(int(values[-1])), task, eos_token_ids).token_id
        generated.append(token)
        if (token in eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids:
            break
        position = len(values)
        values.append(_value(token, position, np.array(values, dtype=np.int64)))
    return generated


def _cells(pool: Tensor) -> npt.NDArray[np.float32]:
    return pool.numpy()[:, 0, :, 0, :, 0]


def _read(pools: list[npt.NDArray[np.float32] | None], entry: int) -> npt.NDArray[np.float32]:
    pool = pools[entry >> POOL_SHIFT]
    assert pool is not None, "a block of a pool that is not there"
    numbers: npt.NDArray[np.float32] = pool[entry % MAX_POOL_BLOCKS, 1]
    return numbers


class FakeModel:
    """services.models.base.Model over one-number KV. Set `poison` to make a token id raise."""

    def __init__(self, poison: int | None = None) -> None:
        self.poison = poison
        self.num_forwards = 0
        self.batch_sizes: list[int] = []

    @property
    def config(self) -> ModelConfig:
        """Not needed by the engine."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Always the CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Always float32."""
        return torch.float32

    def forward(self, batch: StepBatch, kv_pool: Tensor) -> Tensor:
        """Write each token's number, read all before it, give logits for the rows wanted."""
        self.num_forwards += 1
        tokens = batch.token_ids.tolist()
        if self.poison in tokens:
            raise ValueError("this token breaks the model")
        # Of each pool `[num_blocks, 2, block_size]`; only the first is written.
        pools = [None if p is None else _cells(p) for p in (kv_pool, *batch.more_pools)]
        cells = _cells(kv_pool)
        values: list[int] = []
        starts = batch.query_starts.tolist()
        self.batch_sizes.append(len(starts) - 1)
        for seq, context_len in enumerate(batch.context_lens.tolist()):
            self._run_sequence(batch, pools, seq, (starts[seq], starts[seq + 1]), context_len)
        size = cells.shape[2]
        for row in batch.logit_rows.tolist():
            slot = int(batch.slot_mapping[row])
            values.append(int(cells[slot // size, 1, slot % size]))
        logits = [fake_logits(value) for value in values]
        return torch.from_numpy(np.array(logits, dtype=np.float32).reshape(-1, FAKE_VOCAB))

    def _run_sequence(
        self,
        batch: StepBatch,
        pools: list[npt.NDArray[np.float32] | None],
        seq: int,
        rows: tuple[int, int],
        context_len: int,
    ) -> None:
        cells = pools[0]
        assert cells is not None
        size = cells.shape[2]
        table = batch.block_tables[seq].numpy()
        first = context_len - (rows[1] - rows[0])
        assert batch.positions[rows[0] : rows[1]].tolist() == list(range(first, context_len))
        for row, position in zip(range(*rows), range(first, context_len), strict=True):
            slot = int(batch.slot_mapping[row])
            assert slot == table[position // size] * size + position % size
            blocks = table[: -(-position // size)]
            assert (blocks >= 0).all()
            before = np.concatenate([_NONE, *(_read(pools, b) for b in blocks.tolist())])[:position]
            assert not np.isnan(before).any(), "unwritten memory was read"
            value = _value(int(batch.token_ids[row]), position, before.astype(np.int64))
            cells[slot // size, :, slot % size] = value
