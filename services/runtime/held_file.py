"""One process a file: a second one that would write to it does not start."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from services.common.errors import ConfigError


class HeldFile:
    """A lock on `PATH.lock` that ends with the process, whatever way it ends."""

    def __init__(self, path: Path) -> None:
        """Take it; raises ConfigError when another process has it or it cannot be made."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._handle = os.open(path.with_name(f"{path.name}.lock"), flags, 0o600)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._handle)
            raise ConfigError(
                f"{path} is in use by another process; give each router its own router.router_id"
            ) from None

    def release(self) -> None:
        """Let another process have it."""
        os.close(self._handle)
