"""The scripted model is a judge: any wrong byte of KV must change the token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.chaos.scripted_model import ScriptedModel, ScriptedReference, make_scripted_model
from services.chaos.scripted_worker import Speed
from services.common.errors import ConfigError
from services.common.model_manifest import read_manifest
from services.common.sampling import SamplingParams
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4)
TABLE = np.array([5, 2, 7], dtype=np.int32)
TOKENS = np.arange(3, 43, dtype=np.uint32)  # two blocks and a half


def filled(memory: KvPoolMemory, table: np.ndarray, chunks: tuple[int, ...]) -> ScriptedModel:
    model = ScriptedModel(memory, 100)
    slots = np.concatenate([np.arange(16) + 16 * int(block) for block in table])
    start = 0
    for size in chunks:
        model.write(start, TOKENS[start : start + size], slots[start : start + size], table)
        start += size
    return model


def test_logits_depend_on_neither_chunks_nor_block_ids() -> None:
    with KvPoolMemory.create(LAYOUT, 8) as one, KvPoolMemory.create(LAYOUT, 8) as other:
        left = filled(one, TABLE, (40,)).logits(40, TABLE)
        moved = np.array([0, 6, 1], dtype=np.int32)
        right = filled(other, moved, (7, 16, 1, 16)).logits(40, moved)
        assert left.tolist() == right.tolist()


def test_every_byte_of_the_context_matters_and_no_other() -> None:
    with KvPoolMemory.create(LAYOUT, 8) as memory:
        model = filled(memory, TABLE, (40,))
        before = model.logits(40, TABLE).tolist()
        seen_tail_rows = 0
        for block in TABLE[:2].tolist():
            for byte in range(0, LAYOUT.block_bytes, 37):
                memory.blocks[block, byte] ^= 1
                assert model.logits(40, TABLE).tolist() != before
                memory.blocks[block, byte] ^= 1
        tail = memory.blocks[int(TABLE[2])].reshape(*LAYOUT.block_shape[:4], -1)
        for row in range(16):
            tail[1, 1, 1, row, 3] ^= 1
            seen_tail_rows += model.logits(40, TABLE).tolist() != before
            tail[1, 1, 1, row, 3] ^= 1
        assert seen_tail_rows == 8


def test_wrong_kv_poisons_what_is_written_after_it() -> None:
    with KvPoolMemory.create(LAYOUT, 8) as memory:
        right = filled(memory, TABLE, (40,)).logits(40, TABLE).tolist()
        model = filled(memory, TABLE, (20,))
        memory.blocks[TABLE[1]] ^= 255
        slots = np.arange(16)[4:] + 16 * int(TABLE[1])
        model.write(20, TOKENS[20:32], slots, TABLE)
        model.write(32, TOKENS[32:], np.arange(8) + 16 * int(TABLE[2]), TABLE)
        assert model.logits(40, TABLE).tolist() != right


def test_reference_gives_every_choice_its_own_answer(tmp_path: Path) -> None:
    manifest = read_manifest(make_scripted_model(tmp_path / "model"))
    reference = ScriptedReference(manifest)
    params = SamplingParams(seed=7, max_tokens=20, n=2, ignore_eos=True)
    first = reference.answer(range(3, 60), params)
    assert [len(tokens) for tokens in first] == [20, 20]
    assert first[0] != first[1]
    assert reference.answer(range(3, 60), params) == first
    assert reference.answer(range(4, 60), params) != first
    with pytest.raises(ValueError, match="fixed length"):
        reference.answer([3], replace(params, ignore_eos=False))


def test_speed_is_read_from_the_environment_and_checked() -> None:
    assert Speed.from_environ({"ISTHMUS_SCRIPTED_SPEED": "500:4"}) == Speed(500.0, 0.004)
    stalling = Speed.from_environ({"ISTHMUS_SCRIPTED_SPEED": "500:4:20:1500"})
    assert stalling == Speed(500.0, 0.004, 20, 1.5)
    for wrong in ("500", "0:1", "a:b", "inf:1", "500:4:20", "500:4:20:-1"):
        with pytest.raises(ConfigError):
            Speed.from_environ({"ISTHMUS_SCRIPTED_SPEED": wrong})
