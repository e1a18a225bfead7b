"""Fixtures every test may ask for, and the thread policy workers run with."""

from __future__ import annotations

import os

# Before torch loads its OpenMP runtime: threads that spin at every barrier make tests that share
# cores with anything else several times slower. `isthmus up` sets the same for its workers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest_plugins = ["tests.support.models"]
