"""The engine of a worker without its thread and without a cluster: every turn can be timed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from services.bench.result import BenchFailed
from services.common.config import WorkerSettings
from services.common.ids import BlockId
from services.common.model_manifest import read_manifest
from services.common.sampling import SamplingParams
from services.engine.api import (
    BlocksReserved,
    BlocksSealed,
    ChoiceDone,
    EngineEvent,
    EngineRequest,
    FirstToken,
    PrefillFinished,
    Refused,
    RequestKey,
    TokensOut,
    WorkKind,
)
from services.engine.config import EngineConfig
from services.engine.plan import StepPlan
from services.engine.runner import KvStore, Runner
from services.engine.scheduler import Scheduler
from services.kv.block_pool import BlockPool
from services.kv.hashing import HashScope, chain_hashes
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.models.base import Model, StepBatch
from services.models.config import ModelConfig

NEVER = 1e12  # deadline of work that may take as long as it takes


class EngineMisbehaved(BenchFailed):
    """The engine refused or ended work of the benchmark; a figure would mean nothing."""


@dataclass(slots=True)
class Spent:
    """Seconds of some turns, and those of them inside the model."""

    turn_s: float = 0.0
    model_s: float = 0.0
    num_turns: int = 0

    @property
    def outside_share(self) -> float:
        """Share of the time that is not the model's: scheduling, batches, sampling, sealing."""
        return 1.0 - self.model_s / self.turn_s


