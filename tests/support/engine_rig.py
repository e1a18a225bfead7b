"""An engine without its thread: scheduler, runner and fake model, stepped by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from services.common.ids import BlockId
from services.common.sampling import SamplingParams
from services.engine.api import (
    BlocksReserved,
    BlocksSealed,
    CancelReceive,
    CancelSource,
    ChoiceDone,
    EngineEvent,
    EngineRequest,
    FirstToken,
    OfferReady,
    PrefillFinished,
    ReceiveWanted,
    Refused,
    RequestKey,
    ResumedChoice,
    TokensOut,
    UnpinWanted,
    WorkKind,
)
from services.engine.config import EngineConfig
from services.engine.plan import StepPlan, StepResult
from services.engine.runner import KvStore, Runner
from services.engine.scheduler import Scheduler
from services.kv.block_pool import BlockPool
from services.kv.hashing import HashScope, chain_hashes
from services.kv.memory import KvPoolMemory
from tests.support.fake_model import FAKE_LAYOUT, FAKE_VOCAB, FakeModel, fake_values

MODEL_DIGEST = "fake-model"
Event = TypeVar("Event")
Values = npt.NDArray[np.int64]


def tokens(*ids: int) -> npt.NDArray[np.uint32]:
    """A prompt."""
    return np.array(ids, dtype=np.uint32)


def prompt_of(length: int, seed: int = 0) -> npt.NDArray[np.uint32]:
    """A prompt of that many tokens; equal seeds share every prefix."""
    return np.random.default_rng(seed).integers(3, FAKE_VOCAB, length).astype(np.uint32)


def make_config(**changes: Any) -> EngineConfig:
    """A small engine."""
    fields: dict[str, Any] = {
        "model_digest": MODEL_DIGEST,
        "vocab_size": FAKE_VOCAB,
        "eos_token_ids": (),
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "max_step_tokens": 256,
        "max_chunk_tokens": 128,
        "min_chunk_tokens": 1,
        "initial_chunk_tokens": 64,
    }
    return EngineConfig(**(fields | changes))


def greedy(max_tokens: int = 8, **changes: Any) -> SamplingParams:
    """Greedy sampling."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)


def make_request(
    key: str,
    prompt: npt.NDArray[np.uint32],
    sampling: SamplingParams | None = None,
    kind: WorkKind = WorkKind.WHOLE,
    *,
    deadline: float = 1e9,
    priority: int = 0,
    tenant: str = "",
    generated: tuple[int, ...] = (),
    resumed: tuple[ResumedChoice, ...] = (),
    kv_form: str = "",
) -> EngineRequest:
    """A work item with the right hashes."""
    scope = HashScope(MODEL_DIGEST, tenant=tenant)
    return EngineRequest(
        key=RequestKey(key),
        request_id=f"req-{key}",
        kind=kind,
        token_ids=prompt,
        block_hashes=chain_hashes(scope, prompt),
        sampling=sampling or greedy(),
        deadline=deadline,
        priority=priority,
        tenant=tenant,
        generated=generated,
        resumed=resumed,
        kv_form=kv_form,
    )


