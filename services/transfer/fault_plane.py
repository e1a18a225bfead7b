"""The `fault` plane: wraps the plane two workers agree on and does to it what a script says.

Only a test can ask for it: no setting of a configuration file leads here (see TransferConfig).
Every message between two ends passes through a DealerLink or a Doorbell of the sink, so that is
where messages of both directions are spoiled; pulled blocks are spoiled where they are copied.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import zmq

from services.kv.block_copy import CopyParts, pull_blocks
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.transfer import fault_script as faults
from services.transfer.config import TransferConfig
from services.transfer.doorbell import Doorbell, HungUp
from services.transfer.fault_script import FaultDice
from services.transfer.key_ring import LinkKeys
from services.transfer.wire import HEADER_BYTES, Message, WireError, decode, decode_first
from services.transfer.zmq_plane import Block, DealerLink, SinkContext

_MAX_FRAMES = 2 + 256
_MAX_HELD = 4096  # messages that wait for their time; what comes on top is lost


def open_dealer(
    context: SinkContext,
    endpoint: str,
    base: bytes,
    channel: bytes,
    config: TransferConfig,
    keys: LinkKeys | None,
    max_frame_bytes: int = 0,
) -> DealerLink:
    """Connect to a source; with a script in the configuration, through its faults."""
    kind = DealerLink if config.fault_deck is None else FaultyDealer
    return kind(context, endpoint, base, channel, config, keys, max_frame_bytes)


def open_bell(bell: Doorbell, dealer: DealerLink) -> Doorbell:
    """Return the doorbell of a link; with a script, its packets pass through faults too."""
    return FaultyDoorbell(bell, dealer) if isinstance(dealer, FaultyDealer) else bell


def open_copier(config: TransferConfig) -> CopyParts | None:
    """Return what copies blocks out of a mapped pool through a script's faults, if there is one."""
    if config.fault_deck is None:
        return None
    return FaultyCopier(config.fault_deck.deal("pulls"))


class FaultyDealer(DealerLink):
    """A connection whose messages are lost, late, doubled, spoiled, stuck or cut off."""

    def __init__(
        self,
        context: SinkContext,
        endpoint: str,
        base: bytes,
        channel: bytes,
        config: TransferConfig,
        keys: LinkKeys | None,
        max_frame_bytes: int = 0,
    ) -> None:
        deck = config.fault_deck
        assert deck is not None
        super().__init__(context, endpoint, base, channel, config, keys, max_frame_bytes)
        self._deck = deck
        self._wake = _WakeUp()
        self._out = self.new_stream(f"out/{channel.decode()}")
        self._in = self.new_stream(f"in/{channel.decode()}")
        self._payload: deque[bytes] = deque()
        self._is_cut = False

    def new_stream(self, name: str) -> _Stream:
        """Make one more stream that wakes whoever polls this connection."""
        return _Stream(self._deck.deal(name), self._wake)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes] | int, ...]:
        """What to poll: the socket, its monitor, and the time of what is late."""
        return (*super().sockets, self._wake.fd)

    def recv(self) -> Message | None:
        """Return the next header and body that got through."""
        self._payload.clear()
        self._wake.clear()
        self._send_due()
        self._take_in()
        frames = None if self._is_cut else self._in.pop()
        if frames is None:
            return None
        if self._in.is_due():
            self._wake.at(time.monotonic())  # whoever reads one message a turn comes back for it
        self._payload.extend(frames[2:])
        message = decode(frames[:2])
        if message.header.n_payload == 0 and self._payload:
            raise WireError("frame_count")
        return message

    def recv_block(self, block: Block) -> bool:
        """Write one payload frame into a block as far as it goes."""
        if not self._payload:
            return False
        frame = self._payload.popleft()
        size = min(len(frame), block.nbytes)
        block[:size] = np.frombuffer(frame, np.uint8, size)
        return len(frame) == block.nbytes

    def skip_block(self) -> None:
        """Throw one payload frame away."""
        if self._payload:
            self._payload.popleft()

    def discard_rest(self) -> int:
        """Throw away what is left of the current message."""
        num_frames = len(self._payload)
        self._payload.clear()
        return num_frames

    def broken(self) -> str | None:
        """Return why the connection is broken, or None."""
        return "cut by the script" if self._is_cut else super().broken()

    def close(self) -> None:
        """Close the connection and let no timer wake it."""
        super().close()
        self._wake.close()

    def _push(self, head: bytes, body: bytes) -> bool:
        if not self._is_cut and self._out.put([head, body]):
            self._cut()
        self._send_due()
        return True  # a script's loss looks like the network's

    def _send_due(self) -> None:
        while not self._is_cut and (frames := self._out.pop()) is not None:
            # A full pipe loses a message here too: everything a sink sends is repeated.
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(frames, zmq.NOBLOCK)

    def _take_in(self) -> None:
        while not self._is_cut:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if self._in.put(frames[:_MAX_FRAMES]):
                self._cut()

    def _cut(self) -> None:
        self._is_cut = True
        self._wake.at(time.monotonic())


