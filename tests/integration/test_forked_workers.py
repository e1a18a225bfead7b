"""Scripted workers as forks: real processes, each with its own life, environment, log and end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.chaos.forking import SCRIPTED, Forks, ZygoteLost
from services.chaos.scripted_model import make_scripted_model
from services.registry.embedded import EmbeddedStore
from services.runtime.process import Child

pytestmark = pytest.mark.integration

READY = "service.ready"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as made:
        yield made


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cluster")
    model_dir = make_scripted_model(folder / "model")
    store = EmbeddedStore.start(folder)
    path = folder / "isthmus.yaml"
    path.write_text(
        f"model: {{name: '{model_dir}'}}\n"
        f"store: {{url: '{store.url}'}}\n"
        "worker: {num_blocks: 300, threads: 1, drain_s: 0.5}\n"
    )
    yield path
    store.stop()


def worker(name: str, config: Path, forks: Forks, tmp_path: Path, **environ: str) -> Child:
    runtime_dir = tmp_path / name
    runtime_dir.mkdir(mode=0o700)
    argv = [sys.executable, "-P", "-m", SCRIPTED, "--config", str(config), "--worker-id", name]
    argv += ["--role", "prefill", "--runtime-dir", str(runtime_dir)]
    log = tmp_path / f"{name}.log"
    return Child(name, argv, {**os.environ, **environ}, log, forks.launch)


def wait_until_ready(child: Child, num_lives: int = 1, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while child.log_path.read_text().count(READY) < num_lives:
        assert child.is_running, child.tail()
        assert time.monotonic() < end, child.tail()
        time.sleep(0.005)


def test_every_fork_is_a_process_that_serves_drains_and_ends(
    forks: Forks, config: Path, tmp_path: Path
) -> None:
    children = [worker(f"w{i}", config, forks, tmp_path) for i in range(2)]
    for child in children:
        child.spawn()
    for child in children:
        wait_until_ready(child)
        assert child.pid is not None
        process = psutil.Process(child.pid)
        assert os.getsid(child.pid) == child.pid
        assert process.ppid() != os.getpid()  # its zygote is its parent
        child.send(signal.SIGTERM)
    for child in children:
        assert child.wait(10)
        assert child.poll() == 0
        assert "service.stopped" in child.log_path.read_text()


def test_a_killed_fork_says_so_and_lives_again(forks: Forks, config: Path, tmp_path: Path) -> None:
    child = worker("again", config, forks, tmp_path)
    for life in range(1, 3):
        child.spawn()
        wait_until_ready(child, life)
        child.send(signal.SIGKILL)
        assert child.wait(10)
        assert child.poll() == -signal.SIGKILL
        child.send(signal.SIGTERM)  # nobody there any more


def test_a_fork_has_the_environment_it_was_given(
    forks: Forks, config: Path, tmp_path: Path
) -> None:
    child = worker("strict", config, forks, tmp_path, ISTHMUS_FAULT_POINT="nowhere:1")
    child.spawn()
    assert child.wait(20)
    assert child.poll() == 2
    assert "ISTHMUS_FAULT_POINT" in "".join(child.tail())


def test_forks_end_with_their_zygote(config: Path, tmp_path: Path) -> None:
    """RB-112: nothing is left behind by a parent that went away."""
    with Forks() as forks:
        child = worker("orphan", config, forks, tmp_path)
        child.spawn()
        wait_until_ready(child)
        assert child.pid is not None
        process = psutil.Process(child.pid)
    process.wait(10)
    with pytest.raises((ZygoteLost, OSError, ValueError)):
        child.poll()


def test_another_program_is_refused(forks: Forks, tmp_path: Path) -> None:
    child = Child("other", [sys.executable, "-c", "pass"], {}, tmp_path / "log", forks.launch)
    with pytest.raises(ValueError, match="a zygote starts"):
        child.spawn()


def test_a_start_takes_a_fraction_of_a_second_of_cpu(
    forks: Forks, config: Path, tmp_path: Path
) -> None:
    """A program of its own needs some 0.7 s; the aim is 0.2 s, and 0.05 s is usual."""
    took = []
    for life in range(3):
        child = worker(f"quick{life}", config, forks, tmp_path)
        child.spawn()
        wait_until_ready(child)
        assert child.pid is not None
        times = psutil.Process(child.pid).cpu_times()
        took.append(times.user + times.system)
        child.send(signal.SIGKILL)
        assert child.wait(10)
    assert min(took) < 0.2
