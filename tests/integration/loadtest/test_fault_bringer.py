"""Faults reach the processes of the cluster that was named, and no others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtest.fault_bringer import FaultBringer
from loadtest.faults import BroughtFault, Fault
from services.common.clock import SystemClock
from services.common.errors import ConfigError
from tests.support.waiting import wait_for

pytestmark = pytest.mark.integration

URL = "grpc://127.0.0.1:7001"
WAIT_S = 60.0
_SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes of this one, which plays the supervisor."""
    started = [subprocess.Popen(_SLEEP) for _ in range(2)]
    yield started
    for child in started:
        child.kill()
        child.wait()


def write_status(path: Path, pids: list[int], *, pid: int | None = None, restarts: int = 0) -> None:
    entries: list[dict[str, Any]] = [
        {"name": "store", "role": "store", "pid": None, "state": "ready"},
        {"name": "router-0", "role": "router", "pid": pids[0], "state": "ready",
         "grpc": "127.0.0.1:7001", "http": "127.0.0.1:8001", "restarts": restarts},
        {"name": "decode-0", "role": "decode", "pid": None, "state": "waiting"},
        {"name": "decode-1", "role": "decode", "pid": pids[1], "state": "ready",
         "restarts": restarts},
    ]  # fmt: skip
    status = {
        "state": "ready",
        "pid": os.getpid() if pid is None else pid,
        "started_unix_ms": SystemClock().unix_ms(),
        "model": "m",
        "processes": entries,
    }
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps(status))
    whole.replace(path)


async def bring(path: Path, *faults: Fault) -> list[BroughtFault]:
    brought: list[BroughtFault] = []
    async with asyncio.timeout(WAIT_S):
        await FaultBringer(path, faults, URL).bring(lambda: 5.0, brought)
    return brought


async def test_a_kill_is_for_the_first_of_a_role_that_is_ready(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    path = tmp_path / "status.json"
    pids = [child.pid for child in children]
    write_status(path, pids)
    bringing = asyncio.ensure_future(bring(path, Fault(at_s=1, action="kill", process="decode")))
    assert await asyncio.to_thread(children[1].wait, WAIT_S) == -signal.SIGKILL
    write_status(path, pids, restarts=1)  # as a supervisor does

    (brought,) = await bringing
    assert (brought.process, brought.failure) == ("decode-1", "")
    assert brought.back_s == 0.0  # by the test's clock
    assert children[0].poll() is None


async def test_what_was_frozen_goes_on_also_when_the_run_ends(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    path = tmp_path / "status.json"
    write_status(path, [child.pid for child in children])
    fault = Fault(at_s=0, action="freeze", process="router-0", for_s=500)
    bringing = asyncio.ensure_future(bring(path, fault))
    frozen = psutil.Process(children[0].pid)
    await asyncio.to_thread(
        wait_for, lambda: frozen.status() == psutil.STATUS_STOPPED, WAIT_S, "frozen"
    )
    bringing.cancel()
    await asyncio.gather(bringing, return_exceptions=True)
    wait_for(lambda: frozen.status() != psutil.STATUS_STOPPED, WAIT_S, "goes on")


async def test_a_process_of_somebody_else_is_left_alone(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    path = tmp_path / "status.json"
    supervisor, stranger = children
    write_status(path, [stranger.pid, stranger.pid], pid=supervisor.pid)

    (brought,) = await bring(path, Fault(at_s=0, action="kill", process="decode-1"))
    assert "is no process of the cluster" in brought.failure
    with pytest.raises(subprocess.TimeoutExpired):
        stranger.wait(0.05)


def test_what_cannot_be_is_refused_before_the_load(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    path = tmp_path / "status.json"
    pids = [child.pid for child in children]
    fault = Fault(at_s=0, action="restart", process="decode")
    write_status(path, pids)
    with pytest.raises(ConfigError, match="is no router of that cluster"):
        FaultBringer(path, [fault], "grpc://127.0.0.1:7002")
    with pytest.raises(ConfigError, match="there is no cache in"):
        FaultBringer(path, [Fault(at_s=0, action="kill", process="cache")], URL)
    ended = subprocess.Popen((sys.executable, "-c", ""))
    ended.wait()
    write_status(path, pids, pid=ended.pid)
    with pytest.raises(ConfigError, match="that cluster runs no more"):
        FaultBringer(path, [fault], URL)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a file that"):
        FaultBringer(path, [fault], URL)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        FaultBringer(path, [fault], URL)
