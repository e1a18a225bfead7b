"""The prefill end of the handoff benchmark as a process: a source with a pool, and no engine.

Driven by lines of JSON on its input. Blocks are written and sealed once at the start, so a
measured handoff costs what the transfer layer costs and no digest of sealing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from services.bench.result import BenchFailed
from services.common.clock import SystemClock
from services.common.ids import BlockHash, BlockId
from services.kv.block_copy import write_block
from services.kv.digest import block_digests
from services.kv.layout import LAYER_MAJOR, KvIdentity, KvLayout
from services.kv.memory import KvPoolMemory
from services.runtime.process import wait_or_kill
from services.transfer.api import FinalInfo, FirstTokenInfo, Offer, SourceEvent, SourceReleased
from services.transfer.config import TransferConfig
from services.transfer.device import Device
from services.transfer.end_parts import EndParts, ListenAt
from services.transfer.source import TransferSource

START_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 4.0

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, kv_dtype="bfloat16")  # SmolLM2-135M
IDENTITY = KvIdentity(
    model="bench",
    revision="1",
    weights_digest="none",
    num_layers=LAYOUT.num_layers,
    num_kv_heads=LAYOUT.num_kv_heads,
    head_dim=LAYOUT.head_dim,
    rope="none",
    tokenizer_digest="none",
    hash_scheme="isthmus/1",
)


class SourceFailed(BenchFailed):
    """The source's process ended or said something else than asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class SourceSettings:
    """What one source's process is started with."""

    worker_id: str
    runtime_dir: str
    planes: tuple[str, ...]
    num_blocks: int
    block_ids: tuple[int, ...]  # scattered; a handoff of n blocks sends the first n
    seed: int
    curve_key_file: str | None = None
    attach_pin_share: float = 0.5
    is_layer_major: bool = False

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        raw = json.loads(text)
        raw["planes"], raw["block_ids"] = tuple(raw["planes"]), tuple(raw["block_ids"])
        return cls(**raw)


def offer_of(key: str, num_blocks: int) -> Offer:
    """The offer of a prompt that fills its last block."""
    hashes = tuple(BlockHash(i.to_bytes(16, "big")) for i in range(num_blocks))
    return Offer(key, key, num_blocks * LAYOUT.block_size, hashes, "bench")


def device_for(planes: Sequence[str]) -> Device | None:
    """Return what plane nccl builds groups with on a CPU; torch is loaded only for that."""
    if "nccl" not in planes:
        return None
    import torch  # seconds of CPU that no other arm is to pay

    from services.worker.torch_groups import TorchDevice

    return TorchDevice(torch.device("cpu"))


# ---- the parent's handle ------------------------------------------------------------------------


