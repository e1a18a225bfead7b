from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]


def start(body: str, drain_s: float = 5.0) -> subprocess.Popen[str]:
    """Run a service in a process of its own: signals belong to a process, not to a test."""
    code = f"""
import asyncio, sys, time
from services.runtime.run import Phases, run_service
def say(word): print(word, flush=True)
{textwrap.dedent(body)}
phases = Phases(start, drain, stop, globals().get("failed"))
sys.exit(run_service(phases, drain_s={drain_s}))
"""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


BASIC = """
async def start(): say("started")
async def drain(): say("drained")
async def stop(): say("stopped")
"""
NEVER_DRAINS = """
async def start(): say("started")
async def drain():
    say("draining")
    await asyncio.sleep(60)
async def stop(): say("stopped")
"""


def test_sigterm_drains_stops_and_exits_with_0() -> None:
    """RB-109: the first signal drains before anything is torn down."""
    with start(BASIC) as process:
        assert line(process) == "started"
        process.send_signal(signal.SIGTERM)
        assert [line(process), line(process)] == ["drained", "stopped"]
        assert process.wait(10) == 0


def test_drain_ends_at_its_limit() -> None:
    """RB-109: a drain that does not end is cut at the limit, the exit status stays 0."""
    with start(NEVER_DRAINS, drain_s=0.3) as process:
        assert line(process) == "started"
        process.send_signal(signal.SIGINT)
        assert [line(process), line(process)] == ["draining", "stopped"]
        assert process.wait(10) == 0


def test_second_signal_ends_the_process_within_a_second() -> None:
    """RB-109: the second signal does not wait, even while the event loop is stuck."""
    stuck = NEVER_DRAINS.replace("await asyncio.sleep(60)", "time.sleep(60)")
    with start(stuck) as process:
        assert line(process) == "started"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "draining"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
        assert time.monotonic() - began < 1.0


def test_failed_start_stops_and_exits_with_1() -> None:
    body = BASIC.replace('say("started")', 'raise RuntimeError("no port")')
    with start(body) as process:
        assert line(process) == "stopped"
        assert process.wait(10) == 1


def test_signal_while_starting_skips_the_drain() -> None:
    body = """
async def start():
    say("starting")
    await asyncio.sleep(60)
async def drain(): say("drained")
async def stop(): say("stopped")
"""
    with start(body) as process:
        assert line(process) == "starting"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "stopped"
        assert process.wait(10) == 0


def test_fault_stops_without_drain_and_exits_with_1() -> None:
    """RB-112: a service whose engine died does not go on answering."""
    body = BASIC + '\nasync def failed(): return "the engine died"\n'
    with start(body) as process:
        assert [line(process), line(process)] == ["started", "stopped"]
        assert process.wait(10) == 1


def test_failing_drain_still_stops() -> None:
    body = BASIC.replace('async def drain(): say("drained")', "async def drain(): raise OSError()")
    with start(body) as process:
        assert line(process) == "started"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "stopped"
        assert process.wait(10) == 0


def test_a_drain_that_says_it_is_over_is_not_waited_for() -> None:
    with start(BASIC, drain_s=3_600) as process:
        assert line(process) == "started"
        began = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - began < 5


def test_fault_people_can_mend_is_raised_after_stopping() -> None:
    body = BASIC.replace('say("started")', 'raise ConfigError("port in use")')
    body = "from services.common.errors import ConfigError\n" + body
    body += """
import sys
sys.excepthook = lambda kind, value, trace: say(f'{kind.__name__}: {value}')
"""
    with start(body) as process:
        assert [line(process), line(process)] == ["stopped", "ConfigError: port in use"]
        assert process.wait(10) == 1
