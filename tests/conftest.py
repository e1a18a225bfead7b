"""Fixtures every test may ask for, and the thread policy workers run with."""

from __future__ import annotations

import os

from hypothesis import settings

from kernels.cpu import kv_blocks

# Before torch loads its OpenMP runtime: threads that spin at every barrier make tests that share
# cores with anything else several times slower. `isthmus up` sets the same for its workers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# An example that takes long says something about the machine, which others use too.
settings.register_profile("isthmus", deadline=None)
settings.load_profile("isthmus")

pytest_plugins = ["tests.support.models", "tests.support.short_paths"]


def pytest_configure() -> None:
    """Compile what tests with a deadline would otherwise wait for."""
    kv_blocks.available()
