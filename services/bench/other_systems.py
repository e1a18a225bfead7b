"""NIXL and Mooncake beside our planes, where their packages are installed: the same blocks.

Both ends are processes of their own: a native library that ends its process must not end the
benchmark. The reader pulls scattered blocks from the other's pool whenever a line asks it to, and
says how long that took; both check nothing but what is there in the end.

    python -m services.bench.other_systems serve|read NAME SETTINGS

Mooncake's end follows its documented interface and has not been run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from services.bench.result import BenchFailed
from services.runtime.process import wait_or_kill

MODULES = {"nixl": "nixl", "mooncake": "mooncake"}  # name -> what is imported
START_TIMEOUT_S = 30.0
PULL_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 4.0
_SAYS = "isthmus-bench "  # begins our lines: the libraries write to stdout too
_MAX_REASON_CHARS = 200
_MARKS = 251  # a prime: neighbours among scattered blocks differ
_HOST = "127.0.0.1"

Pool = npt.NDArray[np.uint8]  # [num_blocks, block_bytes]
Pull = Callable[[Sequence[int], Sequence[int]], None]  # rows of ours, rows of the peer's


class OtherFailed(BenchFailed):
    """The other system did not start or did not deliver; only its own row is lost."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What both ends are started with."""

    num_blocks: int
    block_bytes: int
    dest_ids: tuple[int, ...]
    source_ids: tuple[int, ...]

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        raw = json.loads(text)
        return cls(
            raw["num_blocks"], raw["block_bytes"], tuple(raw["dest_ids"]), tuple(raw["source_ids"])
        )


def is_installed(name: str) -> bool:
    """Whether its package can be imported."""
    return importlib.util.find_spec(MODULES[name]) is not None


# ---- the parent's handle ------------------------------------------------------------------------


class OtherSystem:
    """The reading end, which starts the other one itself; OtherFailed says what went wrong."""

    def __init__(self, name: str, shape: Shape) -> None:
        self._end = _Process("read", name, shape)

    def __enter__(self) -> Self:
        """Start, connect, and see that what arrives is right."""
        try:
            self._end.hear(START_TIMEOUT_S)
        except BaseException:
            self._end.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End both processes."""
        self._end.stop()

    def seconds(self, num_blocks: int) -> float:
        """Have the first blocks pulled; return how long that took."""
        self._end.tell(str(num_blocks))
        return float(self._end.hear(PULL_TIMEOUT_S)[0])


class _Process:
    """One end as a child process that is spoken with line by line."""

    def __init__(self, role: str, name: str, shape: Shape) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.bench.other_systems", role, name, shape.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).resolve().parents[2],
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"bench-{name}", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_SAYS):
                self._lines.put(line)
        self._lines.put("")

    def tell(self, line: str) -> None:
        """Write a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            raise OtherFailed("its process has ended") from None

    def hear(self, timeout_s: float) -> list[str]:
        """Wait for what it says."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise OtherFailed(f"nothing within {timeout_s:g} s") from None
        if not line:
            wait_or_kill(self._process, STOP_TIMEOUT_S)
            raise OtherFailed(f"its process ended with {self._process.returncode}")
        words: list[str] = json.loads(line.removeprefix(_SAYS))
        if words[:1] == ["failed"]:
            raise OtherFailed(words[1])
        return words

    def stop(self) -> None:
        """Ask it to end; kill it if it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            self._process.stdin.close()
        wait_or_kill(self._process, STOP_TIMEOUT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


# ---- their interfaces (Any: packages that are mostly not there) ---------------------------------


def _nixl_agent(name: str, pool: Pool) -> Any:
    api = importlib.import_module("nixl._api")
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, name)], "DRAM")
    return agent


def _serve_nixl(pool: Pool) -> tuple[Any, list[str]]:
    agent = _nixl_agent(f"source-{os.getpid()}", pool)
    return agent, [agent.get_agent_metadata().hex()]


