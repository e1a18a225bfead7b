"""The runner: batches as models want them, digests of sealed blocks, faults of single rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from services.common.sampling import SamplingParams
from services.engine.api import EndReason, FirstToken, WorkKind
from services.engine.runner import EngineFault, KvStore, Runner
from services.kv.digest import block_digests
from services.models.base import StepBatch
from tests.support.engine_rig import EngineRig, greedy, make_request, prompt_of
from tests.support.fake_model import FAKE_LAYOUT, FAKE_VOCAB, FakeModel, reference_tokens


class NanModel(FakeModel):
    """Gives NaN for the rows of one prompt length."""

    def forward(self, batch: StepBatch, kv_pool: Tensor) -> Tensor:
        logits = super().forward(batch, kv_pool)
        ends = (batch.query_starts[1:] - 1).tolist()
        for idx, row in enumerate(batch.logit_rows.tolist()):
            if int(batch.context_lens[ends.index(row)]) == 23:
                logits[idx, 5] = float("nan")
        return logits


class BrokenModel(FakeModel):
    """Never computes anything."""

    def forward(self, batch: StepBatch, kv_pool: Tensor) -> Tensor:
        raise RuntimeError("no kernel")


class MirrorStore(KvStore):
    """A store that keeps device and host apart, as on an accelerator."""

    def __init__(self, rig: EngineRig) -> None:
        super().__init__(rig.memory, torch.device("meta"))
        self.kv_pool = torch.full_like(self._host, float("nan"))


def test_digests_of_sealed_blocks_are_stored() -> None:
    rig = EngineRig()
    prompt = prompt_of(50)
    rig.submit(make_request("a", prompt))
    rig.run()
    for block_hash in make_request("x", prompt).block_hashes:
        block_id = rig.pool.cache.get(block_hash)
        assert block_id is not None
        expected = block_digests(FAKE_LAYOUT, rig.memory.blocks[block_id])
        assert rig.memory.digests[block_id].tolist() == expected.tolist()
        assert rig.memory.gens[block_id] % 2 == 0


def test_nan_logits_fail_their_row_only() -> None:
    """RB-086: NaN never becomes a token."""
    rig = EngineRig(model=NanModel())
    bad = [
        rig.submit(make_request("greedy", prompt_of(20, 1), greedy(8))),
        rig.submit(make_request("drawn", prompt_of(20, 2), SamplingParams(max_tokens=8))),
    ]
    good = rig.submit(make_request("good", prompt_of(40), greedy(8)))
    rig.run()
    for output in bad:
        assert output.end.error_code == "internal"
        assert len(output.tokens[0]) == 3
    assert good.tokens[0] == reference_tokens(prompt_of(40), greedy(8))
    rig.assert_at_rest()


def test_a_model_that_never_works_is_an_engine_fault() -> None:
    rig = EngineRig(model=BrokenModel())
    outputs = [rig.submit(make_request(str(i), prompt_of(9), greedy(4))) for i in range(2)]
    rig.step()
    assert {output.end.reason for output in outputs} == {EndReason.ERROR}
    for idx in range(2, 4):
        rig.submit(make_request(str(idx), prompt_of(9), greedy(4)))
        if idx == 2:
            rig.step()
    with pytest.raises(EngineFault):
        rig.step()


def test_logprobs_travel_with_tokens() -> None:
    rig = EngineRig()
    params = greedy(4, logprobs=True, top_logprobs=3)
    output = rig.submit(make_request("a", prompt_of(20), params))
    rig.run()
    for event in output.events:
        for logprobs in getattr(event, "logprobs", ()):
            assert logprobs.token_id == logprobs.top[0][0]
            assert logprobs.logprob == logprobs.top[0][1] < 0
    assert output.tokens[0] == reference_tokens(prompt_of(20), greedy(4))


def test_memory_off_the_host_is_mirrored_for_transfers() -> None:
    """On an accelerator blocks leave and arrive through the host's memory."""
    rig = EngineRig()
    store = MirrorStore(rig)
    rig.scheduler._blocks._content = store
    rig.runner = Runner(rig.model, store, ())
    prompt, params = prompt_of(40), greedy(30)
    output = rig.submit(make_request("a", prompt, params))
    rig.run()
    assert output.tokens[0] == reference_tokens(prompt, params)
    request = make_request("a", prompt)
    for idx, block_hash in enumerate(request.block_hashes):
        block_id = rig.pool.cache.get(block_hash)
        assert block_id is not None
        device = store.kv_pool[block_id].numpy().reshape(2, 16)
        assert np.array_equal(rig.cells[block_id], device), f"block {idx} did not leave"
    lent = rig.submit(make_request("p", prompt_of(40, 7), params, WorkKind.PREFILL))
    rig.run()
    tail = rig.scheduler._requests[lent.events[0].key].trunk.table[2]
    assert not np.isnan(rig.cells[tail, :, :8]).any()
    rig.release("p")
    received = rig.submit(make_request("d", prompt_of(40, 9), params, WorkKind.CONTINUE))
    rig.step()
    rig.receive("d", (FirstToken(0, reference_tokens(prompt_of(40, 9), params)[0]),))
    rig.run()
    assert received.tokens[0] == reference_tokens(prompt_of(40, 9), params)[1:]


def test_batches_are_padded_and_typed_as_models_want_them() -> None:
    seen: list[StepBatch] = []

    class Recorder(FakeModel):
        def forward(self, batch: StepBatch, kv_pool: Tensor) -> Tensor:
            seen.append(batch)
            return super().forward(batch, kv_pool)

    rig = EngineRig(model=Recorder())
    rig.submit(make_request("a", prompt_of(5), greedy(2)))
    rig.submit(make_request("b", prompt_of(40, 1), greedy(2)))
    rig.run()
    batch = seen[0]
    assert batch.block_tables.shape == (2, 3)
    assert (batch.block_tables[0, 1:] == -1).all()
    assert batch.query_starts.tolist() == [0, 5, 45]
    assert batch.context_lens.tolist() == [5, 40]
    assert batch.logit_rows.tolist() == [4, 44]
    types = (torch.int64, torch.int32)
    for tensor in (batch.token_ids, batch.positions, batch.slot_mapping, batch.logit_rows):
        assert tensor.dtype is types[0]
    for tensor in (batch.block_tables, batch.query_starts, batch.context_lens):
        assert tensor.dtype is types[1]
    assert int(batch.token_ids.max()) < FAKE_VOCAB
