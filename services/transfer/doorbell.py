"""Control messages over the Unix socket that handed the pool over, one packet each.

The same messages as over ZMQ, but written and read by the transfer threads themselves: no I/O
thread has to wake up on either side. The kernel keeps them in order and loses none, so whatever
belongs to one transfer goes one way: over the route on which its OPEN came.
"""

from __future__ import annotations

import socket
from collections import deque

from services.transfer.config import KIB
from services.transfer.values import Peer
from services.transfer.wire import (
    HEADER_BYTES,
    Header,
    Message,
    MessageType,
    WireError,
    decode,
    encode,
)

MAX_PACKET_BYTES = 160 * KIB  # the kernel's limit for a socket's queue is 208 KiB by default
_MAX_BACKLOG = 1024
_SEND_BUFFER_BYTES = 512 * KIB  # a wish; the kernel bounds it
_CHANNEL = b"u"


class HungUp(Exception):
    """The peer closed the connection, or reads too slowly to be one."""


def fits(body: bytes) -> bool:
    """Tell whether a message with this body can go as one packet."""
    return HEADER_BYTES + len(body) <= MAX_PACKET_BYTES


def bell_peer(base: bytes, number: int) -> Peer:
    """Name the connection with this number of one life of a peer."""
    return Peer(base, base + _CHANNEL + (number & 0xFFFFFFFF).to_bytes(4, "little"))


class Doorbell:
    """One end of a connection; belongs to one thread and never blocks it."""

    def __init__(self, connection: socket.socket, incarnation: int) -> None:
        """Take over a connected SOCK_SEQPACKET socket; whoever made it closes it."""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.connection = connection
        self.incarnation = incarnation
        self._seq = 0
        self._backlog: deque[tuple[bytes, bytes]] = deque()
        self._buffer = bytearray(MAX_PACKET_BYTES + 1)  # one more: a longer packet shows

    def send(
        self, kind: MessageType, body: bytes = b"", xfer_id: int = 0, attempt: int = 0
    ) -> None:
        """Send after what waits, or queue while the peer's end is full.

        Raises:
            HungUp: the peer is gone, or has not read for a long backlog.
            WireError: the body does not fit (see `fits`).
        """
        if not fits(body):
            raise WireError("packet_length")
        self._seq += 1
        packet = encode(Header(kind, self.incarnation, xfer_id, attempt, self._seq), body)
        self.flush()
        if not self._backlog and self._try_send(packet):
            return
        if len(self._backlog) >= _MAX_BACKLOG:
            raise HungUp("reads too slowly")
        self._backlog.append(packet)

    @property
    def has_backlog(self) -> bool:
        """Tell whether `flush` has something to do."""
        return bool(self._backlog)

    def flush(self) -> None:
        """Send what waits; HungUp as with `send`."""
        while self._backlog and self._try_send(self._backlog[0]):
            self._backlog.popleft()

    def recv(self) -> Message | None:
        """Return the next message, or None; WireError for one that makes no sense."""
        packet = self._take_packet()
        if packet is None:
            return None
        if len(packet) > MAX_PACKET_BYTES:
            raise WireError("packet_length")
        message = decode((packet[:HEADER_BYTES], packet[HEADER_BYTES:]))
        if message.header.n_payload:
            raise WireError("payload_count")  # a packet has no further frames
        return message

    def is_due(self) -> bool:
        """Tell whether to read although the socket is not readable; a kernel holds nothing back."""
        return False

    def _take_packet(self) -> memoryview | None:
        try:
            size = self.connection.recv_into(self._buffer)
        except BlockingIOError:
            return None
        except OSError as error:
            raise HungUp(type(error).__name__) from error
        if size == 0:
            raise HungUp("closed")
        return memoryview(self._buffer)[:size]

    def _try_send(self, packet: tuple[bytes, bytes]) -> bool:
        try:
            self.connection.sendmsg(packet)
        except BlockingIOError:
            return False
        except OSError as error:
            raise HungUp(type(error).__name__) from error
        return True
