"""A prefill worker's pool that the fake model's KV is read in, and an engine that does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.engine.api import FirstToken, RequestKey
from services.kv.attached import AttachedKv
from services.kv.digest import block_digests
from services.kv.memory import KvPoolMemory
from tests.support.engine_rig import EngineRig
from tests.support.fake_model import FAKE_LAYOUT, fake_values

SIZE = FAKE_LAYOUT.block_size


class AttachedPeer:
    """Seals blocks, lends them, and gives them to others when it should or should not."""

    def __init__(self, num_blocks: int = 64, pool_id: int = 1) -> None:
        self.memory = KvPoolMemory.create(FAKE_LAYOUT, num_blocks, kind="anonymous")
        self.cells = self.memory.blocks.view(np.float32).reshape(num_blocks, 2, SIZE)
        self.cells[:] = np.nan
        self.pool_id = pool_id
        self._free = list(range(num_blocks))
        np.random.default_rng(3).shuffle(self._free)

    def attach(
        self, tokens: npt.NDArray[np.uint32], indexes: Sequence[int] | None = None
    ) -> AttachedKv:
        """Compute and lend full blocks of these tokens: all, or those of `indexes`."""
        values = fake_values(tokens)
        chosen = tuple(range(len(tokens) // SIZE)) if indexes is None else tuple(indexes)
        blocks = [self._free.pop() for _ in chosen]
        for index, block in zip(chosen, blocks, strict=True):
            self.cells[block, :] = values[index * SIZE : (index + 1) * SIZE]
            self.memory.digests[block] = block_digests(FAKE_LAYOUT, self.memory.blocks[block])
            self.memory.gens[block] += 2
        rows = np.array(blocks, np.int64)
        gens, digests = self.memory.gens[rows].copy(), self.memory.digests[rows].copy()
        return AttachedKv(self.pool_id, self.memory, chosen, rows, gens, digests)

    def reuse(self, kv: AttachedKv, at: int = 0) -> None:
        """Write a block that is still lent, as a worker does that takes it for free."""
        block = kv.blocks[at]
        self.memory.gens[block] += np.uint64(1)
        self.cells[block] = 999.0

    def take_back(self, kv: AttachedKv) -> None:
        """Use the blocks for something else: whoever still reads them finds out."""
        for block in kv.blocks.tolist():
            self.memory.gens[block] += np.uint64(2)
            self.memory.gens[block] -= self.memory.gens[block] % np.uint64(2)
            self.cells[block] = np.nan
            self._free.insert(0, block)


def receive_attached(
    rig: EngineRig, key: str, kv: AttachedKv, first: tuple[FirstToken, ...]
) -> None:
    """Finish a receive: blocks that `kv` names are left alone, all others written."""
    tokens, reserved = rig.prompts[key], rig.reserved.pop(key)
    del rig.opened[key]
    values = fake_values(tokens)
    for index, block in enumerate((*reserved.block_ids, reserved.tail_block)):
        part = values[index * SIZE : (index + 1) * SIZE]
        if block is not None and index not in kv.indexes:
            rig.cells[block, :, : len(part)] = part
    rig.scheduler.received(RequestKey(key), first, rig.now, "", kv)
    rig.collect()
