"""Run a command that says nothing for minutes, and say now and then that it still runs.

    python tools/tell_while.py "installing" .venv -- pip install --quiet ...

prints a line a minute with the size of the directory so far; its exit status is the command's.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

EVERY_S = 60.0


class Running(Protocol):
    """What is asked of a process."""

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status; raise TimeoutExpired."""
        ...


def wait_telling(process: Running, tell: Callable[[int], None], every_s: float = EVERY_S) -> int:
    """Return the exit status; every while, tell how many seconds have passed."""
    passed_s = 0.0
    while True:
        try:
            return process.wait(every_s)
        except subprocess.TimeoutExpired:
            passed_s += every_s
            tell(round(passed_s))


def size_mib(directory: Path) -> int:
    """Size of all files; those that come and go meanwhile do not matter."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:
            continue
    return total >> 20


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    what, directory, _, *command = arguments

    def tell(passed_s: int) -> None:
        size = size_mib(Path(directory))
        print(f"still {what}: {passed_s // 60} min, {size} MiB so far", flush=True)

    with subprocess.Popen(command) as process:
        return wait_telling(process, tell)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
