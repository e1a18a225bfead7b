"""Executes step plans: builds the batch, runs the model, draws tokens. Holds the KV pool tensor."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from services.common.ids import BlockId
from services.engine.plan import PlanRow, RowResult, Sampled, StepPlan, StepResult
from services.engine.sampler import BadLogits, is_plain_greedy, sample
from services.kv.attached import AttachedKv
from services.kv.digest import block_digests
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.models.base import Model, StepBatch
from services.telemetry.logs import get_logger

log = get_logger(__name__)

_MAX_FAILED_STEPS = 3  # steps in a row in which every row failed: then it is not the requests


class EngineFault(Exception):
    """Nothing can be computed any more; no single request is to blame."""


class KvStore:
    """The pool as the model sees it, and the bytes of its blocks (residency.BlockContent).

    On a CPU the tensor is the pool memory itself. Elsewhere the memory on the host is a mirror
    through which blocks leave and arrive: only sealed, frozen and received blocks are in it.
    """

    def __init__(self, memory: KvPoolMemory, device: torch.device) -> None:
        self._memory = memory
        self._layout = memory.layout
        shape = (memory.num_blocks, *memory.layout.block_shape)
        dtype: torch.dtype = getattr(torch, memory.layout.kv_dtype)
        self._host = torch.from_numpy(memory.blocks).view(dtype).view(shape)
        self._is_mirrored = device.type != "cpu"
        # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], as models want it
        self.kv_pool = (
            torch.zeros_like(self._host, device=device) if self._is_mirrored else self._host
        )
        # Peers' pools as tensors; one stays mapped only while a link or a request knows it too.
        self._attached: WeakKeyDictionary[KvPoolMemory, Tensor] = WeakKeyDictionary()

    @property
    def layout(self) -> KvLayout:
        """Geometry of the pool."""
        return self._layout

    def seal(self, block_id: BlockId) -> None:
        """Store the digests of a full block."""
        self.freeze(block_id)
        block = self._memory.blocks[block_id]
        self._memory.digests[block_id] = block_digests(self._layout, block)

    def freeze(self, block_id: BlockId) -> None:
        """Bring a block's bytes to where the sender reads them."""
        if self._is_mirrored:
            self._host[block_id].copy_(self.kv_pool[block_id])

    def copy(self, src: BlockId, dst: BlockId) -> None:
        """Copy a block."""
        self.kv_pool[dst].copy_(self.kv_pool[src])

    def fetch(self, block_ids: Sequence[BlockId]) -> None:
        """Bring received blocks to where the model reads them."""
        if self._is_mirrored:
            for block_id in block_ids:
                self.kv_pool[block_id].copy_(self._host[block_id])

    def copy_home(self, kv: AttachedKv, at: int, dst: BlockId, *, verify: bool) -> bool:
        """Copy an attached block into ours."""
        return kv.copy_home(at, self._memory, dst, verify=verify)

    def more_pools(self, rows: Sequence[PlanRow]) -> tuple[Tensor | None, ...]:
        """Return the peers' pools these rows read, by number; none in most steps."""
        pools: list[Tensor | None] = []
        for row in rows:
            if row.attached is None:
                continue
            kv = row.attached.kv
            pools += [None] * (kv.pool_id - len(pools))
            pools[kv.pool_id - 1] = self._tensor_of(kv)
        return tuple(pools)

    def _tensor_of(self, kv: AttachedKv) -> Tensor:
        held = self._attached.get(kv.pool)
        if held is not None:
            return held
        if self._is_mirrored:
            raise ValueError("a pool on a device cannot be read beside one on the host")
        tensor = _read_only_view(kv.pool)
        self._attached[kv.pool] = tensor
        return tensor


def _read_only_view(memory: KvPoolMemory) -> Tensor:
    """View a peer's pool as a tensor; it is mapped read-only, and a write would fault."""
    dtype: torch.dtype = getattr(torch, memory.layout.kv_dtype)
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so; nothing here writes to a peer's pool.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        raw = torch.from_numpy(memory.blocks)
    return raw.view(dtype).view((memory.num_blocks, *memory.layout.block_shape))