class SourceProcess:
    """Starts on entry, stops on exit."""

    def __init__(self, settings: SourceSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Start the process and wait until its blocks are written."""
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.bench.handoff_source", self._settings.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            cwd=Path(__file__).resolve().parents[2],
            text=True,
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="bench-source", daemon=True)
        self._reader.start()
        try:
            self._answer(START_TIMEOUT_S)
        except SourceFailed:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the process; kill it if it does not."""
        self._end()

    def offer(self, key: str, num_blocks: int, *, at_once: bool) -> bytes:
        """Offer; with `at_once` everything is sealed and final before the ticket comes back."""
        answer = self._ask("offer", key=key, num_blocks=num_blocks, at_once=at_once)
        return bytes.fromhex(answer["ticket"])

    def ring(self, key: str) -> None:
        """Have it announce everything now; nothing is answered, so that nothing disturbs."""
        self._tell("ring", key=key)

    def rung_at(self, key: str) -> float:
        """When `ring` began, on the machine's monotonic clock, which all processes share."""
        return float(self._ask("rung_at", key=key)["now"])

    def wait_released(self, key: str) -> str:
        """Wait until the blocks are back; return the outcome."""
        return str(self._ask("released", key=key)["outcome"])

    def cpu_s(self) -> float:
        """CPU seconds of all threads but the one that answers."""
        return float(self._ask("cpu", key="")["cpu_s"])

    def _tell(self, command: str, **arguments: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SourceFailed("the source's process has ended") from error

    def _ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self._tell(command, **arguments)
        return self._answer(STEP_TIMEOUT_S)

    def _read(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        for line in process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise SourceFailed(f"no answer within {timeout_s:g} s") from None
        if not line:
            raise SourceFailed("the source's process has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            process.stdin.close()
        wait_or_kill(process, 2 * STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)  # its input has ended with the process
        if process.stdout is not None:
            process.stdout.close()
        self._process = None


# ---- the process --------------------------------------------------------------------------------


class _Prefill:
    """A source and its pool."""

    def __init__(self, settings: SourceSettings) -> None:
        self._block_ids = [BlockId(i) for i in settings.block_ids]
        layout = dataclasses.replace(LAYOUT, tag=LAYER_MAJOR) if settings.is_layer_major else LAYOUT
        self._memory = KvPoolMemory.create(layout, settings.num_blocks)
        self._write_blocks(settings.seed)
        config = TransferConfig(
            attach_pin_share=settings.attach_pin_share,
            planes=settings.planes,
            curve_key_file=settings.curve_key_file,
        )
        clock = SystemClock()
        parts = EndParts(
            self._memory,
            IDENTITY,
            settings.worker_id,
            os.getpid(),
            clock,
            config,
            device=device_for(settings.planes),
        )
        self._source = TransferSource(parts, ListenAt("127.0.0.1", Path(settings.runtime_dir)))
        self._released: dict[str, str] = {}
        self._changed = threading.Condition()
        self._num_blocks: dict[str, int] = {}
        self._rung: dict[str, float] = {}

    def start(self) -> None:
        """Start the source's thread."""
        self._source.start(self._on_event)

    def stop(self) -> None:
        """Stop it."""
        self._source.stop(STOP_TIMEOUT_S)

    def answer(self, ask: dict[str, Any]) -> dict[str, Any] | None:
        """Do what one line asks for."""
        command, key = ask["command"], ask["key"]
        if command == "offer":
            ticket = self._source.offer(offer_of(key, ask["num_blocks"]))
            self._num_blocks[key] = ask["num_blocks"]
            if ask["at_once"]:
                self._announce(key)
            return {"ticket": ticket.hex()}
        if command == "ring":
            self._rung[key] = time.monotonic()
            self._announce(key)
            return None
        if command == "rung_at":
            return {"now": self._rung.pop(key)}
        if command == "cpu":
            return {"cpu_s": time.process_time() - time.thread_time()}
        return {"outcome": self._wait_released(key)}

    def _announce(self, key: str) -> None:
        num_blocks = self._num_blocks.pop(key)
        num_tokens = num_blocks * LAYOUT.block_size
        final = FinalInfo((FirstTokenInfo(0, 1),), num_tokens, None, 0, 0)
        with self._source.batch():  # as the engine's last step of a prefill does
            self._source.blocks_sealed(key, 0, self._block_ids[:num_blocks])
            self._source.prefill_finished(key, final)

    def _write_blocks(self, seed: int) -> None:
        memory, rng = self._memory, np.random.default_rng(seed)
        content = rng.integers(0, 256, LAYOUT.block_bytes, dtype=np.uint8)
        for i, block in enumerate(self._block_ids):
            content[:8] = np.frombuffer(i.to_bytes(8, "little"), np.uint8)
            memory.gens[block] += 1
            write_block(memory, block, content)
            memory.digests[block] = block_digests(LAYOUT, content)
            memory.gens[block] += 1

    def _on_event(self, event: SourceEvent) -> None:
        if not isinstance(event, SourceReleased):
            return
        with self._changed:
            self._released[event.key] = event.outcome
            self._changed.notify_all()

    def _wait_released(self, key: str) -> str:
        with self._changed:
            self._changed.wait_for(lambda: key in self._released, STEP_TIMEOUT_S)
            return self._released.pop(key, "not released")


def main() -> None:
    """Serve until the input ends."""
    prefill = _Prefill(SourceSettings.from_json(sys.argv[1]))
    prefill.start()
    _say({"ready": True})
    try:
        for line in sys.stdin:
            answer = prefill.answer(json.loads(line))
            if answer is not None:
                _say(answer)
    finally:
        prefill.stop()


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
