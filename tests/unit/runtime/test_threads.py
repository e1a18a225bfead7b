from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.runtime.threads import apply_threads, available_cores, default_threads


@pytest.mark.parametrize(
    ("cores", "workers", "threads"), [(2, 2, 1), (2, 3, 1), (8, 2, 4), (7, 2, 3), (4, 0, 4)]
)
def test_cores_are_shared_out(cores: int, workers: int, threads: int) -> None:
    assert default_threads(cores, workers) == threads


def test_counts_and_passive_waiting_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    environ: dict[str, str] = {"OMP_NUM_THREADS": "64"}
    assert apply_threads(environ, 3) == 3
    assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == "3"
    assert environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", object())
    with pytest.raises(RuntimeError, match="before torch is imported"):
        apply_threads({}, 1)


def test_container_quota_caps_the_cores(tmp_path: Path) -> None:
    cpu_max = tmp_path / "cpu.max"
    cpu_max.write_text("100000 100000\n")
    assert available_cores(cpu_max) == 1
    cpu_max.write_text("max 100000\n")
    assert available_cores(cpu_max) == len(os.sched_getaffinity(0))
    assert available_cores(tmp_path / "none") == len(os.sched_getaffinity(0))
