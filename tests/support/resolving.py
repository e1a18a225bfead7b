"""Resolves a model in a process of its own; imports no torch, so that it starts quickly."""

from __future__ import annotations

import json
import os
from pathlib import Path

from services.models import catalog


def resolve_and_report(model: str, cache: str, results: str) -> None:
    """Write `[path, whether this process did the conversion]` to a file named by the pid."""
    steps: list[str] = []
    path = catalog.resolve(model, Path(cache), progress=lambda what, _share: steps.append(what))
    Path(results, str(os.getpid())).write_text(json.dumps([str(path), "dequantising" in steps]))
