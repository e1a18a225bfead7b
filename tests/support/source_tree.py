"""Every Python file of the project, for tests that scan what is written in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def faults_in(folders: Sequence[str], faults: Callable[[str], Iterable[str]]) -> list[str]:
    """Return "path:fault" for each fault found in a file's text; generated code is left out."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 100
    return [
        f"{path.relative_to(ROOT)}:{fault}"
        for path in files
        if path.parent.name != "pb"
        for fault in faults(path.read_text())
    ]
