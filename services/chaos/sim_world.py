"""Virtual time, chance and workers of the transfer simulator: one heap of events, one seed."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.ids import BlockHash, BlockId
from services.kv.block_copy import read_blocks
from services.kv.block_pool import BlockPool
from services.kv.digest import block_digests
from services.kv.hashing import next_hash
from services.kv.layout import BLOCK_TOKENS, LAYER_MAJOR, KvLayout
from services.kv.memory import KvPoolMemory

Bytes = npt.NDArray[np.uint8]

# Small blocks of real bytes: content is compared, not presumed.
PLAIN = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, kv_dtype="float16")
WHOLE = KvLayout(num_layers=2, num_kv_heads=2, head_dim=2, kv_dtype="float16")
_FULL_CHECK_EVERY = 256  # events of one worker between two looks at every block of its pool
_NAME_BYTES = 16
_PLANE_BYTES = BLOCK_TOKENS * PLAIN.head_dim * PLAIN.itemsize  # K or V of one layer and head
_REPEATS = _PLANE_BYTES // _NAME_BYTES


class Violation(Exception):
    """The protocol broke one of its promises; the text says which and where."""


@dataclass(frozen=True, slots=True)
class Odds:
    """How often what goes wrong: chances per message, per request, or per arrival."""

    drop: float = 0.004
    corrupt: float = 0.004
    duplicate: float = 0.006
    delay: float = 0.006
    reorder: float = 0.01
    cancel: float = 0.06
    race: float = 0.03
    slow_sender: float = 0.04
    crash: float = 0.004
    cut: float = 0.004
    break_link: float = 0.01
    freeze: float = 0.006
    clock_step: float = 0.02
    pressure: float = 0.3
    torn: float = 0.05
    decode_wait: float = 0.05
    at_once: float = 0.05
    goes_on: float = 0.1
    unpin: float = 0.02
    lose_plane: float = 0.005
    slow_reader: float = 0.002


@dataclass(frozen=True, slots=True)
class Shape:
    """What the pools of a run hold, and how much of what is mapped is verified by digests.

    Prefill pools that hold all of a block compute a prompt alone; shards compute it together.
    """

    prefill: tuple[KvLayout, KvLayout] = (PLAIN, PLAIN)
    decode: tuple[KvLayout, KvLayout, KvLayout] = (PLAIN, PLAIN, PLAIN)
    digest_sampling: int = 1  # of blocks read out of a mapped pool; sent ones are all verified
    planes: tuple[str, ...] = ("memfd", "zmq")

    @property
    def is_sharded(self) -> bool:
        """Whether it takes both prefill pools to make one block."""
        return not any(layout.is_same(_whole(layout)) for layout in self.prefill)


def _whole(layout: KvLayout) -> KvLayout:
    return layout.part((0, layout.total_layers), (0, layout.total_heads))


def _by_layer(layout: KvLayout) -> KvLayout:
    return replace(layout, tag=LAYER_MAJOR)


_NEVER = 1 << 30
_LAYERS = (WHOLE.part((0, 1), (0, 2)), WHOLE.part((1, 2), (0, 2)))
_HEADS = (WHOLE.part((0, 2), (0, 1)), WHOLE.part((0, 2), (1, 2)))
# Whole pools, some of which trust generations alone or are read in place; ranges of heads, layers.
# Two prefill pools are layer-major, each beside one that is not.
SHAPES: tuple[Shape, ...] = (
    Shape(),
    Shape((_by_layer(PLAIN), PLAIN), digest_sampling=_NEVER),
    Shape(digest_sampling=_NEVER, planes=("attach", "memfd", "zmq")),
    Shape((WHOLE, WHOLE), (*_HEADS, WHOLE)),
    Shape(_HEADS, (WHOLE, WHOLE, _LAYERS[1]), digest_sampling=_NEVER),
    Shape(digest_sampling=3, planes=("attach", "memfd", "zmq")),
    Shape((_LAYERS[0], _by_layer(_LAYERS[1])), (WHOLE, *_LAYERS)),
)


@dataclass(frozen=True, slots=True)
class Family:
    """A prompt others may share a prefix with: hashes of its full blocks."""

    number: int
    hashes: tuple[BlockHash, ...]

    @classmethod
    def make(cls, number: int, num_blocks: int) -> Family:
        """Chain the hashes of a prompt nobody had before."""
        parent = BlockHash(bytes(16))
        hashes: list[BlockHash] = []
        for index in range(num_blocks):
            parent = next_hash(parent, (number << 8 | index).to_bytes(4, "little") * BLOCK_TOKENS)
            hashes.append(parent)
        return cls(number, tuple(hashes))

    def tail_name(self, num_tokens: int) -> BlockHash:
        """Name the content of a partial last block."""
        return BlockHash(sha256(b"tail %d %d" % (self.number, num_tokens)).digest()[:16])


def turns_of(layout: KvLayout) -> tuple[int, ...]:
    """Say how the name of a block is turned in each plane it holds: no two planes are alike."""
    return tuple(
        (layer * 2 + kind) * layout.total_heads + head
        for layer in range(*layout.layers)
        for kind in range(2)  # K, V
        for head in range(*layout.heads)
    )


def reference(name: BlockHash, turns: tuple[int, ...]) -> bytes:
    """Return the one content a block of that hash may have in a pool with those planes."""
    twice = name + name
    return b"".join(twice[turn : turn + _NAME_BYTES] * _REPEATS for turn in turns)


def valid_rows(block: Bytes, valid_tokens: int) -> bytes:
    """Return the rows of a partial block that mean something."""
    row_bytes = _PLANE_BYTES // BLOCK_TOKENS
    return block.reshape(-1, BLOCK_TOKENS, row_bytes)[:, :valid_tokens].tobytes()


class World:
    """The heap of events. Everything that happens is drawn from one generator, in order."""

    def __init__(self, seed: int, odds: Odds, *, record: bool, shape: Shape | None = None) -> None:
        self.rng = random.Random(seed)
        self.odds = odds
        self.shape = shape or Shape()
        self.now = 1_000.0
        self.wall_ms = 1_700_000_000_000  # steps with its fault; nothing may depend on it
        self.log: list[str] | None = [] if record else None
        self.stats: Counter[str] = Counter()
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, delay_s: float, event: Callable[..., None], *args: Any) -> None:
        """Let something happen later."""
        heapq.heappush(self._heap, (self.now + delay_s, self.count(), event, args))

    def count(self) -> int:
        """Return a number nobody else gets."""
        self._count += 1
        return self._count

    def happens(self, chance: float) -> bool:
        """Draw."""
        return self.rng.random() < chance

    def note(self, who: str, what: str) -> None:
        """Write a line of the event log, if there is one."""
        if self.log is not None:
            self.log.append(f"{self.now - 1_000.0:.6f} {who} {what}")

    def run(self, max_events: int) -> None:
        """Let everything happen until nothing is left to happen."""
        while self.step():
            if self.num_events > max_events:
                raise Violation(f"still busy after {max_events} events: a hang")

    def pending(self) -> int:
        """Return how many events are still to come."""
        return len(self._heap)

    def step(self) -> bool:
        """Let the next thing happen; False when there is none."""
        if not self._heap:
            return False
        self.now, _, event, args = heapq.heappop(self._heap)
        self.num_events += 1
        event(*args)
        return True


class Worker:
    """One process: its lives, its pool, and who holds which block of it."""

    def __init__(self, world: World, name: str, num_blocks: int, layout: KvLayout) -> None:
        self.world = world
        self.name = name
        self.num_blocks = num_blocks
        self.layout = layout
        self.turns = turns_of(layout)
        self.incarnation = 0
        self.is_up = False
        self.frozen_until = 0.0
        self.boot()

    def boot(self) -> None:
        """Begin a life: a new incarnation with an empty pool."""
        self.incarnation = self.world.rng.getrandbits(63) | 1
        self.is_up = True
        self.memory = KvPoolMemory.create(self.layout, self.num_blocks, kind="anonymous")
        self.pool = BlockPool(self.num_blocks, self.memory.gens)
        self.ledger: dict[BlockId, int] = {}  # references, counted apart from the pool's
        self._under_way: dict[int, Callable[[], None]] = {}
        self._num_events = 0
        self.world.note(self.name, f"boot {self.incarnation:016x}")

    def crash(self) -> None:
        """End a life; the old memory stays readable to those who mapped it."""
        self.world.note(self.name, "crash")
        self.world.stats["crashes"] += 1
        self.is_up = False
        self.incarnation = 0
        for lost in self._under_way.values():
            self.world.at(0.0, lost)

    def at(self, delay_s: float, event: Callable[..., None], *args: Any) -> None:
        """Let something happen in this life only, and not while the process is frozen."""
        self.world.at(delay_s, self._run, self.incarnation, event, args)

    def ask(self, event: Callable[..., None], *args: Any, lost: Callable[[], None]) -> None:
        """Send work over the router's stream, which says when the process died before it came."""
        key = self.world.count()
        self._under_way[key] = lost
        self.at(0.0003, self._asked, key, event, args)

    def _asked(self, key: int, event: Callable[..., None], args: tuple[Any, ...]) -> None:
        del self._under_way[key]
        event(*args)

    def _run(self, incarnation: int, event: Callable[..., None], args: tuple[Any, ...]) -> None:
        if incarnation != self.incarnation or not self.is_up:
            return
        if self.world.now < self.frozen_until:
            self.world.at(self.frozen_until - self.world.now, self._run, incarnation, event, args)
            return
        event(*args)
        self.check()

    def check(self) -> None:
        """Compare the pool with the ledger: no block lost, none in two places."""
        if self.pool.num_available + len(self.ledger) != self.num_blocks:
            counts = self.pool.counts()
            raise Violation(f"{self.name}: {counts} but {len(self.ledger)} blocks are held")
        self._num_events += 1
        if self._num_events % _FULL_CHECK_EVERY == 0:
            self.pool.check_integrity()

    def check_at_rest(self) -> None:
        """Hold the pool to what must be true when nothing is left to do."""
        counts = self.pool.counts()
        if counts.free + counts.cached != counts.total or self.ledger:
            raise Violation(f"{self.name}: blocks leaked at rest: {counts} {self.ledger}")
        self.pool.check_integrity()
        for block_hash in self.pool.cache.hashes():
            block = self.pool.cache.entry(block_hash).block_id
            row = self.content(block)
            if row.tobytes() != reference(block_hash, self.turns):
                raise Violation(f"{self.name}: cached block {block} is not what its hash says")
            if not (self.memory.digests[block] == block_digests(self.layout, row)).all():
                raise Violation(f"{self.name}: digests beside block {block} are not its own")

    # ---- blocks -------------------------------------------------------------------------------

    def content(self, block: BlockId) -> Bytes:
        """Return what a block holds."""
        return read_blocks(self.memory, [block])[0]

    def allocate(self, num_blocks: int, after: BlockId | None = None) -> tuple[BlockId, ...]:
        """Take blocks to write; raises BlocksExhausted."""
        blocks = self.pool.allocate(num_blocks, after)
        for block in blocks:
            if block in self.ledger:
                raise Violation(f"{self.name}: block {block} was given out while it was held")
            self.ledger[block] = 1
        return blocks

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Add a reference."""
        self.pool.incref(blocks)
        for block in blocks:
            self.ledger[block] = self.ledger.get(block, 0) + 1

    def drop(self, blocks: Sequence[BlockId]) -> None:
        """Give back one reference each, in token order."""
        self.pool.decref(blocks)
        for block in blocks:
            self._unhold(block)

    def _unhold(self, block: BlockId) -> None:
        self.ledger[block] -= 1
        if not self.ledger[block]:
            del self.ledger[block]

    def seal(self, block: BlockId, name: BlockHash, parent: BlockHash | None) -> BlockId:
        """Enter a block in the prefix cache; a twin may take its place."""
        kept = self.pool.seal(block, name, parent)
        if kept != block:
            self._unhold(block)
            self.ledger[kept] = self.ledger.get(kept, 0) + 1
        return kept

    # ---- other work on the same pool ----------------------------------------------------------

    def press(self, num_blocks: int) -> None:
        """Serve another request: it evicts, writes a canary, holds it and looks at it again."""
        rng = self.world.rng
        count = min(num_blocks, self.pool.num_available)
        if not count:
            return
        blocks = self.allocate(count)
        canary = rng.randrange(1, 256)
        self.memory.pieces()[list(blocks)] = canary
        self.at(rng.random() * 0.05, self._unpress, blocks, canary)

    def _unpress(self, blocks: tuple[BlockId, ...], canary: int) -> None:
        if not (self.memory.pieces()[list(blocks)] == canary).all():
            raise Violation(f"{self.name}: something wrote into another request's blocks")
        self.drop(blocks)
