"""Two-rank groups on torch.distributed: NCCL between CUDA devices, the same on gloo for a CPU.

A group is a process group of its own and never the default one, so that pairs come and go without
anybody else: what is global in torch.distributed is not used. The CUDA half was never run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from services.transfer.device import (
    DeviceError,
    Group,
    GroupError,
    GroupSpec,
    HostBytes,
    PeerBlocks,
    Pending,
)
from services.transfer.pair_store import PairStore, StoreClosed
from services.worker.torch_ipc import IpcBlocks, export_storage

_NUM_RANKS = 2
_BATCH_TAG, _ABORT_TAG = 0, 1
# The guard of a group ends a batch long before; this only must not be shorter.
_WAIT_LIMIT = timedelta(hours=1)


class TorchDevice:
    """The device of a worker's model (transfer.device.Device)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Tensor | None = None
        if device.type == "cuda":
            # Without this the first error of any group ends the process; ours are aborted by
            # their guards. Read when a group is made.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")

    @property
    def kind(self) -> str:
        """Return "cpu" or "cuda"."""
        return self._device.type

    @property
    def group_backend(self) -> str:
        """Return what groups are built with, "" where this torch has nothing for the device."""
        if self._device.type == "cuda":
            return "nccl" if dist.is_available() and dist.is_nccl_available() else ""
        return "gloo" if dist.is_available() and dist.is_gloo_available() else ""

    def use_pool(self, pool: Tensor) -> None:
        """Take the tensor the model computes on."""
        self._pool = pool

    def export_pool(self) -> bytes:
        """Return the IPC handle of our pool (transfer.device.Device)."""
        if self._pool is None:
            raise DeviceError("there is no pool yet")
        return export_storage(self._pool)

    def open_pool(self, handle: bytes, num_blocks: int, block_bytes: int) -> PeerBlocks:
        """Open a peer's pool (transfer.device.Device)."""
        if self._device.type != "cuda":
            raise DeviceError("this worker has no CUDA device")
        return IpcBlocks(handle, num_blocks, block_bytes, self._device)

    def make_group(self, spec: GroupSpec, store: PairStore) -> Group:
        """Build a group (transfer.device.Device)."""
        timeout = timedelta(seconds=spec.build_timeout_s)
        entries = _TorchStore(store, spec.build_timeout_s)
        try:
            if self._device.type == "cuda":
                return _NcclGroup(spec, entries, timeout, self._device)
            return _GlooGroup(spec, entries, timeout)
        except (RuntimeError, TimeoutError, ValueError) as error:  # torch's, and the store's
            raise GroupError(_first_line(error)) from error
        except StoreClosed as error:
            raise GroupError("given up") from error


