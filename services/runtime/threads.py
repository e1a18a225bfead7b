"""Compute threads of a process: how many there may be, and how they wait for work."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_COUNT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def available_cores(cpu_max: Path = _CGROUP_CPU_MAX) -> int:
    """Cores this process may use: its affinity, capped by the container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, _, period = cpu_max.read_text().partition(" ")
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores  # no such controller here: the affinity is all there is to know
    return cores


def default_threads(cores: int, num_workers: int) -> int:
    """Share the cores out among the workers of one machine, at least one each."""
    return max(1, cores // max(1, num_workers))


def apply_threads(environ: MutableMapping[str, str], threads: int) -> int:
    """Set the thread count and passive waiting; must come before torch is imported.

    Idle OpenMP threads spin by default. Two workers on two shared cores then take each other's
    time, and a step takes several times as long as with sleeping threads.

    Args:
        environ: `os.environ` of the process that will compute.
        threads: 0 = one per available core.
    """
    if "torch" in sys.modules:
        raise RuntimeError("threads must be set before torch is imported: OpenMP reads them once")
    count = threads if threads > 0 else available_cores()
    for name in _COUNT_VARIABLES:
        environ[name] = str(count)
    environ["OMP_WAIT_POLICY"] = "PASSIVE"
    return count
