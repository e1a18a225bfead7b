"""A device that is not one: its memory is an array that other ends of this process open by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.transfer.device import DeviceError, Group, GroupSpec, HostBytes, PeerBlocks
from services.transfer.pair_store import PairStore

_MEMORY: dict[bytes, HostBytes] = {}


@dataclass
class FakeCuda:
    """services.transfer.device.Device of kind cuda, without groups."""

    name: bytes = b"pool-0"
    blocks: HostBytes = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    refusal: str | None = None  # why nothing can be exported or opened
    before_copy: Callable[[], None] = lambda: None
    num_copies: int = 0
    kind: str = "cuda"
    group_backend: str = ""

    def own(self, num_blocks: int, block_bytes: int) -> None:
        """Allocate the pool."""
        self.blocks = np.zeros((num_blocks, block_bytes), np.uint8)
        _MEMORY[self.name] = self.blocks

    def export_pool(self) -> bytes:
        """Return the pool's name."""
        if self.refusal is not None:
            raise DeviceError(self.refusal)
        return b"fake:" + self.name

    def open_pool(self, handle: bytes, num_blocks: int, block_bytes: int) -> PeerBlocks:
        """Find a pool by its name."""
        if self.refusal is not None:
            raise DeviceError(self.refusal)
        blocks = _MEMORY[handle.removeprefix(b"fake:")]
        if blocks.shape != (num_blocks, block_bytes):
            raise DeviceError("another shape")
        return _FakeBlocks(self, blocks)

    def make_group(self, spec: GroupSpec, store: PairStore) -> Group:
        """There is nothing to build groups with."""
        raise AssertionError("no group backend was offered")


@dataclass
class _FakeBlocks:
    device: FakeCuda
    blocks: HostBytes

    def copy_out(self, copies: Sequence[tuple[int, HostBytes]]) -> None:
        self.device.before_copy()
        for first, rows in copies:
            rows[:] = self.blocks[first : first + len(rows)]
            self.device.num_copies += 1
