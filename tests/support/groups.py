"""Real groups on gloo whose sends can be held back, broken or refused, by either end of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from services.transfer.device import (
    DeviceError,
    Group,
    GroupError,
    GroupSpec,
    HostBytes,
    PeerBlocks,
    Pending,
)
from services.transfer.pair_store import PairStore
from services.worker.torch_groups import TorchDevice


@dataclass
class Gate:
    """Where sends wait while it is shut; counts who came."""

    is_open: threading.Event = field(default_factory=threading.Event)
    num_sends: int = 0
    broken_from: int | None = None  # number of the first send that breaks its group
    breaks: frozenset[int] = frozenset()  # numbers of single ones
    passes_free: int = 0  # sends that need not wait

    def pass_through(self) -> None:
        """Wait for the gate."""
        number, self.num_sends = self.num_sends, self.num_sends + 1
        is_past = self.broken_from is not None and number >= self.broken_from
        if is_past or number in self.breaks:
            raise GroupError("broken by the test")
        if number >= self.passes_free and not self.is_open.wait(20.0):
            raise GroupError("the gate was never opened")


@dataclass
class GatedDevice:
    """services.transfer.device.Device: gloo, with a gate before every send."""

    gate: Gate = field(default_factory=Gate)
    refusal: str | None = None  # why no group can be built
    made: list[GroupSpec] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    kind: str = "cpu"
    group_backend: str = "gloo"

    def export_pool(self) -> bytes:
        """This device is a CPU."""
        raise DeviceError("no pool to export")

    def open_pool(self, handle: bytes, num_blocks: int, block_bytes: int) -> PeerBlocks:
        """This device is a CPU."""
        raise DeviceError("no pool to open")

    def make_group(self, spec: GroupSpec, store: PairStore) -> Group:
        """Build a real group."""
        self.made.append(spec)
        if self.refusal is not None:
            raise GroupError(self.refusal)
        inner = TorchDevice(torch.device("cpu")).make_group(spec, store)
        return _GatedGroup(inner, self.gate, lambda: self.aborts.append(spec.name))


class _GatedGroup:
    def __init__(self, inner: Group, gate: Gate, on_abort: Callable[[], None]) -> None:
        self._inner = inner
        self._gate = gate
        self._on_abort = on_abort

    def host(self, slot: int) -> HostBytes:
        return self._inner.host(slot)

    def send(self, slot: int, size_bytes: int) -> Pending:
        self._gate.pass_through()
        return self._inner.send(slot, size_bytes)

    def recv(self, slot: int, size_bytes: int) -> Pending:
        return self._inner.recv(slot, size_bytes)

    def abort(self) -> None:
        self._inner.abort()
        self._on_abort()