class _TorchStore(Store):
    """A PairStore as torch wants it; called back from its threads."""

    def __init__(self, store: PairStore, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        """Set at both ends."""
        self._store.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key."""
        return self._store.get(key, self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        self._store.wait(keys, min(limit, self._timeout_s))

    def check(self, keys: list[str]) -> bool:
        """Tell whether keys are there."""
        return self._store.has(keys)

    def delete_key(self, key: str) -> bool:
        """Drop a key of this end."""
        return self._store.delete(key)

    def num_keys(self) -> int:
        """Count keys."""
        return len(self._store)

    def set_timeout(self, timeout: timedelta) -> None:
        """Keep the time a group may take to be built: the guard counts on it."""


class _GlooGroup:
    """A group on sockets; the slots are host memory."""

    def __init__(self, spec: GroupSpec, store: _TorchStore, timeout: timedelta) -> None:
        make_options: Any = ProcessGroupGloo._Options  # type: ignore[attr-defined]  # stub: Options
        options = make_options()
        # By default gloo listens on whatever address the host name has.
        options._devices = [ProcessGroupGloo.create_device(hostname=spec.host)]
        options._threads = 1
        options._timeout = timeout
        self._peer = 1 - spec.rank
        self._slots = torch.zeros((spec.num_slots, spec.slot_bytes), dtype=torch.uint8)
        self._store = store  # torch keeps its C++ half alone, which cannot answer
        shared = PrefixStore(spec.name, store)
        self._backend: Any = ProcessGroupGloo(shared, spec.rank, _NUM_RANKS, options)

    def host(self, slot: int) -> HostBytes:
        """Return a slot."""
        view: HostBytes = self._slots[slot].numpy()
        return view

    def send(self, slot: int, size_bytes: int) -> Pending:
        """Enter with a slot."""
        return self._enter(self._backend.send, slot, size_bytes)

    def recv(self, slot: int, size_bytes: int) -> Pending:
        """Enter for a slot."""
        return self._enter(self._backend.recv, slot, size_bytes)

    def abort(self) -> None:
        """Close the connection of the two ranks under whoever waits for it."""
        scrap = torch.zeros(1, dtype=torch.uint8)
        try:
            # gloo has no abort that Python can call, but a wait that times out closes the
            # connection, and then everything else that waits for it ends too.
            self._backend.recv([scrap], self._peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # that time-out, or the connection was closed already

    def _enter(self, operation: Any, slot: int, size_bytes: int) -> Pending:
        try:
            return _GlooPending(operation([self._slots[slot, :size_bytes]], self._peer, _BATCH_TAG))
        except RuntimeError as error:
            raise GroupError(_first_line(error)) from error


class _GlooPending:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        try:
            self._work.wait(_WAIT_LIMIT)
        except RuntimeError as error:
            raise GroupError(_first_line(error)) from error


class _NcclGroup:
    """A group on CUDA: slots are on the device, each with a pinned twin on the host.

    Compiled, not run.
    """

    def __init__(
        self, spec: GroupSpec, store: _TorchStore, timeout: timedelta, device: torch.device
    ) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.blocking = 0  # building and sending return, so that an abort gets through
        shape = (spec.num_slots, spec.slot_bytes)
        self._peer = 1 - spec.rank
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._host = torch.zeros(shape, dtype=torch.uint8, pin_memory=True)
        self._slots = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._is_aborted = False
        torch.cuda.synchronize(device)  # the zeros came on another stream
        self._store = store  # torch keeps its C++ half alone, which cannot answer
        shared = PrefixStore(spec.name, store)
        self._backend: Any = dist.ProcessGroupNCCL(shared, spec.rank, _NUM_RANKS, options)
        # Now, rather than with the first batch, whose deadline is shorter.
        self._backend.eager_connect_single_device(device)

    def host(self, slot: int) -> HostBytes:
        """Return the host's twin of a slot."""
        view: HostBytes = self._host[slot].numpy()
        return view

    def send(self, slot: int, size_bytes: int) -> Pending:
        """Copy to the device and enter."""
        on_device = self._slots[slot, :size_bytes]
        with torch.cuda.stream(self._stream):
            on_device.copy_(self._host[slot, :size_bytes], non_blocking=True)
            work = self._enter(self._backend.send, on_device)
        return _NcclPending(self, work, None)

    def recv(self, slot: int, size_bytes: int) -> Pending:
        """Enter, and copy to the host when it is there."""
        on_device = self._slots[slot, :size_bytes]
        with torch.cuda.stream(self._stream):
            work = self._enter(self._backend.recv, on_device)
        return _NcclPending(self, work, (self._host[slot, :size_bytes], on_device))

    def abort(self) -> None:
        """Abort the communicator, and wait until its stream is idle."""
        self._is_aborted = True
        self._backend.abort()
        self._stream.synchronize()

    def finish(self, work: Any, copy: tuple[Tensor, Tensor] | None) -> None:
        """Wait for a batch on this group's stream."""
        try:
            with torch.cuda.stream(self._stream):
                work.wait(_WAIT_LIMIT)  # lets the stream wait, not this thread
                if copy is not None:
                    copy[0].copy_(copy[1], non_blocking=True)
            self._stream.synchronize()
        except RuntimeError as error:
            raise GroupError(_first_line(error)) from error
        if self._is_aborted:
            raise GroupError("aborted")  # its kernels have ended, but not with all the bytes

    def _enter(self, operation: Any, on_device: Tensor) -> Any:
        try:
            return operation([on_device], self._peer, _BATCH_TAG)
        except RuntimeError as error:
            raise GroupError(_first_line(error)) from error


class _NcclPending:
    def __init__(self, group: _NcclGroup, work: Any, copy: tuple[Tensor, Tensor] | None) -> None:
        self._group = group
        self._work = work
        self._copy = copy

    def wait(self) -> None:
        self._group.finish(self._work, self._copy)


def _first_line(error: Exception) -> str:
    lines: Sequence[str] = str(error).splitlines() or [type(error).__name__]
    return lines[0]
