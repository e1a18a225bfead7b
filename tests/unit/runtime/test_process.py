from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from services.runtime.process import (
    Child,
    GiveUp,
    Restart,
    RestartPolicy,
    describe_status,
    die_with_parent,
    tail_lines,
)

ROOT = Path(__file__).resolve().parents[3]


def make_child(tmp_path: Path, code: str) -> Child:
    argv = [sys.executable, "-c", code]
    return Child("c", argv, {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path / "c.log")


def test_started_by_hand_there_is_nobody_to_die_with() -> None:
    assert die_with_parent({})


def test_long_log_is_moved_aside_once(tmp_path: Path) -> None:
    child = make_child(tmp_path, "pass")
    child.log_path.write_bytes(b"".join(b"line %06d\n" % i for i in range(1_000)))
    assert child.limit_log(max_bytes=5_000)
    assert child.log_path.stat().st_size == 0
    old = child.log_path.with_name("c.log.1")
    assert old.stat().st_size == 2_500
    assert old.read_text().endswith("line 000999\n")
    assert not child.limit_log(max_bytes=5_000)


def test_tail_of_missing_and_binary_files(tmp_path: Path) -> None:
    assert tail_lines(tmp_path / "no", 3) == []
    path = tmp_path / "bin"
    path.write_bytes(b"\xff\n" * 20_000 + b"last")
    assert tail_lines(path, 2) == ["\ufffd", "last"]


def test_worker_that_was_ready_is_back_at_once_then_slower() -> None:
    policy = RestartPolicy()
    delays = []
    for second in range(9):
        policy.ready(second)
        decision = policy.ended(second + 0.5, -signal.SIGKILL)
        assert isinstance(decision, Restart)
        assert decision.reason == "killed by SIGKILL"
        delays.append(decision.delay_s)
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_long_life_clears_the_record() -> None:
    policy = RestartPolicy()
    for now in (0.0, 1.0, 2.0):
        policy.ready(now)
        policy.ended(now, 1)
    policy.ready(10.0)
    decision = policy.ended(40.0, 1)
    assert decision == Restart(0.1, "exited with 1")


def test_crash_loop_ends_with_a_reason() -> None:
    policy = RestartPolicy(max_failures=3)
    assert [type(policy.ended(float(i), 1)) for i in range(3)] == [Restart, Restart, GiveUp]
    assert policy.ended(4.0, 1) == GiveUp("exited with 1 before it was ready, 4 times in a row")


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exited with 0"), (-9, "killed by SIGKILL"), (-200, "killed by signal 200")],
)
def test_status_in_words(status: int, words: str) -> None:
    assert describe_status(status) == words
