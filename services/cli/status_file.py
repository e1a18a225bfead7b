"""The file `--json-status` keeps up to date for scripts: pids, roles, addresses, states."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


class StatusFile:
    """Rewritten as a whole and renamed into place, so that a reader never sees half of it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last = ""

    def write(self, body: Mapping[str, object]) -> None:
        """Write when something changed."""
        text = json.dumps(body, indent=2) + "\n"
        if self._path is None or text == self._last:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_text(text)
        os.replace(temporary, self._path)
        self._last = text
