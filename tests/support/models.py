"""Model directories that many tests share: the default model's real weights, and a toy."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.models import catalog
from tests.support.toy_model import make_toy_model


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Resolved directory of the default model; its first use on a machine downloads it once."""
    return catalog.resolve("smollm2")


@pytest.fixture(scope="session")
def toy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Resolved directory of a two-layer random Llama; tests must not change it."""
    return make_toy_model(tmp_path_factory.mktemp("toy") / "model")
