"""The decode end of the handoff benchmark: a sink whose handoffs are timed one by one."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

from services.bench.handoff_source import IDENTITY, LAYOUT, SourceProcess, device_for, offer_of
from services.bench.result import BenchFailed
from services.common.clock import SystemClock
from services.common.ids import BlockId
from services.kv.attached import AttachedKv, PoolBases
from services.kv.digest import block_digests
from services.kv.memory import KvPoolMemory
from services.transfer.api import SinkEvent, SinkReady
from services.transfer.config import TransferConfig
from services.transfer.end_parts import EndParts
from services.transfer.sink import TransferSink

HANDOFF_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 4.0
_POLL_S = 0.0005


class HandoffFailed(BenchFailed):
    """A handoff of the benchmark did not end well; its figures would mean nothing."""


@dataclass(frozen=True, slots=True)
class Took:
    """One handoff."""

    seconds: float
    stats_us: tuple[int, int]  # OPEN to OPENED, first READY to last block verified


class TimedSink:
    """One sink over a pool that may be shared with sinks that are idle meanwhile."""

    def __init__(
        self,
        worker_id: str,
        incarnation: int,
        memory: KvPoolMemory,
        block_ids: tuple[int, ...],
        config: TransferConfig,
        bases: PoolBases | None = None,
    ) -> None:
        """Args:
        bases: to read in the source's pool in place, where the plane is attach.
        """
        self._memory = memory
        self.attached: AttachedKv | None = None  # of the last handoff; let go of by then
        self._block_ids = [BlockId(i) for i in block_ids]
        parts = EndParts(
            memory,
            IDENTITY,
            worker_id,
            incarnation,
            SystemClock(),
            config,
            device=device_for(config.planes),
            bases=bases,
        )
        self._sink = TransferSink(parts)
        self._ended_at = 0.0
        self._event: SinkEvent | None = None
        self._is_ended = threading.Event()
        self._num_handoffs = 0
        self._prefix = worker_id

    def start(self) -> None:
        """Start the threads."""
        self._sink.start(self._on_event)

    def stop(self) -> None:
        """Stop the threads."""
        self._sink.stop(STOP_TIMEOUT_S)

    def whole(self, source: SourceProcess, num_blocks: int) -> Took:
        """OPEN to ready of a prompt that is sealed already."""
        key = self._next_key()
        ticket = source.offer(key, num_blocks, at_once=True)
        started = time.monotonic()
        self._open(key, ticket, num_blocks)
        took = self._wait(key, started)
        self._wait_released(source, key)
        return took

    def doorbell(self, source: SourceProcess, num_blocks: int) -> Took:
        """Sealed at the source to ready at the sink, of a transfer that is open already."""
        key = self._next_key()
        ticket = source.offer(key, num_blocks, at_once=False)
        num_opened = self._sink.counters.opened
        self._open(key, ticket, num_blocks)
        deadline = time.monotonic() + HANDOFF_TIMEOUT_S
        while self._sink.counters.opened == num_opened:
            if time.monotonic() > deadline or self._is_ended.is_set():
                raise HandoffFailed(f"{key}: not opened: {self._event}")
            time.sleep(_POLL_S)
        source.ring(key)
        took = self._wait(key, None)
        took = Took(self._ended_at - source.rung_at(key), took.stats_us)
        self._wait_released(source, key)
        return took

    def count_wrong(self, source: SourceProcess, num_blocks: int) -> int:
        """Hand off into zeroed blocks; return how many do not have their announced digests."""
        blocks = self._block_ids[:num_blocks]
        self._memory.blocks[np.array(blocks)] = 0
        self._memory.digests[np.array(blocks)] = 0
        self.whole(source, num_blocks)
        return sum(
            bool((block_digests(LAYOUT, self._memory.blocks[b]) != self._memory.digests[b]).any())
            for b in blocks
        )

    def plane(self) -> str:
        """The plane to the one peer it has."""
        return ",".join(sorted(set(self._sink.planes().values())))

    def _next_key(self) -> str:
        self._num_handoffs += 1
        self._is_ended.clear()
        self._event = None
        return f"{self._prefix}-{self._num_handoffs}"

    def _open(self, key: str, ticket: bytes, num_blocks: int) -> None:
        hashes = offer_of(key, num_blocks).block_hashes
        self._sink.open(key, ticket, 1, (False,) * num_blocks, hashes)
        self._sink.reserve(key, self._block_ids[:num_blocks], None)

    def _wait(self, key: str, started: float | None) -> Took:
        if not self._is_ended.wait(HANDOFF_TIMEOUT_S):
            raise HandoffFailed(f"{key}: not ready within {HANDOFF_TIMEOUT_S:g} s")
        event = self._event
        if not isinstance(event, SinkReady) or event.key != key:
            raise HandoffFailed(f"{key}: {event}")
        self.attached = event.attached
        if event.attached is not None:
            self._sink.detach(key, is_intact=True)
        seconds = 0.0 if started is None else self._ended_at - started
        return Took(seconds, (event.stats.open_us, event.stats.pull_us))

    def _wait_released(self, source: SourceProcess, key: str) -> None:
        outcome = source.wait_released(key)
        if outcome != "done":
            raise HandoffFailed(f"{key}: the source says {outcome}")

    def _on_event(self, event: SinkEvent) -> None:
        self._ended_at = time.monotonic()
        self._event = event
        self._is_ended.set()
