"""Scripted workers as forks of a zygote: they start in a fraction of the time of a program."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from services.runtime.process import PARENT_VARIABLE, wait_or_kill

ZYGOTE = "services.chaos.zygote"
SCRIPTED = "services.chaos.scripted_worker"
START_TIMEOUT_S = 30.0  # a busy machine loads a program slowly
STOP_TIMEOUT_S = 5.0
MAX_MESSAGE_BYTES = 96 << 10  # both ways; fits a socket's buffer as one datagram


class ZygoteLost(RuntimeError):
    """The zygote has ended; what its forks did is not known any more."""


class ForkedWorker:
    """A fork, seen from outside; the part of subprocess.Popen that a Child needs."""

    def __init__(self, forks: Forks, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._forks = forks
        self._pidfd = pidfd

    def poll(self) -> int | None:
        """Exit status, None while it runs."""
        if self.returncode is None:
            self._forks.hear(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0 and self.poll() is None:
                raise subprocess.TimeoutExpired([SCRIPTED], timeout or 0.0)
            self._forks.hear(left)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Signal this very process: a pidfd never means another one."""
        if self.poll() is None:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.Signals(sig))
            except ProcessLookupError:
                return  # ended; its notice is on the way

    def ended(self, status: int) -> None:
        """Take the zygote's word for it."""
        self.returncode = status
        os.close(self._pidfd)


class Forks:
    """One zygote and its forks. Start it on the main thread, which its life hangs on."""

    def __init__(self) -> None:
        self._control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = far.fileno()
        # One thread a math library: a zygote may have no thread but the main one.
        environ = {**os.environ, PARENT_VARIABLE: str(os.getpid()), "OPENBLAS_NUM_THREADS": "1"}
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", ZYGOTE, "--control", str(fd)],
                env=environ,
                stdin=subprocess.DEVNULL,
                pass_fds=[fd],
                start_new_session=True,
            )
        self._alive: dict[int, ForkedWorker] = {}

    def __enter__(self) -> Self:
        """Be closed at the end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the zygote; forks still alive are asked to end by the kernel."""
        self.close()

    def close(self) -> None:
        """End the zygote; forks still alive are asked to end by the kernel."""
        self._control.close()
        wait_or_kill(self._process, STOP_TIMEOUT_S)

    def launch(self, argv: Sequence[str], environ: Mapping[str, str], log_fd: int) -> ForkedWorker:
        """Fork a worker; `argv` is the command that would start one without a zygote."""
        program = [sys.executable, "-P", "-m", SCRIPTED]
        if list(argv[: len(program)]) != program:
            raise ValueError(f"a zygote starts {SCRIPTED}, not {' '.join(argv[:4])}")
        order = {"arguments": list(argv[len(program) :]), "environ": dict(environ)}
        message = json.dumps(order).encode()
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError("the environment is too large for a zygote")
        socket.send_fds(self._control, [message], [log_fd])
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            started = self.hear(end - time.monotonic())
            if started is not None:
                return started
        raise ZygoteLost(f"no answer in {START_TIMEOUT_S:.0f} s")

    def hear(self, timeout_s: float | None) -> ForkedWorker | None:
        """Take what the zygote says, at most one message; return a worker that was started."""
        if not select.select([self._control], [], [], timeout_s)[0]:
            return None
        message, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
        if not message:
            raise ZygoteLost("the zygote has ended")
        body = json.loads(message)
        pid = int(body["pid"])
        if fds:
            self._alive[pid] = ForkedWorker(self, pid, fds[0])
            return self._alive[pid]
        self._alive.pop(pid).ended(int(body["status"]))
        return None
