"""The wire of the transfer simulator: real frames, dropped, doubled, reordered, delayed, damaged.

Every message is encoded and decoded by the code workers use. A damaged one has to be refused by
the decoder; what passes for a message of a hostile peer is shown to the parsers alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.chaos.sim_forgery import parse_forged
from services.chaos.sim_world import Violation, Worker, World
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.transfer.values import Peer
from services.transfer.wire import Header, MessageType, WireError, decode, encode

_LATENCY_S = 0.0002
_JITTER_S = 0.001
MAX_DELAY_S = 0.4
_LATE_S = 3.0  # a double may come when everything is over
_DAMAGED_CONTROL = 0.3  # of damaged messages with payload, those damaged before it

Target = tuple[str, int]


class Frames(NamedTuple):
    """One message as sockets carry it."""

    head: bytes
    body: bytes
    payload: Sequence[bytes] = ()


class PrefillEnd(Worker, ABC):
    """What decode workers can say to a prefill worker."""

    @abstractmethod
    def on_frames(self, link: Link, frames: Frames) -> None:
        """Take a message."""

    @abstractmethod
    def peer_lost(self, base: bytes) -> None:
        """Note that a connection of a decode worker broke."""


@dataclass(eq=False, slots=True)
class Link:
    """One connection: opened by decode, to whatever life of a prefill worker answered."""

    decode: Worker
    prefill: PrefillEnd
    decode_incarnation: int
    prefill_incarnation: int
    target: Target  # the life decode wants; not always the one it got
    peer: Peer
    hears: Callable[[Link, Frames], None]  # decode's ear for messages
    hears_renewed: Callable[[Link, Frames], None]
    last_heard: float
    deadline: float  # of the handshake
    plane: str = ""  # set by WELCOME
    layout: KvLayout | None = None  # of the peer's pool
    frame: KvLayout | None = None  # what comes of one of its blocks
    converts: bool = False
    memory: KvPoolMemory | None = None  # of that life; stays readable when it is over
    last_data: float = 0.0
    is_up: bool = True  # as decode sees it
    next_seq_out: int = 0  # prefill to decode
    next_seq_in: int | None = None
    asked: list[tuple[int, ...]] = field(default_factory=list)  # RENEW without an answer yet
    clear_at: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    def has_gap(self, seq: int) -> bool:
        """Note a sequence number; True if one or more before it are missing."""
        expected = self.next_seq_in
        if expected is None:
            self.next_seq_in = seq + 1
            return False
        self.next_seq_in = max(expected, seq + 1)
        return seq > expected


class Network:
    """Decides the fate of every message."""

    def __init__(self, world: World) -> None:
        self._world = world
        odds = world.odds
        self._drop = odds.drop
        self._corrupt = self._drop + odds.corrupt
        self._duplicate = self._corrupt + odds.duplicate
        self._delay = self._duplicate + odds.delay
        self._reorder = self._delay + odds.reorder
        self._cut_until: dict[tuple[str, str], float] = {}

    def cut(self, source: Worker, target: Worker, seconds: float) -> None:
        """Lose everything one way for a while."""
        self._world.note("network", f"cut {source.name}->{target.name} {seconds:.3f}s")
        self._world.stats["cuts"] += 1
        self._cut_until[source.name, target.name] = self._world.now + seconds

    def is_cut(self, source: Worker, target: Worker) -> bool:
        """Tell whether that way is cut."""
        return self._world.now < self._cut_until.get((source.name, target.name), 0.0)

    def to_prefill(
        self, link: Link, kind: MessageType, body: bytes, xfer_id: int = 0, attempt: int = 0
    ) -> None:
        """Send from decode; a connection leads to one life and ends with it."""
        if link.prefill.incarnation == link.prefill_incarnation:
            header = Header(kind, link.decode_incarnation, xfer_id, attempt)
            self._send(link, True, header, body, (), link.prefill.on_frames)

    def to_decode(
        self,
        link: Link,
        kind: MessageType,
        body: bytes,
        xfer_id: int = 0,
        attempt: int = 0,
        payload: Sequence[bytes] = (),
    ) -> None:
        """Send from prefill, with its place in the order of the connection."""
        seq = link.next_seq_out
        link.next_seq_out += 1
        if link.decode.incarnation == link.decode_incarnation:
            incarnation = link.prefill_incarnation
            header = Header(kind, incarnation, xfer_id, attempt, seq, len(payload))
            self._send(link, False, header, body, payload, link.hears)

    def renewed(self, link: Link, body: bytes) -> None:
        """Answer RENEW on its own connection."""
        if link.decode.incarnation == link.decode_incarnation:
            header = Header(MessageType.RENEWED, link.prefill_incarnation)
            self._send(link, False, header, body, (), link.hears_renewed)

    def _send(
        self,
        link: Link,
        is_up: bool,
        header: Header,
        body: bytes,
        payload: Sequence[bytes],
        deliver: Callable[[Link, Frames], None],
    ) -> None:
        world = self._world
        source, target = (link.decode, link.prefill) if is_up else (link.prefill, link.decode)
        draw = world.rng.random()
        fate = self._fate(draw)
        if fate == "drop" or (self._cut_until and self.is_cut(source, target)):
            world.stats["dropped"] += 1
            world.note(source.name, f"lost on the way to {target.name}")
            return
        frames = Frames(*encode(header, body), payload)
        if fate:
            world.stats[fate] += 1
            if fate == "corrupt":
                frames = self._damage(header.type, frames)
        latency = _LATENCY_S + draw * 997.0 % 1.0 * _JITTER_S
        arrival = max(world.now + latency, link.clear_at[is_up])
        if fate == "delay":
            arrival += world.rng.random() * MAX_DELAY_S
        if fate == "reorder":
            arrival = world.now + latency + world.rng.random() * 0.02  # others may overtake it
        else:
            link.clear_at[is_up] = arrival
        target.at(arrival - world.now, deliver, link, frames)
        if fate == "duplicate":
            late = _LATE_S if world.happens(0.3) else 0.01
            again = arrival - world.now + world.rng.random() * late
            target.at(again, deliver, link, frames)

    def _fate(self, draw: float) -> str:
        if draw >= self._reorder:
            return ""
        if draw < self._drop:
            return "drop"
        if draw < self._corrupt:
            return "corrupt"
        if draw < self._duplicate:
            return "duplicate"
        return "delay" if draw < self._delay else "reorder"

    def _damage(self, kind: MessageType, frames: Frames) -> Frames:
        """Damage one frame: a bit of it, or its length."""
        world = self._world
        if frames.payload and not world.happens(_DAMAGED_CONTROL):
            index = world.rng.randrange(len(frames.payload))
            payload = list(frames.payload)
            payload[index] = _spoil(payload[index], world)
            return frames._replace(payload=payload)
        if frames.body and world.happens(0.7):
            damaged = frames._replace(body=_spoil(frames.body, world))
            world.stats[f"forged: {parse_forged(kind, damaged.body)}"] += 1
        else:
            damaged = frames._replace(head=_spoil(frames.head, world))
        try:
            decode((damaged.head, damaged.body))
        except WireError:
            return damaged
        raise Violation(f"a damaged {kind.name} passes for a message")


def _spoil(frame: bytes, world: World) -> bytes:
    spoilt = bytearray(frame)
    if world.happens(0.2):
        del spoilt[-1]
    else:
        spoilt[world.rng.randrange(len(spoilt))] ^= 1 << world.rng.randrange(8)
    return bytes(spoilt)
