"""Same-host plane between CUDA pools: the pool's IPC handle comes with its control page.

Generations stand in the control page on the host, which is mapped like that of the memfd plane;
blocks are copied on the device's own stream between two looks at them. Unlike a memfd, memory of a
device does not outlive its owner: a receive whose peer has died is not finished from it.

The logic is tested with a device that is not one; on a GPU it was compiled, not run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.kv.block_copy import CopyBlocks, are_stable, runs
from services.kv.memory import KvPoolMemory
from services.telemetry.logs import get_logger
from services.transfer.device import DeviceError, HostBytes, PeerBlocks

log = get_logger(__name__)


def device_copier(blocks: PeerBlocks) -> CopyBlocks:
    """Return what kv.block_copy.pull_blocks is for a pool on a device."""

    def pull(
        source: KvPoolMemory,
        source_blocks: Sequence[int],
        gens: Sequence[int],
        dest: npt.NDArray[np.uint8],
        dest_blocks: Sequence[int],
    ) -> list[bool]:
        rows = np.array(source_blocks, dtype=np.int64)
        wanted = np.array(gens, dtype=np.uint64)
        before = are_stable(source, rows, wanted)
        copies = [
            (source_blocks[start], dest[dest_blocks[start] : dest_blocks[start] + stop - start])
            for start, stop in runs(before.tolist(), source_blocks, dest_blocks)
        ]
        if not _copy_out(blocks, copies):
            return [False] * len(rows)
        good: list[bool] = (before & are_stable(source, rows, wanted)).tolist()
        return good

    return pull


def _copy_out(blocks: PeerBlocks, copies: Sequence[tuple[int, HostBytes]]) -> bool:
    try:
        blocks.copy_out(copies)
    except DeviceError as error:
        # Its owner may have died a moment ago; the connection says so, and a block is not.
        log.warning("transfer.device_copy_failed", reason=str(error))
        return False
    return True
