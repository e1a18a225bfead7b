from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[3]


class Run:
    """A supervisor process and its status file."""

    def __init__(self, tmp_path: Path, words: list[str]) -> None:
        self.status_file = tmp_path / "status.json"
        self.log_dir = tmp_path
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.fake_cluster"),
                *(str(self.status_file), str(tmp_path), *words),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def status(self) -> dict[str, Any]:
        try:
            loaded: dict[str, Any] = json.loads(self.status_file.read_text())
        except FileNotFoundError:
            return {"state": "none", "processes": []}
        return loaded

    def entry(self, name: str) -> dict[str, Any]:
        return next(p for p in self.status()["processes"] if p["name"] == name)

    def wait(self, what: Callable[[], bool], timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < end, self.status()
            time.sleep(0.02)

    def wait_ready(self) -> None:
        self.wait(lambda: self.status()["state"] == "ready")

    def finish(self, timeout_s: float = 120) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out

    def pids(self) -> list[int]:
        return [p["pid"] for p in self.status()["processes"] if p["pid"]]


@contextmanager
def running(tmp_path: Path, *words: str) -> Iterator[Run]:
    run = Run(tmp_path, list(words))
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()


def test_starts_all_reports_addresses_and_stops_routers_first(tmp_path: Path) -> None:
    with running(tmp_path, "serve", "serve") as run:
        run.wait_ready()
        pids = run.pids()
        assert [p["role"] for p in run.status()["processes"]] == ["decode", "decode", "router"]
        run.process.send_signal(signal.SIGINT)
        code, out = run.finish()
    assert code == 0
    assert f"http://{run.entry('router-0')['http']}/v1" in out
    lines = out.splitlines()
    assert lines[0] == "starting 2 decode, 1 router ..."
    assert lines[-2].startswith("stopping; waiting up to 1 s for running requests")
    assert lines[-1] == "stopped"
    assert (tmp_path / "stop-order").read_text().split() == ["router", "serve", "serve"]
    assert run.status()["state"] == "stopped"
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def test_killed_process_is_back_within_seconds(tmp_path: Path) -> None:
    with running(tmp_path, "serve") as run:
        run.wait_ready()
        before = run.entry("decode-0")
        os.kill(before["pid"], signal.SIGKILL)
        run.wait(lambda: run.entry("decode-0")["restarts"] == 1)
        run.wait(lambda: run.status()["state"] == "ready")
        after = run.entry("decode-0")
        assert after["pid"] != before["pid"]
        run.process.send_signal(signal.SIGTERM)
        code, out = run.finish()
    assert code == 0
    assert "decode-0: waiting (killed by SIGKILL)" in out


def test_process_that_cannot_start_ends_everything_and_quotes_its_log(tmp_path: Path) -> None:
    with running(tmp_path, "serve", "exit-2") as run:
        code, out = run.finish()
    assert code == 1
    assert "decode-1: failed: exited with 2" in out
    assert "    about to fail" in out
    assert run.status()["state"] == "failed"
    assert [pid for pid in run.pids() if psutil.pid_exists(pid)] == []


def test_crash_loop_is_given_up(tmp_path: Path) -> None:
    with running(tmp_path, "exit-1") as run:
        code, out = run.finish()
    assert code == 1
    assert "5 times in a row" in out


def test_process_that_does_not_stop_is_killed_at_the_limit(tmp_path: Path) -> None:
    """RB-109: the drain has a limit."""
    with running(tmp_path, "slow-stop") as run:
        run.wait_ready()
        pids = run.pids()
        run.process.send_signal(signal.SIGTERM)
        code, _ = run.finish()  # which waits less than the process would take
    assert code == 0
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def test_second_signal_does_not_wait_for_the_drain(tmp_path: Path) -> None:
    """RB-109: asked twice, everything is gone at once: the drain lasts longer than this waits."""
    with running(tmp_path, "drain-500", "slow-stop") as run:
        run.wait_ready()
        pids = run.pids()
        run.process.send_signal(signal.SIGTERM)
        run.wait((tmp_path / "stop-order").exists)  # the router is gone, the worker drains
        run.process.send_signal(signal.SIGTERM)
        run.finish()
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def test_frozen_process_shows_and_is_stopped_all_the_same(tmp_path: Path) -> None:
    with running(tmp_path, "serve") as run:
        run.wait_ready()
        pid = run.entry("decode-0")["pid"]
        os.kill(pid, signal.SIGSTOP)
        run.wait(lambda: run.status()["state"] != "ready")
        told = run.status()  # one reading: no file says both "ready" and "unready"
        assert told["state"] == "degraded"
        assert [p["state"] for p in told["processes"] if p["name"] == "decode-0"] == ["unready"]
        run.process.send_signal(signal.SIGTERM)
        code, _ = run.finish()
    assert code == 0
    assert not psutil.pid_exists(pid)


def test_signal_while_starting_stops_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "never-ready") as run:
        run.wait(lambda: len(run.pids()) == 2)
        run.process.send_signal(signal.SIGTERM)
        code, _ = run.finish()
    assert code == 0
    assert run.status()["state"] == "stopped"


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    with running(tmp_path, "serve") as run:
        run.wait_ready()
        pids = run.pids()
        run.process.kill()
        run.process.communicate()
        run.wait(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
