"""Two transfer ends with pools of their own, and a stand-in for the engines around them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from services.bench.handoff_source import device_for
from services.common.clock import SystemClock
from services.common.ids import BlockHash, BlockId
from services.kv.attached import PoolBases
from services.kv.digest import block_digests, tail_digest
from services.kv.layout import KvIdentity, KvLayout
from services.kv.memory import KvPoolMemory
from services.runtime.fault_points import FaultPoints
from services.transfer.api import (
    FinalInfo,
    FirstTokenInfo,
    Offer,
    SinkEvent,
    SinkMoveWanted,
    SinkReady,
    SinkReleased,
    SourceReleased,
)
from services.transfer.config import KIB, MIB, TransferConfig
from services.transfer.device import Device
from services.transfer.end_parts import EndParts, ListenAt
from services.transfer.shards import ShardedSink
from services.transfer.sink import TransferSink
from services.transfer.source import TransferSource

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=32, kv_dtype="float32")
IDENTITY = KvIdentity(
    model="toy",
    revision="1",
    weights_digest="w" * 8,
    num_layers=4,
    num_kv_heads=2,
    head_dim=32,
    rope="none",
    tokenizer_digest="t" * 8,
    hash_scheme="isthmus/1",
)
# A busy machine may stop any thread for a second: no time here is near that.
CALM = TransferConfig(
    ticket_ttl_s=10.0,
    lease_s=9.0,
    tombstone_s=30.0,
    connect_timeout_s=5.0,
    open_timeout_s=5.0,
    max_wait_s=30.0,
    progress_timeout_s=2.0,
    min_rate_bytes_s=8.0 * MIB,
    ping_interval_s=1.0,
    window_bytes=2 * MIB,
    data_message_bytes=256 * KIB,
)
# For tests that wait for a time to pass; a renewal still may be a second late.
BRISK = replace(
    CALM, lease_s=2.0, connect_timeout_s=2.0, progress_timeout_s=0.5, ping_interval_s=0.4
)
PAUSE_S = 3.0  # what a test allows on top of a time it waits for


class Events:
    """Collects the events of one end and waits for them."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.deliverers: dict[str, int] = {}  # key -> the thread its last event came on
        self._changed = threading.Condition()

    def __call__(self, event: Any) -> None:
        """Take one event."""
        print(f"{time.monotonic():.3f}", event, file=sys.stderr)  # shown with a test that fails
        with self._changed:
            self.all.append(event)
            self.deliverers[event.key] = threading.get_ident()
            self._changed.notify_all()

    def of(self, key: str) -> list[Any]:
        """Return the events of a key so far."""
        with self._changed:
            return [event for event in self.all if event.key == key]

    def wait(self, key: str, timeout_s: float = 20.0) -> Any:
        """Return the first event of a key."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: [event for event in self.all if event.key == key], timeout_s
            )
            assert found, f"no event for {key} within {timeout_s} s"
            return found[0]


def wait_until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Wait for something another thread does."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition was not met in time"
        time.sleep(0.002)


def hashes(num_blocks: int, salt: int = 0) -> tuple[BlockHash, ...]:
    """Make distinct block hashes."""
    return tuple(BlockHash(bytes([salt]) * 8 + i.to_bytes(8, "big")) for i in range(num_blocks))


@dataclass
class PrefillEnd:
    """A source, its pool, and an allocator that never gives a lent block twice."""

    source: TransferSource
    memory: KvPoolMemory
    events: Events
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    free: list[BlockId] = field(default_factory=list)
    lent: dict[str, list[BlockId]] = field(default_factory=dict)

    def write_block(self, block: BlockId) -> None:
        """Fill and seal one block as an engine would."""
        memory, layout = self.memory, self.memory.layout
        memory.gens[block] += 1
        assert memory.gens[block] % 2 == 1
        memory.blocks[block] = self.rng.integers(0, 256, layout.block_bytes, dtype=np.uint8)
        memory.digests[block] = block_digests(layout, memory.blocks[block])
        memory.gens[block] += 1

    def offer(self, key: str, num_tokens: int, salt: int = 0) -> tuple[bytes, Offer]:
        """Offer a prompt of random content."""
        num_blocks = num_tokens // self.memory.layout.block_size
        offer = Offer(key, f"req-{key}", num_tokens, hashes(num_blocks, salt), "tenant")
        return self.source.offer(offer), offer

    def seal(self, key: str, lo: int, count: int) -> list[BlockId]:
        """Compute and announce `count` blocks from `lo` on."""
        blocks = [self.free.pop() for _ in range(count)]
        for block in blocks:
            self.write_block(block)
        self.lent.setdefault(key, []).extend(blocks)
        self.source.blocks_sealed(key, lo, blocks)
        return blocks

    def finish(self, key: str, num_tokens: int) -> FinalInfo:
        """Announce the end of the prefill, with a tail if the prompt has one."""
        valid = num_tokens % self.memory.layout.block_size
        tail = None
        if valid:
            tail = self.free.pop()
            self.write_block(tail)
            self.lent.setdefault(key, []).append(tail)
        first = (FirstTokenInfo(0, 42, -0.5, ((42, -0.5), (7, -1.5))), FirstTokenInfo(1, 43))
        final = FinalInfo(first, num_tokens, tail, valid, 1234)
        self.source.prefill_finished(key, final)
        return final

    def offer_all(self, key: str, num_tokens: int, salt: int = 0) -> tuple[bytes, Offer]:
        """Offer, seal and finish in one go."""
        ticket, offer = self.offer(key, num_tokens, salt)
        num_blocks = len(offer.block_hashes)
        if num_blocks:
            self.seal(key, 0, num_blocks)
        self.finish(key, num_tokens)
        return ticket, offer

    def content(self, key: str) -> list[bytes]:
        """Return the bytes of the lent blocks, tail last."""
        return [self.memory.blocks[block].tobytes() for block in self.lent[key]]

    def stop(self) -> None:
        """Stop the source."""
        self.source.stop(4.0)


@dataclass
class DecodeEnd:
    """A sink, its pool, and an allocator."""

    sink: TransferSink
    shards: ShardedSink  # around it
    memory: KvPoolMemory
    events: Events
    free: list[BlockId] = field(default_factory=list)

    def open(
        self, key: str, ticket: bytes, offer: Offer, attempt: int = 1, have: tuple[bool, ...] = ()
    ) -> None:
        """Open a ticket."""
        had = have or (False,) * len(offer.block_hashes)
        self.sink.open(key, ticket, attempt, had, offer.block_hashes)

    def reserve(self, key: str, offer: Offer, have: tuple[bool, ...] = ()) -> list[BlockId | None]:
        """Reserve what the prompt needs; return the blocks, tail last if there is one."""
        had = have or (False,) * len(offer.block_hashes)
        blocks: list[BlockId | None] = [None if h else self.free.pop() for h in had]
        tail = self.free.pop() if offer.num_tokens % self.memory.layout.block_size else None
        self.sink.reserve(key, blocks, tail)
        return blocks if tail is None else [*blocks, tail]

    def receive(
        self, key: str, ticket: bytes, offer: Offer, attempt: int = 1
    ) -> list[BlockId | None]:
        """Open and reserve at once."""
        self.open(key, ticket, offer, attempt)
        return self.reserve(key, offer)

    def content(self, blocks: list[BlockId | None]) -> list[bytes]:
        """Return the bytes of blocks."""
        return [self.memory.blocks[block].tobytes() for block in blocks if block is not None]

    def stop(self) -> None:
        """Stop the sink."""
        self.sink.stop(4.0)


_next_incarnation = iter(range(1_000, 1_000_000))


def make_prefill(
    runtime_dir: Path,
    config: TransferConfig = CALM,
    num_blocks: int = 64,
    layout: KvLayout = LAYOUT,
    identity: KvIdentity = IDENTITY,
    worker_id: str = "prefill-0",
    advertise: str | None = None,
    device: Device | None = None,
) -> PrefillEnd:
    """Start a source on loopback."""
    memory = KvPoolMemory.create(layout, num_blocks)
    incarnation = next(_next_incarnation)
    device, faults = device or device_for(config.planes), FaultPoints()
    parts = EndParts(
        memory, identity, worker_id, incarnation, SystemClock(), config, faults, device=device
    )
    source = TransferSource(parts, ListenAt("127.0.0.1", runtime_dir, advertise))
    events = Events()
    source.start(events)
    free = [BlockId(i) for i in range(num_blocks)]
    return PrefillEnd(source, memory, events, free=free)


def make_decode(
    config: TransferConfig = CALM,
    num_blocks: int = 64,
    layout: KvLayout = LAYOUT,
    identity: KvIdentity = IDENTITY,
    worker_id: str = "decode-0",
    bases: PoolBases | None = None,
    device: Device | None = None,
) -> DecodeEnd:
    """Start a sink."""
    memory = KvPoolMemory.create(layout, num_blocks)
    incarnation = next(_next_incarnation)
    device, faults = device or device_for(config.planes), FaultPoints()
    parts = EndParts(
        memory, identity, worker_id, incarnation, SystemClock(), config, faults, bases, device
    )
    sink = TransferSink(parts)
    shards = ShardedSink(sink)
    events = Events()
    shards.start(events)
    return DecodeEnd(sink, shards, memory, events, free=[BlockId(i) for i in range(num_blocks)])


def same_content(
    prefill: PrefillEnd, key: str, decode: DecodeEnd, blocks: list[BlockId | None], valid: int
) -> bool:
    """Compare full blocks byte for byte and the tail over its valid rows."""
    sent, got = prefill.lent[key], [b for b in blocks if b is not None]
    if len(sent) != len(got):
        return False
    for i, (left, right) in enumerate(zip(sent, got, strict=True)):
        a, b = prefill.memory.blocks[left], decode.memory.blocks[right]
        if valid and i == len(sent) - 1:
            layout = decode.memory.layout
            if tail_digest(layout, a, valid) != tail_digest(layout, b, valid):
                return False
        elif not np.array_equal(a, b):
            return False
    return True


def with_planes(config: TransferConfig, *planes: str) -> TransferConfig:
    """Force planes."""
    return replace(config, planes=planes)


def outcome(event: SinkEvent | SourceReleased) -> str:
    """Name an event shortly."""
    if isinstance(event, SinkReady):
        return "ready"
    if isinstance(event, SinkMoveWanted):
        return "move_wanted"
    return event.code if isinstance(event, SinkReleased) else event.outcome
