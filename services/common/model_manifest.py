"""The manifest of a resolved model directory (`isthmus.json`), readable without torch.

A resolved directory holds `isthmus.json`, `config.json`, `*.safetensors`, `tokenizer.json` and
`tokenizer_config.json` (with the chat template, if the model has one). It is made once by
`isthmus model get` or `isthmus up` from a name, a Hugging Face directory or a GGUF file.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.errors import ModelFileError

MANIFEST_NAME = "isthmus.json"
_MAX_MANIFEST_BYTES = 1 << 20


class ModelManifest(BaseModel):
    """What every process must know about a model before it loads any weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = Field(1, description="version of this file's format")
    name: str = Field(min_length=1, max_length=256, description="name clients use")
    family: str = Field(description="llama, qwen2, qwen3, ...")
    revision: str = Field("", description="upstream revision, if known")
    source: str = Field("", description="what it was made from: package, directory or file name")
    weights_digest: str = Field(description="SHA-256 over the safetensors files, hex")
    config_digest: str = Field(description="SHA-256 of config.json, hex")
    tokenizer_digest: str = Field(description="SHA-256 of tokenizer.json, hex")
    context_length: int = Field(gt=0, description="trained context, tokens")
    vocab_size: int = Field(gt=0, description="rows of the embedding")
    num_layers: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rope: str = Field(description="rope configuration, canonical JSON")
    eos_token_ids: tuple[int, ...] = Field((), description="ids that end a sequence")
    bos_token_id: int | None = Field(None, description="id put before raw text, if the model does")


def read_manifest(model_dir: Path, weights_digest: str = "") -> ModelManifest:
    """Read and check `isthmus.json`; raise ModelFileError that says what is wrong.

    Where `weights_digest` is given, weights whose digest begins otherwise are wrong.
    """
    manifest = _read(model_dir)
    if not manifest.weights_digest.startswith(weights_digest):
        raise ModelFileError(
            f"{model_dir} has weights {manifest.weights_digest[:16]}..., "
            f"model.weights_digest wants {weights_digest}"
        )
    return manifest


def _read(model_dir: Path) -> ModelManifest:
    path = model_dir / MANIFEST_NAME
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ModelFileError(f"{MANIFEST_NAME} of the model is larger than 1 MiB")
        return ModelManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ModelFileError(
            f"{model_dir} is not a resolved model directory (no {MANIFEST_NAME}); "
            "run `isthmus model get NAME|DIR|FILE.gguf` first"
        ) from None
    except ValidationError as error:
        raise ModelFileError(f"{path}: {error}") from None
