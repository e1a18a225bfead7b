"""The on-disk model cache: where it is, locks between processes, directories that appear whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from services.common.errors import ModelFileError
from services.models.resolved import file_digest

CACHE_VARIABLE = "ISTHMUS_CACHE"
LOCK_TIMEOUT_S = 900.0  # longer than a download and a conversion on a slow machine
_LOCK_POLL_S = 0.05
_MAX_DIGESTS = 256


def default_cache_dir() -> Path:
    """Return $ISTHMUS_CACHE, or ~/.cache/isthmus."""
    configured = os.environ.get(CACHE_VARIABLE)
    return Path(configured) if configured else Path.home() / ".cache" / "isthmus"


@contextlib.contextmanager
def file_lock(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold an exclusive lock between processes; it ends with the process, however that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ModelFileError(
                        f"another process has been preparing this model for {timeout_s:.0f} s "
                        f"(lock {path})"
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield


def build_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a new directory aside and rename it to `target`; nobody ever sees half of one.

    The caller holds the lock of `target`, so what earlier, killed attempts left can be removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".partial-{target.name}-"
    for left_over in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_over)
    partial = target.parent / f"{prefix}{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        fill(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class DigestCache:
    """SHA-256 of files by (path, size, modification time), so that big files are read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests: dict[str, str] = self._read()

    def digest(self, path: Path) -> str:
        """Return the file's SHA-256, from memory if the file has not changed."""
        real = path.resolve()
        stat = real.stat()
        key = f"{real}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
        if key not in self._digests:
            self._digests[key] = file_digest(real)
            self._write()
        return self._digests[key]

    def _read(self) -> dict[str, str]:
        try:
            raw = json.loads(self._path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}  # a cache: absent or damaged means empty
        if not isinstance(raw, dict):
            return {}
        return {key: value for key, value in raw.items() if _is_digest(value)}

    def _write(self) -> None:
        """Replace the file at once; of two writers the last wins and the other hashes again."""
        self._digests = {**self._read(), **self._digests}
        recent = dict(list(self._digests.items())[-_MAX_DIGESTS:])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        partial.write_text(json.dumps(recent))
        partial.replace(self._path)


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
