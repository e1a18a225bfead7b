"""What a simulation is fed: when prompts arrive, how long they are, what they share. Pure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from services.common.ids import BlockHash
from services.kv.layout import BLOCK_TOKENS, HINT_STRIDE_BLOCKS
from services.registry.schema import HASH_FIELD_BYTES, unpack_fields

STRIDE_TOKENS = BLOCK_TOKENS * HINT_STRIDE_BLOCKS
MAX_UNIT_TOKENS = 512  # one digest names all strides of a unit


@dataclass(frozen=True, slots=True)
class Arrival:
    """One prompt. Equal unit ids stand for equal tokens after equal prefixes."""

    at_s: float
    num_tokens: int
    output_tokens: int
    units: tuple[int, ...]  # the last one may be partly filled
    tenant: str = ""
    priority: int = 0  # higher goes first where requests wait


@dataclass(frozen=True, slots=True)
class Client:
    """Who sends all requests, if that bounds them. What waits for room goes in order."""

    max_in_flight: int
    until_s: float  # what has had no room by then is never sent, and in no report

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise ValueError("a client has a request in flight at least")


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts by arrival, in pieces of `unit_tokens` that are cached as a whole."""

    name: str
    unit_tokens: int
    arrivals: tuple[Arrival, ...]
    client: Client | None = None  # None = each is sent when it is due
    _names: dict[int, bytes] = field(default_factory=dict, compare=False, repr=False)
    _hashes: dict[int, tuple[BlockHash, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.unit_tokens % STRIDE_TOKENS or not 0 < self.unit_tokens <= MAX_UNIT_TOKENS:
            raise ValueError(f"a unit is 64 to 512 tokens in steps of 64, not {self.unit_tokens}")

    def names(self, arrival: Arrival) -> bytes:
        """Return the hint fields of a prompt: 8 bytes a stride, one for each whole one."""
        names = b"".join(map(self.unit_names, arrival.units))
        return names[: arrival.num_tokens // STRIDE_TOKENS * HASH_FIELD_BYTES]

    def unit_names(self, unit: int) -> bytes:
        """Return the hint fields of one unit."""
        names = self._names.get(unit)
        if names is None:
            size = self.unit_tokens // STRIDE_TOKENS * HASH_FIELD_BYTES
            names = hashlib.blake2b(struct.pack("<q", unit), digest_size=size).digest()
            self._names[unit] = names
        return names

    def filled_names(self, unit: int, num_tokens: int) -> tuple[BlockHash, ...]:
        """Return the hint fields of the whole strides among the first tokens of a unit."""
        hashes = self._hashes.get(unit)
        if hashes is None:
            names = map(BlockHash, unpack_fields(self.unit_names(unit)))
            hashes = self._hashes[unit] = tuple(names)
        return hashes if num_tokens == self.unit_tokens else hashes[: num_tokens // STRIDE_TOKENS]


def faster(arrivals: Sequence[Arrival], speedup: float) -> tuple[Arrival, ...]:
    """Let the same prompts arrive `speedup` times as fast."""
    return tuple(
        Arrival(a.at_s / speedup, a.num_tokens, a.output_tokens, a.units) for a in arrivals
    )


def ideal_hit(workload: Workload) -> float:
    """Return the share of units that a cache without end would have had, by leading runs."""
    seen: set[int] = set()
    hits = total = 0
    for arrival in workload.arrivals:
        hits += leading_run(arrival.units, seen)
        total += len(arrival.units)
        seen.update(arrival.units)
    return hits / total if total else 0.0


def ideal_token_hit(workload: Workload) -> float:
    """Return the share of tokens that a cache without end would have had, by leading runs."""
    seen: set[int] = set()
    hits = total = 0
    for arrival in workload.arrivals:
        run = leading_run(arrival.units, seen)
        hits += min(run * workload.unit_tokens, arrival.num_tokens)
        total += arrival.num_tokens
        seen.update(arrival.units)
    return hits / total if total else 0.0


def leading_run(units: Sequence[int], held: Container[int]) -> int:
    """Return how many of the first units are held without a gap."""
    return next((i for i, unit in enumerate(units) if unit not in held), len(units))
