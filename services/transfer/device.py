"""What the transfer layer asks of the device a pool is computed on; implemented where torch is.

A worker without one (its pool is plain memory, and nothing of torch is loaded) has the planes
attach, memfd and zmq.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.transfer.pair_store import PairStore

HostBytes = npt.NDArray[np.uint8]

PREFILL_RANK, DECODE_RANK = 0, 1


class GroupError(Exception):
    """The group could not be built, broke, or was aborted."""


class DeviceError(Exception):
    """The device refused; its memory cannot be shared, opened or read."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One end of a two-rank group."""

    name: str  # names both incarnations and a number: no other life of a peer has this group
    rank: int
    host: str  # the only address this end may listen on
    slot_bytes: int
    num_slots: int
    build_timeout_s: float


class Pending(Protocol):
    """A batch inside the group."""

    def wait(self) -> None:
        """Return once the slot may be used again (and what was received can be read).

        Raises:
            GroupError: the group is broken or was aborted; what the slot holds means nothing.
        """
        ...


class Group(Protocol):
    """Two ranks and the staging slots of one of them; used by one thread but for `abort`."""

    def host(self, slot: int) -> HostBytes:
        """Return a slot's bytes on the host, to be filled before `send` or read after a receive."""
        ...

    def send(self, slot: int, size_bytes: int) -> Pending:
        """Enter the group with the first bytes of a slot; sends match receives by order."""
        ...

    def recv(self, slot: int, size_bytes: int) -> Pending:
        """Enter the group for the first bytes of a slot."""
        ...

    def abort(self) -> None:
        """End what is inside, from any thread; nothing touches a slot once this has returned."""
        ...


class PeerBlocks(Protocol):
    """A peer's pool on its device, opened in this process; it is only read."""

    def copy_out(self, copies: Sequence[tuple[int, HostBytes]]) -> None:
        """Copy runs of blocks, each from its first block into rows `[n, block_bytes]`, and wait.

        Raises:
            DeviceError: what the rows hold means nothing.
        """
        ...


class Device(Protocol):
    """Where a pool is computed on."""

    @property
    def kind(self) -> str:
        """Return "cpu" or "cuda"."""
        ...

    @property
    def group_backend(self) -> str:
        """Name what groups are built with: equal at both ends, or there is no group."""
        ...

    def export_pool(self) -> bytes:
        """Return what a process on this host opens our pool with; DeviceError if it cannot."""
        ...

    def open_pool(self, handle: bytes, num_blocks: int, block_bytes: int) -> PeerBlocks:
        """Open a peer's pool; DeviceError if the handle is not one of such a pool."""
        ...

    def make_group(self, spec: GroupSpec, store: PairStore) -> Group:
        """Build a group, both ends at about the same time; GroupError within the timeout."""
        ...
