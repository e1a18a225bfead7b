"""Message bodies that are not what their sender wrote, shown to the parsers of both ends.

A checksum keeps damage away from the parsers, but a hostile peer writes its own. Whatever it
says, a parser gives values within bounds or says no; nothing else comes out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.chaos.sim_world import WHOLE
from services.kv.layout import KvIdentity
from services.pb import transfer_pb2 as pb
from services.transfer import codec
from services.transfer.handshake import Incompatible, LocalEnd, answer_hello, read_welcome
from services.transfer.pairing import AS_STORED, Unservable, requested
from services.transfer.ticket import TicketError, read_unverified
from services.transfer.wire import MessageType, WireError

_NUM_BLOCKS = 7  # of the prompt the messages are said to be about
IDENTITY = KvIdentity("simulated", "", "w" * 64, 2, 2, 2, "{}", "t" * 64, "sha256/16")
FINGERPRINT = IDENTITY.fingerprint


def local_end(worker_id: str, incarnation: int, **more: Any) -> LocalEnd:
    """Return what a simulated worker says of itself."""
    return LocalEnd(worker_id, incarnation, more.pop("host", "host"), 0, IDENTITY, **more)


_END = local_end("w", 1, layout=WHOLE, planes=("memfd", "zmq"), uds_path="/sim", num_blocks=8)


def parse_forged(kind: MessageType, body: bytes) -> str:
    """Parse a body as its receiver would; "taken" or "refused", any other end is a fault."""
    try:
        _PARSERS.get(kind, _nothing)(body)
    except (WireError, TicketError, Incompatible, Unservable):
        return "refused"
    return "taken"


def _open(body: bytes) -> None:
    message = codec.parse(pb.Open, body)
    read_unverified(message.signed_ticket)
    layers = (message.layer_lo, message.layer_hi)
    heads = (message.head_lo, message.head_hi)
    wire = requested(WHOLE, layers, heads, message.wire_dtype, AS_STORED)
    args = codec.open_args(message, _NUM_BLOCKS, wire)
    assert len(args.have) == _NUM_BLOCKS


def _ready(body: bytes) -> None:
    ready = codec.ready_args(body, _NUM_BLOCKS, 1)
    assert 0 <= ready.lo < ready.hi <= _NUM_BLOCKS


def _data(body: bytes) -> None:
    for count in (1, 2):
        indexes = codec.data_indexes(body, count, _NUM_BLOCKS)
        assert len(indexes) == count
        assert all(0 <= index <= _NUM_BLOCKS for index in indexes)


def _nothing(_body: bytes) -> None:
    """CLOSED and ABORTED have no body."""


_PARSERS: dict[MessageType, Callable[[bytes], object]] = {
    MessageType.HELLO: lambda body: answer_hello(_END, body),
    MessageType.WELCOME: lambda body: read_welcome(_END, body),
    MessageType.OPEN: _open,
    MessageType.OPENED: lambda body: codec.parse(pb.Opened, body),
    MessageType.REJECT: codec.reject_args,
    MessageType.READY: _ready,
    MessageType.DATA: _data,
    MessageType.CREDIT: lambda body: codec.parse(pb.Credit, body),
    MessageType.PULLED: lambda body: codec.parse(pb.Pulled, body),
    MessageType.NACK: codec.nack_args,
    MessageType.FINAL: codec.final_args,
    MessageType.RENEW: lambda body: codec.parse(pb.Renew, body),
    MessageType.RENEWED: lambda body: codec.parse(pb.Renewed, body),
    MessageType.DONE: lambda body: codec.parse(pb.DoneTransfer, body),
    MessageType.ABORT: lambda body: codec.parse(pb.Abort, body),
}
