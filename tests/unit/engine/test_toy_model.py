"""A real (tiny) model in the engine: the same tokens in every batch, chunk size and pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from services.common.sampling import SamplingParams
from services.engine.api import (
    BlocksReserved,
    ChoiceDone,
    EngineEvent,
    PrefillFinished,
    TokensOut,
    WorkKind,
)
from services.engine.config import EngineConfig
from services.engine.runner import KvStore, Runner
from services.engine.scheduler import Scheduler
from services.kv.block_pool import BlockPool
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.models.base import Model
from services.models.load import load_model
from tests.support.engine_rig import greedy, make_config, make_request
from tests.support.toy_model import make_toy_model

LENGTHS = (1, 15, 16, 17, 60, 131)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=4, max_tokens=24)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(make_toy_model(tmp_path_factory.mktemp("toy") / "model"))


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    """Small matrices gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class ToyEngine:
    """Scheduler and runner over a real model, stepped by hand."""

    def __init__(self, model: Model, **changes: object) -> None:
        shape = model.config
        layout = KvLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim)
        self.memory = KvPoolMemory.create(layout, 80, kind="anonymous")
        self.memory.blocks.view(np.float32)[:] = np.nan
        fields = {"vocab_size": shape.vocab_size, "max_model_len": 1024} | changes
        self.config: EngineConfig = make_config(**fields)
        self.pool = BlockPool(80, self.memory.gens)
        store = KvStore(self.memory, model.device)
        self.scheduler = Scheduler(self.config, self.pool, store)
        self.runner = Runner(model, store, ())
        self.events: list[EngineEvent] = []

    def run(self) -> None:
        while True:
            plan = self.scheduler.schedule(1.0)
            if plan.rows:
                self.scheduler.apply(self.runner.execute(plan), 1.0)
            self.events.extend(self.scheduler.take_events())
            self.scheduler.check_integrity()
            if not plan.rows:
                return

    def tokens(self, key: str, choice: int = 0) -> list[int]:
        return [
            token_id
            for event in self.events
            if isinstance(event, TokensOut) and event.key == key and event.choice == choice
            for token_id in event.token_ids
        ]


def prompt(length: int, vocab: int) -> npt.NDArray[np.uint32]:
    """A random prompt without the special tokens."""
    return np.random.default_rng(length).integers(3, vocab, length).astype(np.uint32)


def alone(model: Model, length: int, params: SamplingParams) -> list[int]:
    """What a request gives when it is alone and prefilled at once."""
    engine = ToyEngine(model, max_chunk_tokens=256, initial_chunk_tokens=256)
    engine.scheduler.submit(make_request("a", prompt(length, engine.config.vocab_size), params), 0)
    engine.run()
    return engine.tokens("a")


@pytest.mark.parametrize("params", [greedy(24), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("chunk", [5, 16, 64])
def test_batch_and_chunk_size_do_not_change_tokens(
    model: Model, chunk: int, params: SamplingParams
) -> None:
    """RB-086 with real kernels: the pool is NaN until written."""
    engine = ToyEngine(model, max_chunk_tokens=chunk, initial_chunk_tokens=2 * chunk)
    for length in LENGTHS:
        request = make_request(str(length), prompt(length, engine.config.vocab_size), params)
        engine.scheduler.submit(request, 0)
    engine.run()
    for length in LENGTHS:
        assert engine.tokens(str(length)) == alone(model, length, params)


@pytest.mark.parametrize("length", LENGTHS)
def test_two_pools_give_the_tokens_of_one(model: Model, length: int) -> None:
    """RB-026, RB-036: KV copied from pool to pool, all choices go on from their first tokens."""
    params = replace(DRAWN, n=2)
    single, source, sink = (
        ToyEngine(model, max_chunk_tokens=chunk, initial_chunk_tokens=chunk)
        for chunk in (256, 32, 256)
    )
    ids = prompt(length, single.config.vocab_size)
    single.scheduler.submit(make_request("a", ids, params), 0)
    single.run()
    source.scheduler.submit(make_request("a", ids, params, WorkKind.PREFILL), 0)
    source.run()
    request = make_request("a", ids, params, WorkKind.CONTINUE)
    sink.scheduler.submit(request, 0)
    sink.run()
    finished = next(event for event in source.events if isinstance(event, PrefillFinished))
    reserved = next(event for event in sink.events if isinstance(event, BlocksReserved))
    sent = source.scheduler._requests[request.key].trunk.table.block_ids
    for src, dst in zip(sent, (*reserved.block_ids, reserved.tail_block), strict=False):
        assert dst is not None
        assert source.pool.is_sealed(src)
        sink.memory.blocks[dst] = source.memory.blocks[src]
        sink.memory.digests[dst] = source.memory.digests[src]
    sink.scheduler.received(request.key, finished.first, 1.0)
    sink.run()
    for choice in range(2):
        both = source.tokens("a", choice) + sink.tokens("a", choice)
        assert both == single.tokens("a", choice)
        assert len(both) == 24
    assert sum(isinstance(event, ChoiceDone) for event in sink.events) == 2