class Runner:
    """Runs one model over one pool; used by the engine thread only."""

    def __init__(self, model: Model, store: KvStore, eos_token_ids: tuple[int, ...]) -> None:
        self._model = model
        self._store = store
        self._eos_token_ids = eos_token_ids
        self._num_failed_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. A row that fails alone fails alone.

        Raises:
            EngineFault: several steps in a row gave nothing at all.
        """
        started = time.perf_counter()
        with torch.inference_mode():
            rows = self._run(plan.rows)
        if all(row.error is not None for row in rows):
            self._num_failed_steps += 1
            if self._num_failed_steps >= _MAX_FAILED_STEPS:
                raise EngineFault(f"{_MAX_FAILED_STEPS} steps in a row failed altogether")
        else:
            self._num_failed_steps = 0
        return StepResult(rows, time.perf_counter() - started)

    def _run(self, rows: Sequence[PlanRow]) -> tuple[RowResult, ...]:
        try:
            logits = self._model.forward(self._batch(rows), self._store.kv_pool)
            return _drop_stale(rows, self._sample_all(rows, logits))
        except Exception:  # the outermost guard of a step: model code may raise anything
            log.exception("engine.step_failed", rows=len(rows))
            if len(rows) == 1:
                return (RowResult(error="the model could not compute this request"),)
        # KV writes of a row are the same when repeated, so the others lose nothing but time.
        return tuple(result for row in rows for result in self._run((row,)))

    def _batch(self, rows: Sequence[PlanRow]) -> StepBatch:
        device = self._model.device
        lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int32)
        starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        width = max(len(row.block_ids) for row in rows)
        tables = np.full((len(rows), width), -1, dtype=np.int32)
        for idx, row in enumerate(rows):
            tables[idx, : len(row.block_ids)] = row.block_ids
        positions = [np.arange(row.start, row.start + len(row.token_ids)) for row in rows]
        contexts = np.array([row.start + len(row.token_ids) for row in rows], dtype=np.int32)
        last = np.array([starts[i + 1] - 1 for i, row in enumerate(rows) if row.tasks], np.int64)
        token_ids = np.concatenate([row.token_ids for row in rows]).astype(np.int64)
        return StepBatch(
            token_ids=_tensor(token_ids, device),
            positions=_tensor(np.concatenate(positions), device),
            slot_mapping=_tensor(np.concatenate([row.slots for row in rows]), device),
            block_tables=_tensor(tables, device),
            query_starts=_tensor(starts, device),
            context_lens=_tensor(contexts, device),
            logit_rows=_tensor(last, device),
            more_pools=self._store.more_pools(rows),
        )

    def _sample_all(self, rows: Sequence[PlanRow], logits: Tensor) -> tuple[RowResult, ...]:
        # logits: [num rows with tasks, vocab_size]
        best = self._argmax(logits)
        host = None
        results: list[RowResult] = []
        idx = 0
        for row in rows:
            if not row.tasks:
                results.append(RowResult())
                continue
            token_id = best[idx]
            if token_id is not None and self._is_plain_greedy(row):
                results.append(RowResult((Sampled(token_id),) * len(row.tasks)))
            else:
                host = logits.cpu().numpy() if host is None else host
                results.append(self._sample_row(row, host[idx]))
            idx += 1
        return tuple(results)

    def _argmax(self, logits: Tensor) -> list[int | None]:
        """Lowest id of the highest logit per row; None where that is not finite."""
        if not len(logits):
            return []
        if logits.device.type == "cpu":  # numpy's search is ten times as fast as torch's
            values = logits.numpy()
            ids = values.argmax(axis=1)
            highest = values[np.arange(len(ids)), ids]
            is_good = np.isfinite(highest).tolist()
        else:
            best = logits.argmax(dim=-1)
            is_good = logits.gather(1, best.unsqueeze(1)).squeeze(1).isfinite().tolist()
            ids = best.cpu().numpy()
        return [
            token_id if good else None for token_id, good in zip(ids.tolist(), is_good, strict=True)
        ]

    def _is_plain_greedy(self, row: PlanRow) -> bool:
        return all(is_plain_greedy(task, self._eos_token_ids) for task in row.tasks)

    def _sample_row(
        self, row: PlanRow, logits: np.ndarray[tuple[int], np.dtype[np.float32]]
    ) -> RowResult:
        try:
            samples = tuple(sample(logits, task, self._eos_token_ids) for task in row.tasks)
            return RowResult(samples)
        except BadLogits as error:
            return RowResult(error=str(error))


def _drop_stale(rows: Sequence[PlanRow], results: tuple[RowResult, ...]) -> tuple[RowResult, ...]:
    """Throw away what was computed from blocks of a peer that have changed meanwhile.

    A writer changes a block's generation before its content: if the generation still is what it
    was, so was the content for as long as this step read it.
    """
    if all(row.attached is None for row in rows):
        return results
    return tuple(
        RowResult(is_stale=True) if row.attached and not row.attached.is_current() else result
        for row, result in zip(rows, results, strict=True)
    )


def _tensor(
    array: np.ndarray[tuple[int, ...], np.dtype[np.int64 | np.int32]], device: torch.device
) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
