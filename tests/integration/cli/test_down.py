"""`isthmus down` ends the one cluster that is meant, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli import exits
from services.cli.down import end_actors
from services.cli.main import run

pytestmark = pytest.mark.integration

# The part of `isthmus up` that `down` sees: a directory in use, a process that ends when asked.
UP = """
import json, os, signal
from services.runtime.runtime_dir import RuntimeDir
made = RuntimeDir.create(os.environ)
made.tell(json.dumps({"pid": os.getpid()}))
signal.signal(signal.SIGTERM, lambda *_: None)
print("up", flush=True)
signal.pause()
made.remove()
"""


@pytest.fixture
def ups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", UP], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        for _ in range(2)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=20)


def test_of_several_the_one_that_is_named_is_ended(
    ups: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = ups
    assert run(["down"]) == exits.FAILED
    told = capsys.readouterr().err
    assert str(first.pid) in told
    assert str(second.pid) in told
    assert run(["down", "--pid", str(first.pid)]) == exits.OK
    assert first.wait(20) == 0
    assert second.poll() is None
    assert run(["down"]) == exits.OK  # the only one now
    assert second.wait(20) == 0
    assert run(["down"]) == exits.FAILED
    assert "none" in capsys.readouterr().err


def test_a_process_that_is_no_cluster_is_left_alone(
    ups: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["down", "--pid", str(os.getpid())]) == exits.FAILED
    assert "which one" in capsys.readouterr().err


def test_address_and_namespace_belong_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["down", "--ray-address", "auto"]) == exits.USAGE


class FakeWorker:
    """Ends by itself, or only when it is killed."""

    def __init__(self, *, heeds_stop: bool) -> None:
        self._heeds_stop = heeds_stop
        self.returncode: int | None = None
        self.was_killed = False

    def stop(self) -> None:
        if self._heeds_stop:
            self.returncode = 0

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            self.returncode, self.was_killed = -9, True


class FakeCluster:
    """Workers somebody left."""

    namespace = "lost"

    def __init__(self, workers: list[FakeWorker]) -> None:
        self._workers = workers
        self.is_open = True

    def adopt(self) -> list[FakeWorker]:
        return self._workers

    def close(self) -> None:
        self.is_open = False


def test_actors_that_were_left_are_drained_and_those_that_hang_are_killed() -> None:
    quick, stuck = FakeWorker(heeds_stop=True), FakeWorker(heeds_stop=False)
    cluster = FakeCluster([stuck, quick])
    assert end_actors(cluster, 0.3) == exits.OK  # type: ignore[arg-type]
    assert (quick.was_killed, stuck.was_killed) == (False, True)
    assert not cluster.is_open
