from __future__ import annotations

import os
from pathlib import Path

from services.runtime.runtime_dir import RuntimeDir, runtime_base, sweep_stale


def test_directory_is_private_and_goes_with_everything_in_it(tmp_path: Path) -> None:
    made = RuntimeDir.create({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert made.path.parent == tmp_path
    assert made.path.stat().st_mode & 0o777 == 0o700
    (made.path / "sub").mkdir()
    (made.path / "sub" / "file").write_text("x")
    made.remove()
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_next_run_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    left = tmp_path / "isthmus-dead"
    left.mkdir()
    (left / ".lock").touch()
    (left / "socket").touch()
    foreign = tmp_path / "isthmus-other"
    foreign.mkdir()
    made = RuntimeDir.create({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([made.path.name, "isthmus-other"])
    made.remove()


def test_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    made = RuntimeDir.create({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert sweep_stale(tmp_path) == []
    assert made.path.exists()
    made.remove()


def test_without_a_usable_base_the_temporary_directory_serves(tmp_path: Path) -> None:
    assert runtime_base({"XDG_RUNTIME_DIR": str(tmp_path / "none")}) != tmp_path / "none"
    assert os.access(runtime_base({}), os.W_OK)
