"""A CUDA pool in another process: exported as an IPC handle, opened, and copied from.

Compiled, not run.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.transfer.device import DeviceError, HostBytes

_MAGIC = b"isthcu01"
# magic, bytes of the storage, its offset in the allocation, offset of its reference counter,
# whether to wait for the event, lengths of the three names that follow
_HEAD = struct.Struct("<8sQQQ?BBB")


def export_storage(pool: Tensor) -> bytes:
    """Return what another process needs to open the storage of a CUDA tensor."""
    if pool.device.type != "cuda" or not pool.is_contiguous():
        raise DeviceError("the pool is not one piece of CUDA memory")
    try:
        storage: Any = pool.untyped_storage()
        shared = storage._share_cuda_()  # one for each who opens it: torch counts them
    except RuntimeError as error:
        raise DeviceError(str(error).partition("\n")[0]) from error
    _, handle, size, offset, counter, counter_offset, event, must_wait = shared
    names = (bytes(handle), bytes(counter), bytes(event))
    head = _HEAD.pack(_MAGIC, size, offset, counter_offset, must_wait, *map(len, names))
    return head + b"".join(names)


class IpcBlocks:
    """A peer's blocks (transfer.device.PeerBlocks); its memory is only read."""

    def __init__(
        self, handle: bytes, num_blocks: int, block_bytes: int, device: torch.device
    ) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        arguments = _parse(handle, index)
        if arguments[2] < num_blocks * block_bytes:
            raise DeviceError("the peer's memory is smaller than its pool")
        try:
            storage: Any = torch.UntypedStorage._new_shared_cuda(*arguments)
            flat = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)
            self._blocks = flat[: num_blocks * block_bytes].view(num_blocks, block_bytes)
            self._stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise DeviceError(str(error).partition("\n")[0]) from error

    def copy_out(self, copies: Sequence[tuple[int, HostBytes]]) -> None:
        """Copy runs of blocks to the host, and wait."""
        try:
            with torch.cuda.stream(self._stream):
                for first, rows in copies:
                    source = self._blocks[first : first + len(rows)]
                    torch.from_numpy(rows).copy_(source, non_blocking=True)
            self._stream.synchronize()
        except RuntimeError as error:
            raise DeviceError(str(error).partition("\n")[0]) from error


def _parse(handle: bytes, index: int) -> tuple[Any, ...]:
    """Return the arguments of torch for a handle, on our number of the device."""
    if len(handle) < _HEAD.size:
        raise DeviceError("no handle")
    magic, size, offset, counter_offset, must_wait, *lengths = _HEAD.unpack_from(handle)
    if magic != _MAGIC or len(handle) != _HEAD.size + sum(lengths):
        raise DeviceError("not a handle")
    ends = np.cumsum([_HEAD.size, *lengths]).tolist()
    name, counter, event = (handle[lo:hi] for lo, hi in pairwise(ends))
    return (index, name, size, offset, counter, counter_offset, event, must_wait)
