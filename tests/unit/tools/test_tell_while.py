"""A silent command is told of every minute, and its exit status is passed on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.tell_while import main, size_mib, wait_telling


class Slow:
    """A process that ends at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def wait(self, timeout: float | None = None) -> int:
        """Note the look."""
        self.looks += 1
        if self.looks < 3:
            raise subprocess.TimeoutExpired("slow", timeout or 0.0)
        return 7


def test_a_line_a_minute_until_it_ends_and_its_exit_status() -> None:
    told: list[int] = []
    assert wait_telling(Slow(), told.append, 60.0) == 7
    assert told == [60, 120]


def test_a_quick_command_is_not_told_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["working", str(tmp_path), "--", sys.executable, "-c", "raise SystemExit(3)"]
    assert main(words) == 3
    assert capfd.readouterr().out == ""


def test_size_is_that_of_all_files_below(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(bytes(3 << 20))
    assert size_mib(tmp_path) == 3
