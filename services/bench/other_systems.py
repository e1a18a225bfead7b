"""NIXL and Mooncake beside our planes, where their packages are installed: the same blocks.

Both ends are processes of their own: a native library that ends its process must not end the
benchmark. The reader pulls scattered blocks from the other's pool whenever a line asks it to, and
says how long that took: of the reading alone, or from a notification of the source that names the
blocks to the last byte, as our planes do it. Both check nothing but what is there in the end.
Between two pulls both are stopped: threads that poll would take cores from what is measured then.

    python -m services.bench.other_systems serve|read NAME SETTINGS

Mooncake's end speaks TCP, its only way without network adapters that read memory by themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import queue
import signal
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
HAVE_DOORBELLS = ("nixl",)
START_TIMEOUT_S = 30.0
PULL_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 4.0
_SAYS = "isthmus-bench "  # begins our lines: the libraries write to stdout too
_MAX_REASON_CHARS = 200
_MARKS = 251  # a prime: neighbours among scattered blocks differ
_HOST = "127.0.0.1"
_READ, _RING = "read", "ring"

Pool = npt.NDArray[np.uint8]  # [num_blocks, block_bytes]


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
        self._end.rest()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End both processes."""
        self._end.wake()
        self._end.stop()

    def read_s(self, num_blocks: int) -> float:
        """Have the first blocks read; return how long that took."""
        return self._measure(_READ, num_blocks)

    def doorbell_s(self, num_blocks: int) -> float:
        """Have the source announce the first blocks; return how long it took until they are read.

        OtherFailed of a system without notifications; see `HAVE_DOORBELLS`.
        """
        return self._measure(_RING, num_blocks)

    def _measure(self, what: str, num_blocks: int) -> float:
        self._end.wake()
        try:
            self._ask(what, 1)  # its threads have to find each other again
            return self._ask(what, num_blocks)
        finally:
            self._end.rest()

    def _ask(self, what: str, num_blocks: int) -> float:
        self._end.tell(f"{what} {num_blocks}")
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
            process_group=0 if role == "read" else None,  # the reader's own end is in its group
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

    def rest(self) -> None:
        """Stop its group from running until `wake`; the kernel ends the group if we are killed."""
        if self._process.poll() is None:  # not reaped yet, so the group's number is still its own
            os.killpg(self._process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """Let its group run again, or what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Ask it to end; kill it if it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            self._process.stdin.close()
        wait_or_kill(self._process, STOP_TIMEOUT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


# ---- their interfaces (Any: packages that are mostly not there) ---------------------------------


class _NixlEnd:
    """An agent and its pool."""

    def __init__(self, role: str, pool: Pool) -> None:
        api = importlib.import_module("nixl._api")
        name = f"{role}-{os.getpid()}"
        self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        self._pool = pool
        self._agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, name)], "DRAM")
        self.card = (self._agent.get_agent_metadata().hex(),)
        self._peer = ""

    def meet(self, card: Sequence[str]) -> None:
        """Take the other end's card."""
        self._peer = self._agent.add_remote_agent(bytes.fromhex(card[0]))

    def ring(self, rows: Sequence[int]) -> None:
        """Notify the other end of blocks it may read."""
        self._agent.send_notif(self._peer, np.array(rows, np.int64).tobytes())

    def wait_ring(self) -> Sequence[int]:
        """Return the blocks of the next notification."""
        until = time.monotonic() + PULL_TIMEOUT_S
        while time.monotonic() < until:
            for messages in self._agent.get_new_notifs().values():
                rows: list[int] = np.frombuffer(messages[0], np.int64).tolist()
                return rows
        raise OtherFailed("a notification did not come")

    def read(self, base: int, dest: Sequence[int], source: Sequence[int]) -> None:
        """Read rows of the other pool, which is at `base`, into rows of ours."""
        size = self._pool.shape[1]
        ours = [(self._pool.ctypes.data + row * size, size, 0) for row in dest]
        theirs = [(base + row * size, size, 0) for row in source]
        agent = self._agent
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(ours, "DRAM"),
            agent.get_xfer_descs(theirs, "DRAM"),
            self._peer,
            b"",
        )
        state = agent.transfer(handle)
        until = time.monotonic() + PULL_TIMEOUT_S
        while state == "PROC" and time.monotonic() < until:
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OtherFailed(f"a transfer ended as {state}")


