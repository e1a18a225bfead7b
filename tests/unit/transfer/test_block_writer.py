"""Verdicts on blocks that are copied out of a peer's pool, by every way of copying."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest

from kernels.cpu import kv_blocks
from services.common.ids import BlockId
from services.kv.block_copy import pull_blocks
from services.kv.digest import block_digests, tail_digest
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.transfer.block_writer import BAD_DIGEST, BAD_GENERATION, BlockWriter
from services.transfer.receiver import Pull, ReceiverTransfer

LAYOUT = KvLayout(6, 3, 16, "float32")
NUM_FULL, TAIL_TOKENS = 4, 5


@dataclass
class _Announced:
    """What a receive knows of its blocks."""

    digests: list[np.ndarray]
    num_blocks: int = NUM_FULL
    tail_valid: int = TAIL_TOKENS

    def digests_of(self, index: int) -> np.ndarray:
        return self.digests[index]


@pytest.mark.parametrize("way", ["library", "plain", "own copier"])
def test_each_block_gets_its_own_verdict(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "plain":
        monkeypatch.setattr(kv_blocks, "available", lambda: (None, "switched off"))
    count = NUM_FULL + 1
    content = np.random.default_rng(1).integers(0, 256, (count, LAYOUT.block_bytes), np.uint8)
    with (
        KvPoolMemory.create(LAYOUT, count, kind="anonymous") as pool,
        KvPoolMemory.create(LAYOUT, count, kind="anonymous") as memory,
    ):
        pool.blocks[:] = content
        pool.gens[:] = 2
        digests = [block_digests(LAYOUT, block) for block in content]
        digests[NUM_FULL] = np.array([tail_digest(LAYOUT, content[-1], TAIL_TOKENS)], np.uint64)
        digests[1] = digests[1] ^ np.uint64(1)
        pool.gens[2] = 4  # reused since it was announced
        copy = pull_blocks if way == "own copier" else None
        writer = BlockWriter(memory, LAYOUT, 1, copy)
        dests = [BlockId(block) for block in (4, 3, 2, 1, 0)]
        pulls = [Pull(i, i, 2, dest, False) for i, dest in enumerate(dests)]
        machine = cast(ReceiverTransfer, _Announced(digests))
        verdicts = writer.pull(machine, pool, pulls)
        assert verdicts == [None, BAD_DIGEST, BAD_GENERATION, None, None]
        for block in (0, 3):
            assert memory.digests[dests[block]].tolist() == digests[block].tolist()
            assert (memory.blocks[dests[block]] == content[block]).all()
        assert not memory.digests[dests[1]].any()  # never taken for what was announced
        pool.blocks[NUM_FULL, 0] ^= 1  # in a row of the tail that counts
        assert writer.pull(machine, pool, pulls[-1:]) == [BAD_DIGEST]
