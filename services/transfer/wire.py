"""Frame 0 of every message between workers: a fixed header, checked before anything is believed.

A message is [header][protobuf body][payload frames]. The checksum covers header and body;
payload is covered by the block digests. Nothing here allocates by a length a peer named.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from services.transfer.config import KIB, MIB

MAGIC = b"ISTK"
VERSION = 1
MAX_PAYLOAD_FRAMES = 256

_HEADER = struct.Struct("<4sBBHQQIIII")
_SUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _SUM.size


class MessageType(IntEnum):
    """What a message is; never reuse a number."""

    HELLO = 1
    WELCOME = 2
    INCOMPATIBLE = 3
    OPEN = 4
    OPENED = 5
    REJECT = 6
    READY = 7
    DATA = 8
    CREDIT = 9
    PULLED = 10
    NACK = 11
    FINAL = 12
    RENEW = 13
    RENEWED = 14
    DONE = 15
    CLOSED = 16
    ABORT = 17
    ABORTED = 18
    PING = 19
    PONG = 20
    DRAIN = 21
    GROUP_JOIN = 40
    GROUP_JOINED = 41
    GROUP_ENTRY = 42
    GROUP_LEAVE = 43
    GROUP_BATCH = 44
    GROUP_GO = 45


GROUP_MESSAGES = frozenset(kind for kind in MessageType if kind.name.startswith("GROUP_"))

_SMALL = 8 * KIB
_MAX_BODY: dict[MessageType, int] = {
    MessageType.OPEN: MIB,  # a ticket with its hashes
    MessageType.OPENED: MIB,
    MessageType.READY: MIB,
    MessageType.FINAL: 64 * KIB,
    MessageType.DATA: 256 * KIB,  # converted frames bring their digests
    MessageType.NACK: 256 * KIB,
    MessageType.GROUP_BATCH: 256 * KIB,
    MessageType.RENEW: 64 * KIB,
    MessageType.RENEWED: 64 * KIB,
}
MAX_BODY_BYTES = max(_MAX_BODY.values())


class WireError(Exception):
    """A frame that is not ours or not whole; `reason` is a short constant for counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Header:
    """Frame 0. `incarnation` is that of the process which made the message."""

    type: MessageType
    incarnation: int
    xfer_id: int = 0
    attempt: int = 0
    seq: int = 0
    n_payload: int = 0
    flags: int = 0
    body_len: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """Header and body of one message; payload stays with the socket."""

    header: Header
    body: bytes


def encode(header: Header, body: bytes = b"") -> tuple[bytes, bytes]:
    """Return frames 0 and 1."""
    limit = _MAX_BODY.get(header.type, _SMALL)
    if len(body) > limit:
        raise WireError("body_too_long")
    if header.n_payload > MAX_PAYLOAD_FRAMES:
        raise WireError("payload_count")
    head = _HEADER.pack(
        MAGIC,
        VERSION,
        header.type,
        header.flags,
        header.xfer_id,
        header.incarnation,
        header.attempt,
        header.seq & 0xFFFFFFFF,
        len(body),
        header.n_payload,
    )
    return head + _SUM.pack(_checksum(head, body)), body


def decode(frames: Sequence[bytes | memoryview]) -> Message:
    """Check frames 0 and 1 and return them; raise WireError on anything that is not right."""
    if len(frames) != 2:
        raise WireError("frame_count")
    head, body = bytes(frames[0][: HEADER_BYTES + 1]), frames[1]
    if len(head) != HEADER_BYTES:
        raise WireError("header_length")
    header = _parse_header(head)
    if len(body) != header.body_len:
        raise WireError("body_length")
    (expected,) = _SUM.unpack_from(head, _HEADER.size)
    if _checksum(head[: _HEADER.size], body) != expected:
        raise WireError("checksum")
    return Message(header, bytes(body))


def decode_first(packet: memoryview) -> tuple[Message, memoryview]:
    """Read the first of several messages without payload, one behind the other; and the rest."""
    if len(packet) < HEADER_BYTES:
        raise WireError("header_length")
    header = _parse_header(bytes(packet[:HEADER_BYTES]))
    if header.n_payload:
        raise WireError("payload_count")
    end = HEADER_BYTES + header.body_len
    return decode((packet[:HEADER_BYTES], packet[HEADER_BYTES:end])), packet[end:]


def _parse_header(head: bytes) -> Header:
    magic, version, kind, flags, xfer_id, incarnation, attempt, seq, body_len, n_payload = (
        _HEADER.unpack_from(head)
    )
    if magic != MAGIC:
        raise WireError("magic")
    if version != VERSION:
        raise WireError("version")
    try:
        message_type = MessageType(kind)
    except ValueError:
        raise WireError("type") from None
    if body_len > _MAX_BODY.get(message_type, _SMALL):
        raise WireError("body_too_long")
    if n_payload > (MAX_PAYLOAD_FRAMES if message_type is MessageType.DATA else 0):
        raise WireError("payload_count")
    return Header(message_type, incarnation, xfer_id, attempt, seq, n_payload, flags, body_len)


def _checksum(head: bytes, body: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(head)
    digest.update(body)
    return int(digest.intdigest())
