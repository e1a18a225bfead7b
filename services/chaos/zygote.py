"""A process that has loaded all a scripted worker needs, and forks one whenever it is asked.

    python -P -m services.chaos.zygote --control FD

Loading takes a worker some 0.7 s of CPU, every life of it; a fork takes milliseconds and gives the
same program: its own process, environment, session and log. Nothing may run here beside the main
thread, because a fork copies no other.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import selectors
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop  # noqa: F401 - loaded here once instead of in every worker

from services.chaos import scripted_worker
from services.chaos.forking import MAX_MESSAGE_BYTES
from services.runtime.process import PARENT_VARIABLE, die_with_parent

_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to be started with; `log_fd` is open in this process."""

    arguments: list[str]
    environ: dict[str, str]
    log_fd: int


class Zygote:
    """Forks on request over its control socket and tells how every fork ended.

    Answers to requests, {"pid"} with a pidfd, and notices, {"pid", "status"}, share the socket in
    order: a fork's answer comes before its end.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> Order | None:
        """Serve until the control socket closes (None); in a fork, return what it is to be."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        self._reap(key.fd, key.data)
                        continue
                    order = self._read_order()
                    if order is None or self._fork(order):
                        return order
        except (BrokenPipeError, ConnectionResetError):
            return None  # closed while we were telling something

    def _read_order(self) -> Order | None:
        message, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
        if not message:
            return None
        body = json.loads(message)
        return Order(body["arguments"], body["environ"], fds[0])

    def _fork(self, order: Order) -> bool:
        """Return True in the fork."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._let_go()
            _become(order, parent)
            return True
        os.close(order.log_fd)
        pidfd = os.pidfd_open(pid)  # before anybody reaps it: no other process can be meant
        self._selector.register(pidfd, selectors.EVENT_READ, pid)
        answer = json.dumps({"pid": pid}).encode()
        socket.send_fds(self._control, [answer], [pidfd])
        return False

    def _reap(self, pidfd: int, pid: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        notice = {"pid": pid, "status": os.waitstatus_to_exitcode(status)}
        self._control.send(json.dumps(notice).encode())

    def _let_go(self) -> None:
        """Close what belongs to the zygote; a fork must not keep its control socket open."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self._selector.close()
        self._control.close()


def _become(order: Order, parent: int) -> None:
    os.setsid()
    os.dup2(order.log_fd, _STDOUT)
    os.dup2(order.log_fd, _STDERR)
    os.close(order.log_fd)
    os.environ.clear()
    os.environ.update({**order.environ, PARENT_VARIABLE: str(parent)})


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve; in every fork, run a scripted worker and return its exit status."""
    if not die_with_parent(os.environ):
        return 1
    parser = argparse.ArgumentParser(prog="zygote", description=__doc__)
    parser.add_argument("--control", type=int, required=True)
    control = socket.socket(fileno=parser.parse_args(arguments).control)
    if _num_threads() != 1:
        raise RuntimeError("something that was loaded has started a thread: forks would lack it")
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page it looks at
    order = Zygote(control).serve()
    return 0 if order is None else scripted_worker.main(order.arguments)


if __name__ == "__main__":
    sys.exit(main())
