"""Points are off unless armed; a wrong name is an error, not a campaign without faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from services.common.errors import ConfigError
from services.runtime.fault_points import VARIABLE, FaultPoints

PROGRAM = """
import os
from services.runtime.fault_points import FaultPoints
points = FaultPoints.from_environ(os.environ)
points.hit("before_final")
points.hit("mid_pull")
print("one pass", flush=True)
points.hit("mid_pull")
print("never printed", flush=True)
"""


def test_kills_the_process_at_the_nth_pass_of_the_armed_point() -> None:
    environ = {**os.environ, VARIABLE: "mid_pull:2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "one pass\n")


def test_does_nothing_when_not_armed() -> None:
    points = FaultPoints.from_environ({})
    points.hit("mid_pull")
    assert points == FaultPoints()


@pytest.mark.parametrize("value", ["nowhere:1", "mid_pull", "mid_pull:0", "mid_pull:1:explode"])
def test_refuses_what_it_does_not_know(value: str) -> None:
    with pytest.raises(ConfigError):
        FaultPoints.from_environ({VARIABLE: value})
