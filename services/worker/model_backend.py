"""The backend of every real worker: a torch model over the pool."""

from __future__ import annotations

from pathlib import Path

import torch

from kernels import dispatch
from services.common.config import IsthmusConfig
from services.common.errors import ConfigError
from services.common.model_manifest import ModelManifest
from services.engine.loop import Executor
from services.engine.residency import BlockContent
from services.engine.runner import KvStore, Runner
from services.kv.memory import KvPoolMemory
from services.models.base import Model
from services.models.load import load_model
from services.runtime.threads import available_cores
from services.worker.torch_groups import TorchDevice


def load_model_backend(config: IsthmusConfig, model_dir: Path) -> ModelBackend:
    """Set the compute threads and load the weights; raises ConfigError without the device."""
    if config.worker.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("worker.device is cuda, but this torch sees no CUDA device")
    threads = config.worker.threads or available_cores()
    torch.set_num_threads(threads)
    dispatch.set_num_threads(threads)
    model = load_model(model_dir, device=config.worker.device, dtype=config.worker.dtype)
    return ModelBackend(model)


class ModelBackend:
    """A loaded model (services.worker.backend.Backend)."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.kernel_path = dispatch.describe(model.device)
        self.device = TorchDevice(model.device)

    def attach(
        self, memory: KvPoolMemory, manifest: ModelManifest
    ) -> tuple[BlockContent, Executor]:
        """Compute over this pool from now on."""
        store = KvStore(memory, self._model.device)
        self.device.use_pool(store.kv_pool)
        return store, Runner(self._model, store, manifest.eos_token_ids)
