"""The checked tensors of a resolved directory, memory-mapped, in the dtype and place asked for."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from services.common.errors import ModelFileError
from services.models.config import ModelConfig
from services.models.resolved import weight_files
from services.models.safetensors_file import SafetensorsFile, TensorInfo
from services.models.tensors import expected_tensors

_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Old checkpoints store these though they follow from the configuration.
_REDUNDANT = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight")


class Weights:
    """Tensors by name; every one the model needs exists with the right shape, and no other does.

    An unexpected tensor (a bias, a norm) would mean that the model computes something else than
    this code does, so it is refused instead of ignored.
    """

    def __init__(
        self, model_dir: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self._files: dict[str, SafetensorsFile] = {}
        for path in weight_files(model_dir):
            file = SafetensorsFile(path)
            for name in file.tensors:
                if name in self._files:
                    raise ModelFileError(f"{path.name}: tensor {name[:128]!r} is in two shards")
                self._files[name] = file
        self._check(expected_tensors(config))

    def _check(self, expected: dict[str, tuple[int, ...]]) -> None:
        for name, shape in expected.items():
            if name not in self._files:
                raise ModelFileError(f"the model has no tensor {name}")
            info = self._files[name].tensors[name]
            if info.shape != shape:
                raise ModelFileError(f"{name}: shape {info.shape}, config.json says {shape}")
            if info.dtype not in _TORCH_DTYPES:
                raise ModelFileError(f"{name}: {info.dtype} weights are not supported")
        for name in self._files:
            if name not in expected and not _REDUNDANT.fullmatch(name):
                raise ModelFileError(f"tensor {name[:128]!r} does not belong to this model family")

    def get(self, name: str) -> Tensor:
        """Return a tensor; float32 ones on the CPU are views of the mapped file."""
        file = self._files[name]
        tensor = _as_tensor(file, file.tensors[name])
        return tensor.to(device=self.device, dtype=self.dtype)

    def stack(self, *names: str) -> Tensor:
        """Return tensors joined along their rows, to be multiplied in one go."""
        return torch.cat([self.get(name) for name in names])

    def release_pages(self) -> None:
        """Drop the pages that loading read; tensors that are still views fault them in again."""
        for file in {id(file): file for file in self._files.values()}.values():
            file.release_pages()


def _as_tensor(file: SafetensorsFile, info: TensorInfo) -> Tensor:
    dtype = _TORCH_DTYPES[info.dtype]
    if info.begin % dtype.itemsize == 0:
        return torch.frombuffer(file.buffer(info.name), dtype=dtype).view(info.shape)
    # The format does not promise alignment; kernels do need it.
    raw = np.frombuffer(file.buffer(info.name), dtype=np.uint8).copy()
    return torch.from_numpy(raw).view(dtype).view(info.shape)