class Output:
    """Everything one work item said."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.first_index: dict[int, int] = {}
        self.dones: list[ChoiceDone] = []
        self.refused: Refused | None = None
        self.events: list[EngineEvent] = []

    @property
    def num_ends(self) -> int:
        """How often the whole item ended: once, at last."""
        return sum(done.all_choices for done in self.dones) + (self.refused is not None)

    @property
    def end(self) -> ChoiceDone:
        """The last end."""
        return self.dones[-1]

    def of(self, kind: type[Event]) -> list[Event]:
        """Events of one type."""
        return [event for event in self.events if isinstance(event, kind)]


class EngineRig:
    """Scheduler, runner and fake model over a pool full of NaN."""

    def __init__(self, num_blocks: int = 64, model: FakeModel | None = None, **config: object):
        self.memory = KvPoolMemory.create(FAKE_LAYOUT, num_blocks, kind="anonymous")
        self.cells: npt.NDArray[np.float32] = self.memory.blocks.view(np.float32).reshape(
            num_blocks, 2, FAKE_LAYOUT.block_size
        )
        self.cells[:] = np.nan
        self.model = model or FakeModel()
        self.store = KvStore(self.memory, self.model.device)
        self.config = make_config(**config)
        self.pool = BlockPool(num_blocks, self.memory.gens)
        self.scheduler = Scheduler(self.config, self.pool, self.store)
        self.runner = Runner(self.model, self.store, self.config.eos_token_ids)
        self.now = 1000.0
        self.outputs: dict[str, Output] = {}
        self.reserved: dict[str, BlocksReserved] = {}
        self.unpinned: dict[str, set[BlockId]] = {}  # given back before `release`
        self.lent: set[str] = set()  # keys whose KV the sender still holds
        self.opened: dict[str, ReceiveWanted] = {}  # keys whose receive has not ended
        self.on_step: Callable[[StepPlan], None] | None = None

    # -- driving ---------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> Output:
        """Submit a work item."""
        output = self.outputs[request.key] = Output()
        self.scheduler.submit(request, self.now)
        self.collect()
        return output

    def step(self, between: Callable[[], None] | None = None) -> StepPlan:
        """Run one step; `between` runs while the step is under way."""
        plan = self.scheduler.schedule(self.now)
        self.collect()
        if plan.rows:
            if self.on_step is not None:
                self.on_step(plan)
            result = self.runner.execute(plan)
            if between is not None:
                between()
            self.now += 0.01
            self.scheduler.apply(StepResult(result.rows, 0.01), self.now)
        elif between is not None:
            between()
        self.now += 0.001
        self.collect()
        self.scheduler.check_integrity()
        return plan

    def run(self, max_steps: int = 2000) -> int:
        """Step until there is nothing to compute; return the number of steps."""
        for num_steps in range(max_steps):
            if not self.step().rows:
                return num_steps
        raise AssertionError(f"still computing after {max_steps} steps")

    def cancel(self, key: str) -> None:
        """Cancel a work item."""
        self.scheduler.cancel(RequestKey(key), "test", self.now)
        self.collect()

    def pause(self, key: str) -> None:
        """The router of a work item lags."""
        self.scheduler.pause(RequestKey(key))

    def resume(self, key: str) -> None:
        """The router of a work item has caught up."""
        self.scheduler.resume(RequestKey(key))

    def migrate(self, key: str) -> None:
        """Offer a running work item's KV to another worker."""
        self.scheduler.migrate(RequestKey(key), self.now)
        self.collect()

    def lent_blocks(self, key: str) -> tuple[BlockId, ...]:
        """Full blocks lent to the sender, in token order."""
        return tuple(b for e in self.outputs[key].of(BlocksSealed) for b in e.block_ids)

    def unpin(self, key: str, block_ids: tuple[BlockId, ...]) -> None:
        """The sender no longer reads these blocks."""
        self.scheduler.source_unpinned(RequestKey(key), block_ids)
        self.unpinned.setdefault(key, set()).update(block_ids)
        self.collect()

    def release(self, key: str) -> None:
        """The sender lets go."""
        self.lent.discard(key)
        self.scheduler.source_released(RequestKey(key), self.now)
        self.collect()

    def receive(
        self,
        key: str,
        first: tuple[FirstToken, ...],
        kv_form: str = "",
        rounding: Callable[[Values], Values] = lambda values: values,
    ) -> None:
        """Write the right KV into the reserved blocks, rounded as asked, and say so."""
        self.write_kv(key, self.reserved.pop(key), rounding)
        del self.opened[key]
        self.scheduler.received(RequestKey(key), first, self.now, kv_form)
        self.collect()

    def fail_receive(self, key: str, *, recompute: bool) -> None:
        """The receive failed."""
        self.reserved.pop(key, None)
        del self.opened[key]
        self.scheduler.receive_failed(
            RequestKey(key), "handoff_failed", "test", recompute=recompute, now=self.now
        )
        self.collect()

    def write_kv(
        self,
        key: str,
        reserved: BlocksReserved,
        rounding: Callable[[Values], Values] = lambda values: values,
    ) -> None:
        """Write the KV a ticket covers where the receiver would."""
        prompt = self.prompts[key]
        values, size = rounding(fake_values(prompt)), FAKE_LAYOUT.block_size
        for idx, block_id in enumerate((*reserved.block_ids, reserved.tail_block)):
            part = values[idx * size : (idx + 1) * size]
            if block_id is not None:
                assert not self.pool.is_sealed(block_id)
                self.cells[block_id, :, : len(part)] = part

    @property
    def prompts(self) -> dict[str, npt.NDArray[np.uint32]]:
        """Known tokens of open work items: the prompt, at first."""
        return {
            key: r.trunk.token_ids(0, r.trunk.num_tokens)
            for key, r in self.scheduler._requests.items()
        }

    # -- watching --------------------------------------------------------------------------

    def collect(self) -> None:
        """File the events, checking the order of token indexes."""
        for event in self.scheduler.take_events():
            output = self.outputs[event.key]
            output.events.append(event)
            self._note_transfer(event)
            if isinstance(event, TokensOut):
                self._note_tokens(output, event)
            elif isinstance(event, ChoiceDone):
                assert not output.num_ends, "a work item ended twice"
                output.dones.append(event)
            elif isinstance(event, Refused):
                output.refused = event

    def _note_tokens(self, output: Output, event: TokensOut) -> None:
        assert not output.num_ends, "a token after the end"
        seen = output.tokens.setdefault(event.choice, [])
        start = output.first_index.setdefault(event.choice, event.first_index)
        assert event.first_index == start + len(seen), "a gap or a repeat in token indexes"
        seen.extend(event.token_ids)

    def _note_transfer(self, event: EngineEvent) -> None:
        if isinstance(event, OfferReady):
            self.lent.add(event.key)
        elif isinstance(event, (BlocksSealed, PrefillFinished)):
            assert event.key in self.lent
        elif isinstance(event, ReceiveWanted):
            self.opened[event.key] = event
        elif isinstance(event, BlocksReserved):
            assert event.key in self.opened
            self.reserved[event.key] = event
        elif isinstance(event, CancelReceive):
            assert event.key in self.opened
        elif isinstance(event, (CancelSource, UnpinWanted)):
            assert event.key in self.lent

    def assert_at_rest(self) -> None:
        """Nothing is open, every block is free or cached."""
        self.scheduler.check_integrity()
        load = self.scheduler.load()
        assert load.requests_open == load.running == load.waiting == load.blocks_in_use == 0
        assert load.blocks_free + load.blocks_cached == load.blocks_total
