"""The wire of the transfer simulator: drops, doubles, reorders, delays, corrupts and cuts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.chaos.sim_world import Worker, World
from services.kv.memory import KvPoolMemory
from services.transfer import receiver as rx
from services.transfer.values import Peer

_LATENCY_S = 0.0002
_JITTER_S = 0.001
MAX_DELAY_S = 0.4
_LATE_S = 3.0  # a double may come when everything is over


class PrefillEnd(Worker, ABC):
    """What decode workers can say to a prefill worker."""

    @abstractmethod
    def on_message(
        self,
        link: Link,
        action: rx.ReceiverAction,
        xfer_id: int,
        attempt: int,
        signed: bytes,
    ) -> None:
        """Take a message of one transfer; `signed` is the ticket an OPEN carries."""

    @abstractmethod
    def on_pulled(self, link: Link, xfer_id: int, attempt: int, lo: int, hi: int) -> None:
        """Note a reader's progress."""

    @abstractmethod
    def on_renew(self, link: Link, xfer_ids: tuple[int, ...]) -> None:
        """Renew leases and say which are known."""

    @abstractmethod
    def peer_lost(self, base: bytes) -> None:
        """Note that a connection of a decode worker broke."""


@dataclass(eq=False, slots=True)
class Link:
    """One connection: opened by decode, to one life of a prefill worker."""

    decode: Worker
    prefill: PrefillEnd
    decode_incarnation: int
    prefill_incarnation: int
    peer: Peer
    plane: str
    memory: KvPoolMemory  # of that life; stays readable when it is over
    hears: Callable[..., None]  # decode's ear for messages
    hears_renewed: Callable[..., None]
    last_heard: float
    last_data: float = 0.0
    is_up: bool = True  # as decode sees it
    next_seq_out: int = 0  # prefill to decode
    next_seq_in: int = 0
    clear_at: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    def has_gap(self, seq: int) -> bool:
        """Note a sequence number; True if one or more before it are missing."""
        expected = self.next_seq_in
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

    def to_prefill(self, link: Link, deliver: Callable[..., None], *args: Any) -> None:
        """Send a control message from decode; prefill drops it if it is another life by then."""
        if link.prefill.incarnation == link.prefill_incarnation:
            self._send(link, True, None, deliver, args)

    def to_decode(self, link: Link, payload: list[bytes] | None, *args: Any) -> None:
        """Send a message from prefill, with its place in the order of the connection."""
        seq = link.next_seq_out
        link.next_seq_out += 1
        if link.decode.incarnation == link.decode_incarnation:
            self._send(link, False, payload, link.hears, (seq, *args))

    def renewed(self, link: Link, asked: tuple[int, ...], known: tuple[int, ...]) -> None:
        """Answer RENEW on its own connection."""
        if link.decode.incarnation == link.decode_incarnation:
            self._send(link, False, None, link.hears_renewed, (asked, known))

    def _send(
        self,
        link: Link,
        is_up: bool,
        payload: list[bytes] | None,
        deliver: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:
        world = self._world
        source, target = (link.decode, link.prefill) if is_up else (link.prefill, link.decode)
        draw = world.rng.random()
        fate = self._fate(draw, has_payload=payload is not None)
        if fate == "drop" or (self._cut_until and self.is_cut(source, target)):
            world.stats["dropped"] += 1
            world.note(source.name, f"lost on the way to {target.name}")
            return
        if fate:
            world.stats[fate] += 1
        if fate == "corrupt" and payload:
            payload = _flip(payload, world)
        latency = _LATENCY_S + draw * 997.0 % 1.0 * _JITTER_S
        arrival = max(world.now + latency, link.clear_at[is_up])
        if fate == "delay":
            arrival += world.rng.random() * MAX_DELAY_S
        if fate == "reorder":
            arrival = world.now + latency + world.rng.random() * 0.02  # others may overtake it
        else:
            link.clear_at[is_up] = arrival
        self._arrive(target, arrival - world.now, link, payload, deliver, args)
        if fate == "duplicate":
            late = _LATE_S if world.happens(0.3) else 0.01
            again = arrival - world.now + world.rng.random() * late
            self._arrive(target, again, link, payload, deliver, args)

    def _fate(self, draw: float, *, has_payload: bool) -> str:
        if draw >= self._reorder:
            return ""
        if draw < self._drop:
            return "drop"
        if draw < self._corrupt:
            # The header's checksum covers the body: a damaged control message is no message.
            return "corrupt" if has_payload else "drop"
        if draw < self._duplicate:
            return "duplicate"
        return "delay" if draw < self._delay else "reorder"

    def _arrive(
        self,
        target: Worker,
        delay_s: float,
        link: Link,
        payload: list[bytes] | None,
        deliver: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:
        if payload is None:
            target.at(delay_s, deliver, link, *args)
        else:
            target.at(delay_s, deliver, link, *args, payload)


def _flip(payload: list[bytes], world: World) -> list[bytes]:
    """Damage one frame: one bit, or its length."""
    index = world.rng.randrange(len(payload))
    frame = bytearray(payload[index])
    if world.happens(0.2):
        del frame[-1]
    else:
        frame[world.rng.randrange(len(frame))] ^= 1 << world.rng.randrange(8)
    return [*payload[:index], bytes(frame), *payload[index + 1 :]]
