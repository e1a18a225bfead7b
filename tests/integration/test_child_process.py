from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.runtime.process import (
    PARENT_VARIABLE,
    Child,
)

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def make_child(tmp_path: Path, code: str) -> Child:
    argv = [sys.executable, "-c", code]
    return Child("c", argv, {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path / "c.log")


def test_output_of_every_life_goes_to_the_log(tmp_path: Path) -> None:
    child = make_child(tmp_path, "import sys; print('out'); print('err', file=sys.stderr)")
    for _ in range(2):
        child.spawn()
        assert child.wait(10)
        assert child.poll() == 0
    assert sorted(child.tail()) == ["err", "err", "out", "out"]
    assert child.log_path.stat().st_mode & 0o777 == 0o600


def test_signal_reaches_the_child(tmp_path: Path) -> None:
    child = make_child(tmp_path, "import time; time.sleep(60)")
    child.spawn()
    assert child.is_running
    child.send(signal.SIGKILL)
    assert child.wait(10)
    assert child.poll() == -signal.SIGKILL
    child.send(signal.SIGTERM)  # nobody there any more


def test_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """RB-112: nothing is left behind by a parent that was killed with -9."""
    script = f'''
import os, sys, time
from pathlib import Path
from services.runtime.process import Child
code = """
import os, sys, time
from services.runtime.process import die_with_parent
if not die_with_parent(os.environ): sys.exit(3)
print('up', flush=True)
time.sleep(60)
"""
log = Path({str(tmp_path / "c.log")!r})
child = Child("c", [sys.executable, "-c", code], dict(os.environ), log)
child.spawn()
while child.tail() != ["up"]: time.sleep(0.02)
print(child.pid, flush=True)
time.sleep(60)
'''
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break  # dead; waiting for init
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{pid}").exists()


def test_child_of_a_dead_parent_does_not_go_on() -> None:
    code = "import os, sys; from services.runtime.process import die_with_parent;"
    code += "sys.exit(0 if die_with_parent(os.environ) else 3)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, PARENT_VARIABLE: "1"},
        check=False,
        timeout=30,
    )
    assert run.returncode == 3