class TimedModel:
    """A model that sums the time of its steps."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.seconds = 0.0

    @property
    def config(self) -> ModelConfig:
        """Geometry of the model."""
        return self._model.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self._model.dtype

    def forward(self, batch: StepBatch, kv_pool: Tensor) -> Tensor:
        """Run one step."""
        started = time.perf_counter()
        logits = self._model.forward(batch, kv_pool)
        self.seconds += time.perf_counter() - started
        return logits


class DrivenEngine:
    """Scheduler and runner of one worker as it starts by default; turns as its thread has them."""

    def __init__(
        self,
        model: Model,
        model_dir: Path,
        *,
        num_tokens: int,
        seed: int,
        chunk_target_s: float | None = None,
    ) -> None:
        """Args:
        num_tokens: room for this many tokens of KV.
        chunk_target_s: aimed duration of a step with prompt tokens; None = a worker's default.
        """
        manifest, defaults = read_manifest(model_dir), WorkerSettings()
        self.layout = KvLayout(manifest.num_layers, manifest.num_kv_heads, manifest.head_dim)
        num_blocks = self.layout.blocks_for(num_tokens)
        self._memory = KvPoolMemory.create(self.layout, num_blocks)
        self._model = TimedModel(model)
        self._scope = HashScope(manifest.weights_digest)
        config = EngineConfig(
            model_digest=manifest.weights_digest,
            vocab_size=manifest.vocab_size,
            eos_token_ids=manifest.eos_token_ids,
            max_model_len=manifest.context_length,
            max_num_seqs=defaults.max_num_seqs,
            max_step_tokens=defaults.max_step_tokens,
            chunk_target_s=chunk_target_s or defaults.chunk_target_ms / 1000,
            chunk_target_alone_s=chunk_target_s or defaults.chunk_target_alone_ms / 1000,
        )
        store = KvStore(self._memory, model.device)
        self._scheduler = Scheduler(config, BlockPool(num_blocks, self._memory.gens), store)
        self._runner = Runner(self._model, store, config.eos_token_ids)
        self._rng = np.random.default_rng(seed)
        self._num_requests = 0

    def close(self) -> None:
        """Give the pool's memory back."""
        self._memory.close()

    # -- work ------------------------------------------------------------------------------

    def prefill(self, num_tokens: int, after: int = 0) -> Spent:
        """Compute a prompt and its first token.

        Args:
            after: cached tokens before it, whole blocks; they are computed first, and not counted.
        """
        prefix = self._drawn(after)
        if after:
            self._compute(prefix, Spent())
        spent = Spent()
        done = self._compute(np.concatenate((prefix, self._drawn(num_tokens))), spent)
        if done.cached_tokens != after:
            raise EngineMisbehaved(f"{done.cached_tokens} tokens were cached instead of {after}")
        return spent

    def _compute(self, token_ids: np.ndarray, spent: Spent) -> ChoiceDone:
        self._submit_ids(token_ids, WorkKind.WHOLE, max_tokens=1)
        while True:
            for event in self._turn(spent):
                if isinstance(event, ChoiceDone):
                    return event

    def decode(self, num_seqs: int, context: int, num_steps: int, warm_up: int = 2) -> Spent:
        """Decode `num_seqs` sequences of `context` tokens for some steps, then drop them.

        One prompt is computed; its KV is copied to blocks of its own for every sequence, as if
        it had been received, so that no sequence shares memory with another.
        """
        keys, first = self._receive_copies(num_seqs, context, num_steps + warm_up + 2)
        now = time.monotonic()
        for key in keys:
            self._scheduler.received(key, first, now)
        for _ in range(warm_up):
            self._turn(Spent(), num_tokens=num_seqs)
        spent = Spent()
        for _ in range(num_steps):
            self._turn(spent, num_tokens=num_seqs)
        for key in keys:
            self._scheduler.cancel(key, "measured", time.monotonic())
        self._scheduler.take_events()
        return spent

    def _receive_copies(
        self, num_seqs: int, context: int, max_tokens: int
    ) -> tuple[list[RequestKey], tuple[FirstToken, ...]]:
        source = self._submit(context, WorkKind.PREFILL, max_tokens=max_tokens)
        blocks: list[BlockId] = []
        finished: PrefillFinished | None = None
        while finished is None:
            for event in self._turn(Spent()):
                if isinstance(event, BlocksSealed):
                    blocks += event.block_ids
                elif isinstance(event, PrefillFinished):
                    finished = event
        content = self._memory.blocks[_with_tail(blocks, finished.tail_block)]
        keys = [
            self._submit(context, WorkKind.CONTINUE, max_tokens=max_tokens) for _ in range(num_seqs)
        ]
        events = self._turn(Spent(), num_tokens=0)
        reserved = [event for event in events if isinstance(event, BlocksReserved)]
        if len(reserved) != num_seqs:
            raise EngineMisbehaved(f"{len(reserved)} of {num_seqs} sequences fit")
        for event in reserved:
            fresh = [block for block in event.block_ids if block is not None]
            self._memory.blocks[_with_tail(fresh, event.tail_block)] = content
        self._scheduler.source_released(source, time.monotonic())
        return keys, finished.first

    def _submit(self, num_tokens: int, kind: WorkKind, *, max_tokens: int) -> RequestKey:
        """Submit random tokens: no prefix is ever shared."""
        return self._submit_ids(self._drawn(num_tokens), kind, max_tokens=max_tokens)

    def _drawn(self, num_tokens: int) -> np.ndarray:
        vocab = self._model.config.vocab_size
        return self._rng.integers(0, vocab, num_tokens).astype(np.uint32)

    def _submit_ids(self, token_ids: np.ndarray, kind: WorkKind, *, max_tokens: int) -> RequestKey:
        self._num_requests += 1
        key = RequestKey(f"bench/{self._num_requests}")
        request = EngineRequest(
            key=key,
            request_id=key,
            kind=kind,
            token_ids=token_ids,
            block_hashes=chain_hashes(self._scope, token_ids),
            sampling=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens),
            deadline=NEVER,
        )
        self._scheduler.submit(request, time.monotonic())
        return key

    # -- turns -----------------------------------------------------------------------------

    def _turn(self, spent: Spent, num_tokens: int | None = None) -> tuple[EngineEvent, ...]:
        """Do what one turn of the engine thread does.

        Args:
            num_tokens: how many tokens the step must hold.
        """
        scheduler, before = self._scheduler, self._model.seconds
        started = time.perf_counter()
        plan = scheduler.schedule(time.monotonic())
        if plan.rows:
            scheduler.apply(self._runner.execute(plan), time.monotonic())
        scheduler.load()
        scheduler.pool.cache.take_delta()
        events = scheduler.take_events()
        spent.turn_s += time.perf_counter() - started
        spent.model_s += self._model.seconds - before
        spent.num_turns += 1
        _check(plan, events, num_tokens)
        return events


def _with_tail(blocks: list[BlockId], tail: BlockId | None) -> list[BlockId]:
    return blocks if tail is None else [*blocks, tail]


def _check(plan: StepPlan, events: tuple[EngineEvent, ...], num_tokens: int | None) -> None:
    if num_tokens is not None and plan.num_tokens != num_tokens:
        raise EngineMisbehaved(f"a step of {plan.num_tokens} tokens instead of {num_tokens}")
    for event in events:
        is_early = isinstance(event, ChoiceDone) and event.error_code is not None
        if is_early or isinstance(event, Refused):
            raise EngineMisbehaved(f"the engine says {event}")
    if num_tokens:
        produced = sum(len(event.token_ids) for event in events if isinstance(event, TokensOut))
        if produced != num_tokens:
            raise EngineMisbehaved(f"{produced} tokens came out of a step of {num_tokens}")
