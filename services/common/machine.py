"""What a figure was measured on: the machine and the commit."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Machine:
    """What a figure was measured on."""

    cpu: str
    cores: int
    memory_gib: int
    python: str
    commit: str


def machine() -> Machine:
    """Describe this machine and the commit of the checkout."""
    return Machine(
        cpu=_cpu_name(),
        cores=psutil.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30),
        python=platform.python_version(),
        commit=_commit(),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    root = Path(__file__).resolve().parent.parent.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
