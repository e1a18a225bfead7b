"""Where an autoscaler tells the supervisor of `isthmus up` what to start and to stop.

A Unix socket in the supervisor's private directory: who may open it is who started the cluster. A
request and an answer a connection, each one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from services.cli.worker_pools import WorkerPools
from services.telemetry.logs import get_logger

log = get_logger(__name__)

_MAX_REQUEST_BYTES = 64 << 10
_MAX_CONNECTIONS = 16
_PATIENCE_S = 2.0  # with who connects and says nothing

Request = Mapping[str, Any]  # Any: JSON


class ControlSocket:
    """Belongs to the supervisor's loop, which calls `poll`; never waits."""

    def __init__(self, path: Path, pools: WorkerPools) -> None:
        self._path = path
        self._pools = pools
        self._open: dict[socket.socket, tuple[bytearray, float]] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        os.chmod(path, 0o600)
        self._listener.listen(_MAX_CONNECTIONS)

    def poll(self, now: float) -> bool:
        """Answer what has come; True = processes may have changed."""
        with contextlib.suppress(BlockingIOError):
            while len(self._open) < _MAX_CONNECTIONS:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._open[connection] = (bytearray(), now + _PATIENCE_S)
        answered = [self._serve(connection, now) for connection in list(self._open)]
        return any(answered)

    def close(self) -> None:
        """Take no more requests."""
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self, connection: socket.socket, now: float) -> bool:
        received, until = self._open[connection]
        try:
            data = connection.recv(_MAX_REQUEST_BYTES)
        except BlockingIOError:
            if now >= until:
                self._end(connection)
            return False
        except OSError:
            self._end(connection)
            return False
        received += data
        is_whole = received.endswith(b"\n")
        if not is_whole and data and len(received) < _MAX_REQUEST_BYTES:
            return False
        if is_whole:
            with contextlib.suppress(OSError):  # who asked has gone
                connection.sendall(self._answer(bytes(received), now))
        self._end(connection)
        return is_whole

    def _end(self, connection: socket.socket) -> None:
        del self._open[connection]
        connection.close()

    def _answer(self, line: bytes, now: float) -> bytes:
        try:
            answer = self._do(json.loads(line), now)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("up.control_refused", reason=str(error)[:200])
            answer = {"error": str(error)[:200] or type(error).__name__}
        return json.dumps(answer).encode() + b"\n"

    def _do(self, request: Request, now: float) -> dict[str, object]:
        pools = self._pools
        doing: dict[str, Callable[[], None]] = {
            "list": lambda: None,
            "start": lambda: pools.start(str(request["role"]), int(request["count"])),
            "cancel": lambda: pools.cancel([str(name) for name in request["ids"]]),
            "drain": lambda: pools.drain(str(request["id"])),
            "stop": lambda: pools.stop(str(request["id"]), now, request.get("grace_s")),
            "role": lambda: pools.set_role(str(request["id"]), str(request["role"])),
        }
        doing[request["do"]]()
        return {"replicas": pools.describe(now)} if request["do"] == "list" else {}
