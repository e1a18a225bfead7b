"""Writing a file that holds secrets: readable by its owner only, and never half there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_private(path: Path, text: str) -> None:
    """Put `text` in the place of a file at once, making its folder if need be; mode 0600."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # mkstemp makes it 0600; rename is atomic, so a reader sees the old file or the new one.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
