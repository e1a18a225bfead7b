"""What computes a worker's steps: the model, or anything else that fills blocks and draws tokens.

Everything else of a worker process is the same whatever stands behind this seam, and needs no
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from services.common.config import IsthmusConfig
from services.common.model_manifest import ModelManifest
from services.engine.loop import Executor
from services.engine.residency import BlockContent
from services.kv.memory import KvPoolMemory
from services.transfer.device import Device


class Backend(Protocol):
    """A loaded model, before it is given a pool."""

    @property
    def kernel_path(self) -> str:
        """Which implementation computes, for status and logs."""
        ...

    @property
    def device(self) -> Device | None:
        """What the transfer layer may ask of the device; None if the pool is plain memory."""
        ...

    def attach(
        self, memory: KvPoolMemory, manifest: ModelManifest
    ) -> tuple[BlockContent, Executor]:
        """Compute over this pool from now on."""
        ...


LoadBackend = Callable[[IsthmusConfig, Path], Backend]  # configuration, resolved model directory
