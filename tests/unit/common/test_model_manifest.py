from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import ModelFileError
from services.common.model_manifest import MANIFEST_NAME, ModelManifest, read_manifest


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    manifest = ModelManifest.model_validate(
        {
            "name": "m", "family": "llama", "weights_digest": "ab" * 32, "config_digest": "c",
            "tokenizer_digest": "t", "context_length": 8, "vocab_size": 8, "num_layers": 1,
            "num_kv_heads": 1, "head_dim": 1, "rope": "{}",
        }
    )  # fmt: skip
    (tmp_path / MANIFEST_NAME).write_text(manifest.model_dump_json())
    return tmp_path


@pytest.mark.parametrize("digest", ["", "abababab", "ab" * 32])
def test_weights_that_are_the_wanted_ones_are_taken(model_dir: Path, digest: str) -> None:
    assert read_manifest(model_dir, digest).name == "m"


def test_other_weights_are_refused_with_both_digests(model_dir: Path) -> None:
    with pytest.raises(ModelFileError, match=r"weights abab.* wants deadbeef"):
        read_manifest(model_dir, "deadbeef")
