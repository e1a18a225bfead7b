"""Building and reading resolved model directories: configuration, files, digests, manifest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.errors import ModelFileError
from services.common.model_manifest import MANIFEST_NAME, ModelManifest
from services.kv.layout import KvIdentity
from services.models.config import ModelConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"

MANIFEST_FORMAT = 1

_MAX_JSON_BYTES = 16 << 20
_MAX_SHARDS = 1024
_HASH_CHUNK_BYTES = 1 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of bounded size; raise ModelFileError that names the file."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelFileError(f"{path.name} is larger than {_MAX_JSON_BYTES >> 20} MiB")
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFileError(f"{path.parent} has no {path.name}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.name} is not valid JSON") from error
    except OSError as error:
        raise ModelFileError(f"{path.name} cannot be read: {error.strerror}") from error
    if not isinstance(raw, dict):
        raise ModelFileError(f"{path.name} is not a JSON object")
    return raw


def read_config(model_dir: Path) -> ModelConfig:
    """Read config.json, with the extra end-of-sequence ids of generation_config.json if present."""
    raw = read_json(model_dir / CONFIG_NAME)
    config = ModelConfig.from_hf(raw)
    if not (model_dir / GENERATION_CONFIG_NAME).exists():
        return config
    extra = read_json(model_dir / GENERATION_CONFIG_NAME).get("eos_token_id")
    more = ModelConfig.from_hf({**raw, "eos_token_id": extra}).eos_token_ids
    eos = tuple(dict.fromkeys(config.eos_token_ids + more))
    return dataclasses.replace(config, eos_token_ids=eos)


def weight_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files that make up the model, sorted by name."""
    if (model_dir / INDEX_NAME).exists():
        weight_map = read_json(model_dir / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(f"{INDEX_NAME} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    elif (model_dir / WEIGHTS_NAME).exists():
        names = [WEIGHTS_NAME]
    else:
        names = sorted(path.name for path in model_dir.glob("*.safetensors"))
    if not names:
        raise ModelFileError(
            f"{model_dir} has no *.safetensors; pickled checkpoints (*.bin, *.pt) are not loaded"
        )
    if len(names) > _MAX_SHARDS:
        raise ModelFileError(f"{len(names)} weight files, at most {_MAX_SHARDS} are allowed")
    for name in names:
        # A name from the index must stay inside the directory.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFileError(f"{INDEX_NAME} names {name[:128]!r}, which is no safetensors file")
        if not (model_dir / name).is_file():
            raise ModelFileError(f"{model_dir} has no {name}")
    return [model_dir / name for name in names]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def weights_digest(files: Sequence[Path], digest_of: Callable[[Path], str] = file_digest) -> str:
    """SHA-256 over the files' names and digests; any changed byte of any shard changes it."""
    digest = hashlib.sha256(b"isthmus-weights/1")
    for path in sorted(files, key=lambda path: path.name):
        name = path.name.encode()
        digest.update(len(name).to_bytes(4, "little") + name)
        digest.update(bytes.fromhex(digest_of(path)))
    return digest.hexdigest()


def build_manifest(
    model_dir: Path,
    *,
    name: str,
    source: str,
    revision: str = "",
    digest_of: Callable[[Path], str] = file_digest,
) -> ModelManifest:
    """Describe the files of `model_dir`; the caller writes the result with write_manifest()."""
    config = read_config(model_dir)
    if not (model_dir / TOKENIZER_NAME).is_file():
        raise ModelFileError(
            f"{model_dir} has no {TOKENIZER_NAME}; other tokenizer files are not read"
        )
    return ModelManifest(
        format=MANIFEST_FORMAT,
        name=name,
        family=config.family,
        revision=revision,
        source=source,
        weights_digest=weights_digest(weight_files(model_dir), digest_of),
        config_digest=file_digest(model_dir / CONFIG_NAME),
        tokenizer_digest=file_digest(model_dir / TOKENIZER_NAME),
        context_length=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=config.rope,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=_leading_bos(model_dir, config),
    )


def _leading_bos(model_dir: Path, config: ModelConfig) -> int | None:
    """Return the id the tokenizer puts before raw text, or None if it puts none.

    config.json names a bos id even where the tokenizer never uses it, so the tokenizer is asked.
    """
    has_settings = (model_dir / TOKENIZER_CONFIG_NAME).exists()
    settings = read_json(model_dir / TOKENIZER_CONFIG_NAME) if has_settings else {}
    declared = settings.get("add_bos_token")
    if isinstance(declared, bool):
        return config.bos_token_id if declared else None
    tokenizer = load_tokenizer(model_dir / TOKENIZER_NAME)
    plain: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    framed: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    return framed[0] if len(framed) > len(plain) and framed[:1] != plain[:1] else None


def load_tokenizer(path: Path) -> Tokenizer:
    """Parse a tokenizer.json; raise ModelFileError if the library refuses it."""
    from tokenizers import Tokenizer  # workers resolve models and never need it

    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{path.name} is not a readable tokenizer: {error}") from error


def write_manifest(model_dir: Path, manifest: ModelManifest) -> None:
    """Write isthmus.json atomically; it is written last, so its presence means completeness."""
    partial = model_dir / f".{MANIFEST_NAME}.{os.getpid()}"
    partial.write_text(manifest.model_dump_json(indent=2) + "\n")
    partial.replace(model_dir / MANIFEST_NAME)


def identity(
    manifest: ModelManifest, *, hash_scheme: str, adapter_policy: str = "none"
) -> KvIdentity:
    """Return what must be equal on both ends before KV of this model may cross."""
    return KvIdentity(
        model=manifest.name,
        revision=manifest.revision,
        weights_digest=manifest.weights_digest,
        num_layers=manifest.num_layers,
        num_kv_heads=manifest.num_kv_heads,
        head_dim=manifest.head_dim,
        rope=manifest.rope,
        tokenizer_digest=manifest.tokenizer_digest,
        hash_scheme=hash_scheme,
        adapter_policy=adapter_policy,
    )
