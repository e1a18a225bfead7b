"""What pyzmq alone does with blocks: the reference beside the zmq plane in the handoff benchmark.

The same blocks, frames, message sizes and socket buffers as the plane's, and as many messages in
flight; but no credit, no digests, no sessions. What the plane takes longer than this is ours,
what this takes longer than memcpy is the price of the transport on this machine.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import zmq

from services.bench.handoff_source import LAYOUT
from services.bench.result import BenchFailed
from services.kv.memory import KvPoolMemory
from services.runtime.process import wait_or_kill
from services.transfer.config import MIB, TransferConfig

START_TIMEOUT_S = 60.0
RECV_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 4.0
_SNDBUF_BYTES = MIB
_TRACKER_POLL_S = 0.0002
_ORPHAN_POLL_MS = 1000
_STOP = b"stop"


class RawFailed(BenchFailed):
    """The reference did not run; the benchmark's figures would lack what they stand beside."""


class RawZmq:
    """A ROUTER in a process of its own and a DEALER here; starts on entry, stops on exit."""

    def __init__(
        self,
        blocks: npt.NDArray[np.uint8],
        dest_ids: Sequence[int],
        source_ids: Sequence[int],
    ) -> None:
        """Receive into rows `dest_ids` of `blocks` what lies in rows `source_ids` there."""
        self._blocks = blocks
        self._dest_ids = dest_ids
        self._settings = json.dumps({"num_blocks": len(blocks), "block_ids": list(source_ids)})
        self._process: subprocess.Popen[str] | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)

    def __enter__(self) -> Self:
        """Start the sender and connect."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.bench.raw_zmq", self._settings],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).resolve().parents[2],
            text=True,
        )
        self._socket.setsockopt(zmq.RCVTIMEO, round(RECV_TIMEOUT_S * 1000))
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.connect(f"tcp://127.0.0.1:{self._port()}")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the sender; kill it if it does not."""
        self._end()

    def pull(self, num_blocks: int) -> float:
        """Have the first blocks sent; return the seconds until the last one is here."""
        started = time.monotonic()
        self._socket.send(b"%d" % num_blocks)
        num_got = 0
        while num_got < num_blocks:
            self._socket.recv()
            while self._socket.getsockopt(zmq.RCVMORE):
                block = self._blocks[self._dest_ids[num_got]]
                if self._socket.recv_into(block.data) != block.nbytes:
                    raise RawFailed("a frame has another length")
                num_got += 1
        return time.monotonic() - started

    def _port(self) -> int:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        stdout = process.stdout
        threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
        try:
            return int(lines.get(timeout=START_TIMEOUT_S))
        except (queue.Empty, ValueError):
            raise RawFailed("the sender did not start") from None

    def _end(self) -> None:
        process = self._process
        assert process is not None
        self._socket.send(_STOP, zmq.NOBLOCK)
        wait_or_kill(process, STOP_TIMEOUT_S)
        self._socket.close(linger=0)
        self._context.term()
        assert process.stdout is not None
        process.stdout.close()


# ---- the process --------------------------------------------------------------------------------


def _serve(socket: zmq.Socket[bytes], memory: KvPoolMemory, block_ids: Sequence[int]) -> None:
    parent = os.getppid()
    while True:
        if not socket.poll(_ORPHAN_POLL_MS):
            if os.getppid() != parent:
                return
            continue
        route, request = socket.recv_multipart()
        if request == _STOP:
            return
        _send(socket, route, [memory.blocks[i] for i in block_ids[: int(request)]])


def _send(socket: zmq.Socket[bytes], route: bytes, blocks: Sequence[npt.NDArray[np.uint8]]) -> None:
    config = TransferConfig()
    a_message = max(1, config.data_message_bytes // LAYOUT.block_bytes)
    in_flight: deque[zmq.MessageTracker] = deque()
    for lo in range(0, len(blocks), a_message):
        while len(in_flight) >= config.max_data_in_flight:
            if in_flight[0].done:
                in_flight.popleft()
            else:
                time.sleep(_TRACKER_POLL_S)
        socket.send(route, zmq.SNDMORE)
        socket.send(b"", zmq.SNDMORE)
        part = blocks[lo : lo + a_message]
        for i, block in enumerate(part):
            frame = zmq.Frame(block.data, track=True, copy=False)
            socket.send(frame, zmq.SNDMORE if i + 1 < len(part) else 0, copy=False)
        assert frame.tracker is not None
        in_flight.append(frame.tracker)


def main() -> None:
    """Send blocks as they are asked for, until told to stop or left alone."""
    settings = json.loads(sys.argv[1])
    memory = KvPoolMemory.create(LAYOUT, settings["num_blocks"])
    memory.blocks[:] = 3
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDBUF, _SNDBUF_BYTES)
    sys.stdout.write(f"{socket.bind_to_random_port('tcp://127.0.0.1')}\n")
    sys.stdout.flush()
    try:
        _serve(socket, memory, settings["block_ids"])
    finally:
        socket.close(linger=0)
        context.term()


if __name__ == "__main__":
    main()
