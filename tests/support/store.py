"""A real embedded store per test, and the means to hurt it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.registry.embedded import EmbeddedStore


@contextmanager
def running_store(*, use_tcp: bool = False) -> Iterator[EmbeddedStore]:
    """Run a store in a short temporary directory (socket paths are limited)."""
    runtime_dir = Path(tempfile.mkdtemp(prefix="isthmus-store-"))
    try:
        store = EmbeddedStore.start(runtime_dir, use_tcp=use_tcp)
        try:
            yield store
        finally:
            store.stop()
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    """A store of its own for one test."""
    with running_store() as handle:
        yield handle


@pytest.fixture
def store_url(store: EmbeddedStore) -> str:
    """Address of a fresh, empty store."""
    return store.url
