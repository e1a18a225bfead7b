"""The private directory of a run: sockets, logs, status. Locked while in use, removed at exit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

PREFIX = "isthmus-"
_LOCK = ".lock"
_FACTS = "facts.json"
_MAX_TRIES = 8


class RuntimeDir:
    """A directory of mode 0700 that nobody else uses; `remove` takes everything in it along."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, environ: Mapping[str, str]) -> RuntimeDir:
        """Make one under $XDG_RUNTIME_DIR, or else the temporary directory."""
        base = runtime_base(environ)
        sweep_stale(base)
        for _ in range(_MAX_TRIES):
            # Short on purpose: a Unix socket's path holds 107 bytes.
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            lock_fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
            if (path / _LOCK).exists():
                return cls(path, lock_fd)
            os.close(lock_fd)  # a sweeper came between creating and locking
        raise OSError(f"no runtime directory could be made in {base}")

    def tell(self, facts: str) -> None:
        """Let others of this user know whose directory it is, for as long as it is locked."""
        (self.path / _FACTS).write_text(facts)

    def remove(self) -> None:
        """Delete the directory; harmless when it is gone already."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def runtime_base(environ: Mapping[str, str]) -> Path:
    """Where runtime directories go: a per-user, memory-backed directory if there is one."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    if base and os.access(base, os.W_OK | os.X_OK):
        return Path(base)
    return Path(tempfile.gettempdir())


def running_facts(environ: Mapping[str, str]) -> list[str]:
    """What the owners of directories in use tell about themselves."""
    base = runtime_base(environ)
    sweep_stale(base)  # what is left belongs to processes that live
    found = []
    for path in sorted(base.glob(f"{PREFIX}*/{_FACTS}")):
        with contextlib.suppress(OSError):  # another user's, or just being removed by its owner
            if path.stat().st_uid == os.getuid() and (facts := path.read_text()):
                found.append(facts)  # empty: just being written
    return found


def sweep_stale(base: Path) -> list[Path]:
    """Remove directories whose owner died without cleaning up (its lock is free)."""
    removed = []
    for path in base.glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or just being removed by its owner
            if path.stat().st_uid == os.getuid() and _remove_if_unlocked(path):
                removed.append(path.parent)
    return removed


def _remove_if_unlocked(lock_path: Path) -> bool:
    fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Removed under the lock: an owner that is just starting sees that its file is gone.
        shutil.rmtree(lock_path.parent, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
