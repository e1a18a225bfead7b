"""Bare gloo between two processes: what the nccl plane's groups move when nothing else is done.

The other rank is a process of its own that sends contiguous memory, message by message, whenever
a line asks for it. No blocks, no digests, no control messages.
"""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from services.runtime.process import wait_or_kill

TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 4.0


def _group(store_path: str, rank: int) -> Any:
    make_options: Any = ProcessGroupGloo._Options  # type: ignore[attr-defined]  # stub: Options
    options = make_options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return ProcessGroupGloo(FileStore(store_path, 2), rank, 2, options)


def _messages(buffer: Tensor, size_bytes: int, message_bytes: int) -> list[Tensor]:
    starts = range(0, size_bytes, message_bytes)
    return [buffer[at : min(at + message_bytes, size_bytes)] for at in starts]


class GlooRaw:
    """The receiving rank; starts the sending one on entry and ends it on exit."""

    def __init__(self, directory: Path, max_bytes: int, message_bytes: int) -> None:
        self._store_path = str(directory / "gloo-raw")
        self._max_bytes = max_bytes
        self._message_bytes = message_bytes

    def __enter__(self) -> Self:
        """Start the sender and connect."""
        arguments = [self._store_path, str(self._max_bytes), str(self._message_bytes)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.bench.gloo_raw", *arguments],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
            text=True,
        )
        try:
            self._buffer = torch.ones(self._max_bytes, dtype=torch.uint8)
            self._backend = _group(self._store_path, 1)
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
        """End the sender; kill it if it does not."""
        self._end()

    def seconds(self, size_bytes: int) -> float:
        """Ask for bytes, and return how long it was until they were here."""
        assert self._process.stdin is not None
        messages = _messages(self._buffer, size_bytes, self._message_bytes)
        started = time.monotonic()
        self._process.stdin.write(f"{size_bytes}\n")
        self._process.stdin.flush()
        works = [self._backend.recv([message], 0, 0) for message in messages]
        for work in works:
            work.wait(timedelta(seconds=TIMEOUT_S))
        return time.monotonic() - started

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        wait_or_kill(self._process, STOP_TIMEOUT_S)


def main() -> None:
    """Send until the input ends."""
    store_path, max_bytes, message_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    buffer = torch.full((max_bytes,), 2, dtype=torch.uint8)
    backend = _group(store_path, 0)
    for line in sys.stdin:
        messages = _messages(buffer, int(line), message_bytes)
        works = [backend.send([message], 1, 0) for message in messages]
        for work in works:
            work.wait(timedelta(seconds=TIMEOUT_S))


if __name__ == "__main__":
    main()