class _MooncakeEnd:
    """A transfer engine and its pool."""

    def __init__(self, role: str, pool: Pool) -> None:
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        self._pool = pool
        if self._engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""):
            raise OtherFailed(f"the engine of the {role} does not start")
        if self._engine.register_memory(pool.ctypes.data, pool.nbytes):
            raise OtherFailed(f"the engine of the {role} does not take the memory")
        self.card = (f"{_HOST}:{self._engine.get_rpc_port()}",)
        self._peer = ""

    def meet(self, card: Sequence[str]) -> None:
        """Take the other end's card."""
        self._peer = card[0]

    def ring(self, rows: Sequence[int]) -> None:
        """Fail: it has no notifications."""
        raise OtherFailed(f"no notifications, not even of {len(rows)} blocks")

    def wait_ring(self) -> Sequence[int]:
        """Fail as `ring` does."""
        raise OtherFailed("no notifications")

    def read(self, base: int, dest: Sequence[int], source: Sequence[int]) -> None:
        """Read rows of the other pool, which is at `base`, into rows of ours."""
        size = self._pool.shape[1]
        ours = [self._pool.ctypes.data + row * size for row in dest]
        theirs = [base + row * size for row in source]
        sizes = [size] * len(ours)
        status = self._engine.batch_transfer_sync_read(self._peer, ours, theirs, sizes)
        if status < 0:
            raise OtherFailed(f"a transfer ended with {status}")


_ENDS: dict[str, Callable[[str, Pool], _NixlEnd | _MooncakeEnd]] = {
    "nixl": _NixlEnd,
    "mooncake": _MooncakeEnd,
}


# ---- the processes ------------------------------------------------------------------------------


def _say(*words: str) -> None:
    sys.stdout.write(f"\n{_SAYS}{json.dumps(words)}\n")  # whatever else is on the line
    sys.stdout.flush()


def _serve(name: str, shape: Shape) -> None:
    pool = np.zeros((shape.num_blocks, shape.block_bytes), np.uint8)
    pool[:] = (np.arange(shape.num_blocks) % _MARKS + 1)[:, None]
    end = _ENDS[name]("source", pool)
    _say(str(pool.ctypes.data), *end.card)
    end.meet(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        started = time.monotonic()  # the machine's, which both processes share
        end.ring(shape.source_ids[: int(line)])
        _say(repr(started))


def _read(name: str, shape: Shape) -> None:
    peer = _Process("serve", name, shape)
    try:
        base, *card = peer.hear(START_TIMEOUT_S)
        pool = np.zeros((shape.num_blocks, shape.block_bytes), np.uint8)
        end = _ENDS[name]("sink", pool)
        end.meet(card)
        peer.tell(json.dumps(end.card))
        end.read(int(base), shape.dest_ids, shape.source_ids)
        expected = np.array(shape.source_ids) % _MARKS + 1
        if (pool[list(shape.dest_ids)] != expected[:, None]).any():
            raise OtherFailed("what arrived is not what was there")
        _say("ready")
        for line in sys.stdin:
            what, count = line.split()
            dest, rows = shape.dest_ids[: int(count)], shape.source_ids[: int(count)]
            started = time.monotonic()
            if what == _RING:
                peer.tell(count)
                rows = tuple(end.wait_ring())
            end.read(int(base), dest, rows)
            ended = time.monotonic()
            if what == _RING:
                started = float(peer.hear(PULL_TIMEOUT_S)[0])
            _say(repr(ended - started))
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
