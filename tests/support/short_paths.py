"""Temporary directories whose paths leave room for a Unix socket's name, which has 107 bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Directory of one test; pytest's own names user, run, process and test in its path."""
    with tempfile.TemporaryDirectory(prefix="it-", ignore_cleanup_errors=True) as path:
        yield Path(path)
