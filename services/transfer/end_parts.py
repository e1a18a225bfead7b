"""What both transfer ends of one worker are made of."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from services.common.clock import Clock
from services.common.errors import ConfigError
from services.kv.attached import PoolBases
from services.kv.layout import KvIdentity, KvLayout
from services.kv.memory import KvPoolMemory
from services.runtime.fault_points import FaultPoints
from services.transfer.config import TransferConfig, ordered_planes
from services.transfer.device import Device
from services.transfer.handshake import LocalEnd, host_id
from services.transfer.planes import is_for_device


@dataclass(frozen=True, slots=True)
class EndParts:
    """Who the worker is, its pool, and its limits."""

    memory: KvPoolMemory
    identity: KvIdentity
    worker_id: str
    incarnation: int
    clock: Clock
    config: TransferConfig
    faults: FaultPoints = field(default_factory=FaultPoints)
    bases: PoolBases | None = None  # None = the engine cannot read a peer's pool in place
    device: Device | None = None  # None: plain memory, and nothing of torch is loaded

    @property
    def layout(self) -> KvLayout:
        """How the pool's blocks are laid out."""
        return self.memory.layout

    def local_end(self) -> LocalEnd:
        """Return what HELLO says of this worker, on every plane it allows.

        Raises:
            ConfigError: it could use none of them, so every hand-off would be computed twice.
        """
        device = "cpu" if self.device is None else self.device.kind
        planes = ordered_planes(self.config)
        if not any(is_for_device(plane, device) for plane in planes):
            raise ConfigError(f"transfer.planes: a pool on {device} can use none of {list(planes)}")
        return LocalEnd(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            host_id=host_id(),
            uid=os.geteuid(),
            identity=self.identity,
            layout=self.layout,
            planes=planes,
            wire_dtype=self.config.wire_dtype,
            device=device,
            group_backend="" if self.device is None else self.device.group_backend,
        )


@dataclass(frozen=True, slots=True)
class ListenAt:
    """Where a source can be reached."""

    host: str
    runtime_dir: Path  # of the socket that hands out the pool
    advertise: str | None = None  # "host:port" of tickets, where it is not the bound one
    port: int = 0  # 0 = any free
