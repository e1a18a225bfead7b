"""What the `fault` plane does to messages and pulled blocks: drawn from a seed, decided purely."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass

DROP, DUPLICATE, DELAY, REORDER = "drop", "duplicate", "delay", "reorder"
CORRUPT_HEADER, CORRUPT_BODY, CORRUPT_PAYLOAD = "corrupt_header", "corrupt_body", "corrupt_payload"
TRUNCATE, STALL, DISCONNECT = "truncate", "stall", "disconnect"
FAULT_KINDS = (
    DROP,
    DUPLICATE,
    DELAY,
    REORDER,
    CORRUPT_HEADER,
    CORRUPT_BODY,
    CORRUPT_PAYLOAD,
    TRUNCATE,
    STALL,
    DISCONNECT,
)


@dataclass(frozen=True, slots=True)
class FaultScript:
    """Which faults, how often and for how long; the same seed draws the same faults."""

    seed: int
    share: float = 0.05  # of the messages and of the pulled blocks
    kinds: tuple[str, ...] = FAULT_KINDS
    skip: int = 0  # the first messages of every stream pass whole
    delay_s: float = 0.03
    stall_s: float = 0.3

    def __post_init__(self) -> None:
        unknown = set(self.kinds) - set(FAULT_KINDS)
        if unknown or not self.kinds:
            raise ValueError(f"faults to choose from: {', '.join(FAULT_KINDS)}")
        if not 0 <= self.share <= 1:
            raise ValueError("a share is between 0 and 1")
        if self.skip < 0 or self.delay_s <= 0 or self.stall_s <= 0:
            raise ValueError("times are more than zero, and no less than no messages are skipped")


class FaultDice:
    """The faults of one stream: one direction of one connection, or all pulls of one sink."""

    def __init__(self, script: FaultScript, stream: str) -> None:
        self.script = script
        self.drawn: Counter[str] = Counter()
        self._rng = random.Random(f"{script.seed}/{stream}")
        self._num_passed = 0

    def draw(self) -> str:
        """Return what happens to the next message or block; "" if nothing does."""
        self._num_passed += 1
        if self._num_passed <= self.script.skip or self._rng.random() >= self.script.share:
            return ""
        kind = self._rng.choice(self.script.kinds)
        self.drawn[kind] += 1
        return kind

    def flip_bit(self, data: bytes) -> bytes:
        """Return `data` with one bit changed."""
        if not data:
            return data
        spoiled = bytearray(data)
        spoiled[self._rng.randrange(len(spoiled))] ^= 1 << self._rng.randrange(8)
        return bytes(spoiled)

    def spoil(self, kind: str, frames: list[bytes]) -> list[bytes]:
        """Return a message as a fault of content leaves it: whole where it has no such part."""
        if kind == CORRUPT_HEADER:
            return self._flipped(frames, 0)
        if kind == CORRUPT_BODY:
            return self._flipped(frames, 1)
        if kind == CORRUPT_PAYLOAD and len(frames) > 2:
            return self._flipped(frames, self._rng.randrange(2, len(frames)))
        if kind == TRUNCATE:
            return self._truncated(frames)
        return frames

    def _flipped(self, frames: list[bytes], at: int) -> list[bytes]:
        return [self.flip_bit(frame) if i == at else frame for i, frame in enumerate(frames)]

    def _truncated(self, frames: list[bytes]) -> list[bytes]:
        if len(frames) > 1 and self._rng.random() < 0.5:
            return frames[:-1]
        at = self._rng.randrange(len(frames))
        return [frame[: len(frame) // 2] if i == at else frame for i, frame in enumerate(frames)]


class FaultDeck:
    """Deals the dice of a script, one a stream, and knows what they drew; any thread."""

    def __init__(self, script: FaultScript) -> None:
        self.script = script
        self._lock = threading.Lock()
        self._dealt: list[FaultDice] = []

    def deal(self, stream: str) -> FaultDice:
        """Return the dice of a new stream; the n-th of a script draws the same in every run."""
        with self._lock:
            dice = FaultDice(self.script, f"{len(self._dealt)}/{stream}")
            self._dealt.append(dice)
            return dice

    def drawn(self) -> Counter[str]:
        """Return how often each fault was drawn so far."""
        with self._lock:
            return sum((dice.drawn for dice in self._dealt), Counter())
