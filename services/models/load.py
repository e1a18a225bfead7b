"""Loading a model from a resolved directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from services.common.errors import ModelFileError
from services.common.model_manifest import ModelManifest, read_manifest
from services.models.base import Model
from services.models.llama import build_llama
from services.models.qwen import build_qwen
from services.models.resolved import (
    CONFIG_NAME,
    TOKENIZER_NAME,
    file_digest,
    read_config,
    weight_files,
    weights_digest,
)
from services.models.weights import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_BUILDERS: dict[str, Callable[[Weights], Model]] = {
    "llama": build_llama,
    "mistral": build_llama,
    "qwen2": build_qwen,
    "qwen3": build_qwen,
}


def load_model(
    model_dir: Path, *, device: str = "cpu", dtype: str = "float32", verify_weights: bool = False
) -> Model:
    """Load a resolved directory.

    Args:
        model_dir: made by services.models.catalog.resolve().
        device: "cpu" or "cuda".
        dtype: "float32" or "bfloat16".
        verify_weights: also hash the weights and compare with the manifest (about a second
            per gigabyte); configuration and tokenizer are always compared.
    """
    if dtype not in DTYPES:
        raise ModelFileError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    verify(model_dir, read_manifest(model_dir), weights=verify_weights)
    config = read_config(model_dir)
    if config.family not in _BUILDERS:
        raise ModelFileError(f"model family {config.family!r} has no implementation")
    with torch.inference_mode():
        weights = Weights(model_dir, config, device=torch.device(device), dtype=DTYPES[dtype])
        model = _BUILDERS[config.family](weights)
    weights.release_pages()
    return model


def verify(model_dir: Path, manifest: ModelManifest, *, weights: bool) -> None:
    """Compare files with the manifest; raise ModelFileError naming the one that changed."""
    for name, expected in (
        (CONFIG_NAME, manifest.config_digest),
        (TOKENIZER_NAME, manifest.tokenizer_digest),
    ):
        if not (model_dir / name).is_file():
            raise ModelFileError(f"{model_dir} has no {name}")
        if file_digest(model_dir / name) != expected:
            raise ModelFileError(f"{model_dir}/{name} is not the file the manifest describes")
    if weights and weights_digest(weight_files(model_dir)) != manifest.weights_digest:
        raise ModelFileError(f"the weights in {model_dir} are not those the manifest describes")
