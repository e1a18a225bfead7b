"""Control messages over the Unix socket that handed the pool over, several in a packet.

The same messages as over ZMQ, but written and read by the ends' own threads: no I/O thread has
to wake up on either side. The kernel keeps them in order and loses none, so whatever
belongs to one transfer goes one way: over the route on which its OPEN came.

A message leaves with the next `flush`, together with all that were sent before it: every system
call gives the interpreter's lock away, and getting it back may take milliseconds.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from collections.abc import Sequence

from services.transfer.config import KIB
from services.transfer.values import Peer
from services.transfer.wire import (
    HEADER_BYTES,
    Header,
    Message,
    MessageType,
    WireError,
    decode_first,
    encode,
)

MAX_PACKET_BYTES = 160 * KIB  # the kernel's limit for a socket's queue is 208 KiB by default
_MAX_BACKLOG = 1024
_MESSAGES_A_PACKET = 64
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
    """One end of a connection; for one thread at a time, which it never blocks."""

    def __init__(self, connection: socket.socket, incarnation: int) -> None:
        """Take over a connected SOCK_SEQPACKET socket; whoever made it closes it."""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.connection = connection
        self.incarnation = incarnation
        self._seq = 0
        self._backlog: deque[bytes] = deque()
        self._buffer = bytearray(MAX_PACKET_BYTES + 1)  # one more: a longer packet shows
        self._unread = memoryview(b"")  # of the packet in the buffer

    def send(
        self, kind: MessageType, body: bytes = b"", xfer_id: int = 0, attempt: int = 0
    ) -> None:
        """Have a message leave with the next `flush`.

        Raises:
            HungUp: the peer has not read for a long backlog.
            WireError: the body does not fit (see `fits`).
        """
        if not fits(body):
            raise WireError("packet_length")
        if len(self._backlog) >= _MAX_BACKLOG:
            raise HungUp("reads too slowly")
        self._seq += 1
        header = Header(kind, self.incarnation, xfer_id, attempt, self._seq)
        self._backlog.append(b"".join(encode(header, body)))

    @property
    def has_backlog(self) -> bool:
        """Tell whether messages wait."""
        return bool(self._backlog)

    def flush(self) -> None:
        """Send what waits, as far as the peer's end takes it; HungUp when it is gone."""
        while self._backlog:
            packet, size = [self._backlog[0]], len(self._backlog[0])
            for message in itertools.islice(self._backlog, 1, _MESSAGES_A_PACKET):
                size += len(message)
                if size > MAX_PACKET_BYTES:
                    break
                packet.append(message)
            if not self._try_send(packet):
                return
            for _ in packet:
                self._backlog.popleft()

    @property
    def has_unread(self) -> bool:
        """Tell whether more of the last packet waits here, where no poll sees it."""
        return bool(self._unread)

    def recv(self) -> Message | None:
        """Return the next message, or None; WireError for one that makes no sense.

        What follows nonsense in the same packet is thrown away: nobody knows where it begins.
        """
        if not self._unread:
            packet = self._take_packet()
            if packet is None:
                return None
            if len(packet) > MAX_PACKET_BYTES:
                raise WireError("packet_length")
            self._unread = packet
        packet, self._unread = self._unread, self._unread[:0]
        message, self._unread = decode_first(packet)
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

    def _try_send(self, packet: Sequence[bytes]) -> bool:
        try:
            self.connection.sendmsg(packet)
        except BlockingIOError:
            return False
        except OSError as error:
            raise HungUp(type(error).__name__) from error
        return True
