"""Files that hold secrets."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from services.common.private_file import replace_private


def test_file_is_its_owners_alone_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "keys.json"
    for text in ("first", "second ü"):
        replace_private(path, text)
        assert path.read_text(encoding="utf-8") == text
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    replace_private(path, "old")

    def full(_fd: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        replace_private(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [path.name]