class FaultyDoorbell(Doorbell):
    """The socket of a pool, whose packets have the faults of the connection beside it."""

    def __init__(self, bell: Doorbell, dealer: FaultyDealer) -> None:
        super().__init__(bell.connection, bell.incarnation)
        self._out, self._in = dealer.new_stream("bell-out"), dealer.new_stream("bell-in")
        self._is_cut = False

    def is_due(self) -> bool:
        """Tell whether a packet that was late has its time now, or the end has come."""
        return self._is_cut or self._in.is_due() or self._out.is_due()

    def _take_packet(self) -> memoryview | None:
        self._send_due()
        while not self._is_cut and (packet := super()._take_packet()) is not None:
            for message in _messages_of(packet):
                self._is_cut = self._is_cut or self._in.put(_frames_of(message))
        if self._is_cut:
            raise HungUp("cut by the script")
        frames = self._in.pop()
        return None if frames is None else memoryview(b"".join(frames))

    def _try_send(self, packet: Sequence[bytes]) -> bool:
        for message in packet:
            self._is_cut = self._is_cut or self._out.put(_frames_of(message))
        if self._is_cut:
            raise HungUp("cut by the script")
        self._send_due()
        return True

    def _send_due(self) -> None:
        while (frames := self._out.pop()) is not None:
            super()._try_send(frames)  # one that finds no room is lost


def _messages_of(packet: memoryview) -> list[bytes]:
    """Cut a packet into its messages, so that each has a fate of its own."""
    messages: list[bytes] = []
    while packet:
        try:
            rest = decode_first(packet)[1]
        except WireError:
            rest = packet[:0]  # no sense in it: it stays in one piece
        messages.append(bytes(packet[: len(packet) - len(rest)]))
        packet = rest
    return messages


def _frames_of(message: bytes) -> list[bytes]:
    return [message[:HEADER_BYTES], message[HEADER_BYTES:]]


class _Stream:
    """One direction of a connection: what has got through, and what waits for its time."""

    def __init__(self, dice: FaultDice, wake: _WakeUp) -> None:
        self._dice = dice
        self._wake = wake
        self._held: list[tuple[float, int, list[bytes]]] = []
        self._num_put = 0
        self._not_before = 0.0  # messages that keep their order wait for the one before them

    def put(self, frames: list[bytes]) -> bool:
        """Let a message pass through the script; True if the connection ends with it."""
        kind = self._dice.draw()
        if kind == faults.DISCONNECT:
            return True
        if kind == faults.DROP:
            return False
        script, due = self._dice.script, time.monotonic()
        if kind == faults.REORDER:
            self._hold(due + script.delay_s, frames)  # what comes next overtakes it
            return False
        if kind in (faults.DELAY, faults.STALL):
            wait_s = script.stall_s if kind == faults.STALL else script.delay_s
            self._not_before = max(self._not_before, due + wait_s)
        due = max(due, self._not_before)
        self._hold(due, self._dice.spoil(kind, frames))
        if kind == faults.DUPLICATE:
            self._hold(due, frames)
        return False

    def is_due(self) -> bool:
        """Tell whether the time of some message has come."""
        return bool(self._held) and self._held[0][0] <= time.monotonic()

    def pop(self) -> list[bytes] | None:
        """Return the next message whose time has come."""
        return heapq.heappop(self._held)[2] if self.is_due() else None

    def _hold(self, due: float, frames: list[bytes]) -> None:
        if len(self._held) >= _MAX_HELD:
            return
        self._num_put += 1
        heapq.heappush(self._held, (due, self._num_put, frames))
        self._wake.at(due)


class _WakeUp:
    """A descriptor that becomes readable at given times."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False

    def at(self, due: float) -> None:
        """Be readable from `due` (monotonic) on."""
        wait_s = due - time.monotonic()
        if wait_s <= 0:
            self._write()
            return
        timer = threading.Timer(wait_s, self._write)
        timer.daemon = True
        timer.start()

    def clear(self) -> None:
        """Be readable no longer."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close the descriptor; what wakes later finds nothing."""
        with self._lock:
            self._is_closed = True
            os.close(self.fd)

    def _write(self) -> None:
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self.fd, 1)


class FaultyCopier:
    """Copies blocks out of a mapped pool and spoils some, as a reused or torn block would be."""

    def __init__(self, dice: FaultDice) -> None:
        self._dice = dice

    def __call__(
        self,
        source: KvPoolMemory,
        source_blocks: Sequence[int],
        gens: Sequence[int],
        dest: npt.NDArray[np.uint8],
        dest_blocks: Sequence[int],
        part: KvLayout | None = None,
    ) -> list[bool]:
        """Copy like `pull_blocks`; block by block, as each may have a fault of its own."""
        rows = zip(source_blocks, gens, dest_blocks, strict=True)

        def copy(block: int, gen: int, to: int) -> bool:
            return pull_blocks(source, [block], [gen], dest, [to], part)[0]

        return [self._spoil(partial(copy, block, gen, to), dest[to]) for block, gen, to in rows]

    def _spoil(self, copy: Callable[[], bool], dest: npt.NDArray[np.uint8]) -> bool:
        kind, script = self._dice.draw(), self._dice.script
        if kind in (faults.DROP, faults.DISCONNECT):
            return False  # what a moved generation looks like
        if kind in (faults.DELAY, faults.STALL):
            time.sleep(script.stall_s if kind == faults.STALL else script.delay_s)
        is_good = copy()
        if kind == faults.DUPLICATE:
            is_good = copy()
        elif kind == faults.TRUNCATE:
            dest[dest.size // 2 :] = 0
        elif kind in (faults.CORRUPT_HEADER, faults.CORRUPT_BODY, faults.CORRUPT_PAYLOAD):
            dest[:] = np.frombuffer(self._dice.flip_bit(dest.tobytes()), np.uint8)
        return is_good