def _connect_nixl(pool: Pool, base: int, said: Sequence[str]) -> Pull:
    agent = _nixl_agent(f"sink-{os.getpid()}", pool)
    peer = agent.add_remote_agent(bytes.fromhex(said[0]))
    size = pool.shape[1]

    def pull(dest: Sequence[int], source: Sequence[int]) -> None:
        ours = [(pool.ctypes.data + row * size, size, 0) for row in dest]
        theirs = [(base + row * size, size, 0) for row in source]
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(ours, "DRAM"),
            agent.get_xfer_descs(theirs, "DRAM"),
            peer,
            b"",
        )
        state = agent.transfer(handle)
        until = time.monotonic() + PULL_TIMEOUT_S
        while state == "PROC" and time.monotonic() < until:
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OtherFailed(f"a transfer ended as {state}")

    return pull


def _mooncake_engine(pool: Pool) -> Any:
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""):
        raise OtherFailed("its engine does not start")
    if engine.register_memory(pool.ctypes.data, pool.nbytes):
        raise OtherFailed("its engine does not take the memory")
    return engine


def _serve_mooncake(pool: Pool) -> tuple[Any, list[str]]:
    engine = _mooncake_engine(pool)
    return engine, [f"{_HOST}:{engine.get_rpc_port()}"]


def _connect_mooncake(pool: Pool, base: int, said: Sequence[str]) -> Pull:
    engine, size = _mooncake_engine(pool), pool.shape[1]

    def pull(dest: Sequence[int], source: Sequence[int]) -> None:
        ours = [pool.ctypes.data + row * size for row in dest]
        theirs = [base + row * size for row in source]
        status = engine.batch_transfer_sync_read(said[0], ours, theirs, [size] * len(ours))
        if status < 0:
            raise OtherFailed(f"a transfer ended with {status}")

    return pull


_SERVE = {"nixl": _serve_nixl, "mooncake": _serve_mooncake}
_CONNECT = {"nixl": _connect_nixl, "mooncake": _connect_mooncake}


# ---- the processes ------------------------------------------------------------------------------


def _say(*words: str) -> None:
    sys.stdout.write(f"\n{_SAYS}{json.dumps(words)}\n")  # whatever else is on the line
    sys.stdout.flush()


def _serve(name: str, shape: Shape) -> None:
    pool = np.zeros((shape.num_blocks, shape.block_bytes), np.uint8)
    pool[:] = (np.arange(shape.num_blocks) % _MARKS + 1)[:, None]
    held, said = _SERVE[name](pool)
    _say(str(pool.ctypes.data), *said)
    sys.stdin.read()
    del held


def _read(name: str, shape: Shape) -> None:
    peer = _Process("serve", name, shape)
    try:
        base, *said = peer.hear(START_TIMEOUT_S)
        pool = np.zeros((shape.num_blocks, shape.block_bytes), np.uint8)
        pull = _CONNECT[name](pool, int(base), said)
        pull(shape.dest_ids, shape.source_ids)
        expected = np.array(shape.source_ids) % _MARKS + 1
        if (pool[list(shape.dest_ids)] != expected[:, None]).any():
            raise OtherFailed("what arrived is not what was there")
        _say("ready")
        for line in sys.stdin:
            count = int(line)
            started = time.monotonic()
            pull(shape.dest_ids[:count], shape.source_ids[:count])
            _say(repr(time.monotonic() - started))
    finally:
        peer.stop()


def main(arguments: Sequence[str]) -> int:
    """Be one end until the input ends."""
    role, name, settings = arguments
    act = {"serve": _serve, "read": _read}[role]
    try:
        act(name, Shape.from_json(settings))
    except Exception as error:  # whatever a foreign library raises is the row's end, with a reason
        why = str(error) if isinstance(error, OtherFailed) else f"{type(error).__name__}: {error}"
        _say("failed", why[:_MAX_REASON_CHARS])
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # their threads do not always end
