"""Pieces of a supervisor: children that die with their parent, restart policy, log tails."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

PARENT_VARIABLE = "ISTHMUS_PARENT_PID"
MAX_LOG_BYTES = 32 << 20
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 16 << 10
_REAP_TIMEOUT_S = 5.0


def die_with_parent(environ: Mapping[str, str]) -> bool:
    """Ask the kernel for SIGTERM when the parent dies; called first thing by a child.

    Returns False when the parent is dead already (the child must not go on). The child does
    this itself instead of a pre-exec hook: those are not safe in a parent with threads.
    """
    expected = environ.get(PARENT_VARIABLE, "")
    if not expected.isdecimal():
        return True  # started by hand: nobody to die with
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the call: then no signal will ever come.
    return os.getppid() == int(expected)


def wait_or_kill(
    process: subprocess.Popen[str] | subprocess.Popen[bytes], timeout_s: float
) -> None:
    """Wait for a process that was asked to end; kill it if it does not."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_REAP_TIMEOUT_S)


class Launched(Protocol):
    """The part of subprocess.Popen that a Child needs."""

    returncode: int | None

    @property
    def pid(self) -> int | None:
        """Process id; None while it has none yet."""
        ...

    def poll(self) -> int | None:
        """Exit status, None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises subprocess.TimeoutExpired."""
        ...

    def send_signal(self, sig: int) -> None:
        """Signal this process and no other that may have its number by now."""
        ...


# Starts a process: its arguments, its environment, and where its output goes.
Launch = Callable[[Sequence[str], Mapping[str, str], int], Launched]


def launch_program(argv: Sequence[str], environ: Mapping[str, str], log_fd: int) -> Launched:
    """Start a program in a session of its own: Ctrl-C reaches the supervisor, which stops it."""
    return subprocess.Popen(
        argv,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=log_fd,
        stderr=log_fd,
        start_new_session=True,
    )


class Child:
    """One child process whose output goes to a log file.

    Spawn it from the main thread: to the kernel the death of the spawning thread is the parent's.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        log_path: Path,
        launch: Launch = launch_program,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.argv = list(argv)
        self.launch = launch
        self._environ = dict(environ)
        self._process: Launched | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the current (or last) life."""
        return None if self._process is None else self._process.pid

    def spawn(self) -> None:
        """Start a new life; the previous one must be over."""
        assert self._process is None or self._process.returncode is not None
        environ = {**self._environ, PARENT_VARIABLE: str(os.getpid())}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        log_fd = os.open(self.log_path, flags, 0o600)
        try:
            self._process = self.launch(self.argv, environ, log_fd)
        finally:
            os.close(log_fd)

    def poll(self) -> int | None:
        """Exit status of the current life, None while it runs (or before the first)."""
        return None if self._process is None else self._process.poll()

    @property
    def is_running(self) -> bool:
        """Whether the process exists."""
        return self._process is not None and self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Signal the process if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the current life."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def tail(self, num_lines: int = 12) -> list[str]:
        """Last lines of the log."""
        return tail_lines(self.log_path, num_lines)

    def limit_log(self, max_bytes: int = MAX_LOG_BYTES) -> bool:
        """Move a log that has grown too long aside (one old copy is kept)."""
        try:
            size = self.log_path.stat().st_size
        except FileNotFoundError:
            return False
        if size <= max_bytes:
            return False
        # The child holds the file open for appending: copy the end, then empty it in place.
        old = self.log_path.with_name(self.log_path.name + ".1")
        with self.log_path.open("rb") as file:
            file.seek(-max_bytes // 2, os.SEEK_END)
            old.write_bytes(file.read(max_bytes))
        os.truncate(self.log_path, 0)
        return True


def tail_lines(path: Path, num_lines: int) -> list[str]:
    """Last lines of a text file that may be large, absent or not quite UTF-8."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-num_lines:]


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the child again after `delay_s`."""

    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start the child again; a person must look."""

    reason: str


@dataclass(slots=True)
class RestartPolicy:
    """When to start a dead child again. Pure: the supervisor tells it what happened and when."""

    first_delay_s: float = 0.1
    max_delay_s: float = 10.0
    stable_s: float = 30.0  # a life this long after getting ready clears the record
    max_failures: int = 5  # lives in a row that ended before they were ready
    _num_quick: int = 0
    _num_failures: int = 0
    _ready_at: float | None = field(default=None)

    def ready(self, now: float) -> None:
        """The current life got ready."""
        self._ready_at = now
        self._num_failures = 0

    def ended(self, now: float, status: int) -> Restart | GiveUp:
        """The current life is over without anybody having asked for it."""
        ready_at, self._ready_at = self._ready_at, None
        what = describe_status(status)
        if ready_at is None:
            self._num_failures += 1
            if self._num_failures >= self.max_failures:
                return GiveUp(f"{what} before it was ready, {self._num_failures} times in a row")
        elif now - ready_at >= self.stable_s:
            self._num_quick = 0
        delay = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(self._num_quick, 16))
        self._num_quick += 1
        return Restart(delay, what)


def describe_status(status: int) -> str:
    """Say how a process ended."""
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
