"""One receive as the sink keeps it: its session, and what that hears and says on the wire."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.kv.attached import AttachedKv
from services.kv.block_copy import CopyBlocks
from services.kv.form import EXACT
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.pb import transfer_pb2 as pb
from services.transfer import codec, receiver
from services.transfer.api import TransferStats
from services.transfer.conversion import Conversion
from services.transfer.peer_link import PeerLink
from services.transfer.placement import Placement
from services.transfer.receiver import ReceiverAction, ReceiverState, ReceiverTransfer
from services.transfer.renewer import Target
from services.transfer.ticket import Ticket
from services.transfer.values import OpenArgs
from services.transfer.wire import Message, MessageType, WireError

SendAction = (
    receiver.SendOpen
    | receiver.SendCredit
    | receiver.SendNack
    | receiver.SendDone
    | receiver.SendAbort
    | receiver.SendAborted
)


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What the worker asks for with one `open`."""

    key: str
    signed_ticket: bytes
    attempt: int
    have: tuple[bool, ...]
    traceparent: str
    kv_form: str = EXACT  # of the blocks that are had
    is_shard: bool = False  # others bring the rest of the pool's layers and heads


@dataclass(slots=True, eq=False)
class Receive:
    """One open with what the wire needs; lives until its DONE or ABORT is answered."""

    request: OpenRequest
    ticket: Ticket
    machine: ReceiverTransfer
    placement: Placement
    link: PeerLink | None = None
    pool: KvPoolMemory | None = None  # the peer's, where it is mapped
    copy: CopyBlocks | None = None  # out of it, where that takes more than reading
    pool_id: int = 0  # what block tables call it while this receive may attach blocks of it
    plane: str = ""
    conversion: Conversion | None = None  # None = blocks come as ours are
    kv_form: str | None = None  # of what comes; known once there is a connection
    published_state: ReceiverState | None = None
    pulled: list[int] = field(default_factory=list)  # not yet told to the peer
    copy_s: float = 0.0  # spent on copying and verifying blocks of a mapped pool
    announce_s: float = 0.0  # spent on taking announcements and answering them

    @property
    def key(self) -> str:
        """What the worker calls it."""
        return self.request.key

    @property
    def wire_id(self) -> tuple[int, int]:
        """What messages call it."""
        return self.ticket.xfer_id, self.request.attempt

    @property
    def target(self) -> Target:
        """Who holds its KV."""
        return target_of(self.ticket)

    def takes(self, kv_form: str) -> bool:
        """Note the form of what comes; False if it is not that of what is here already."""
        known = self.kv_form
        if known is None and any(self.request.have):
            known = self.request.kv_form
        self.kv_form = kv_form
        return known in (None, kv_form)

    def event(self, message: Message, layout: KvLayout, now: float) -> list[ReceiverAction]:
        """Hand a message to the session; DATA is not one of them."""
        kind, machine = message.header.type, self.machine
        if kind is MessageType.OPENED:
            codec.parse(pb.Opened, message.body)
            return machine.on_opened(now)
        if kind is MessageType.READY:
            wire = self.conversion.wire if self.conversion is not None else layout
            count = wire.digests_per_block
            return machine.on_ready(codec.ready_args(message.body, machine.num_blocks, count), now)
        if kind is MessageType.FINAL:
            return machine.on_final(codec.final_args(message.body), now)
        if kind is MessageType.DRAIN:
            codec.parse(pb.DrainNotice, message.body)
            return machine.on_drain()
        if kind is MessageType.REJECT:
            return machine.on_reject(*codec.reject_args(message.body))
        if kind is MessageType.ABORT:
            reason = codec.clip(codec.parse(pb.Abort, message.body).reason)
            return machine.on_abort(reason)
        if kind in (MessageType.CLOSED, MessageType.ABORTED):
            return machine.on_closed()
        raise WireError("direction")

    def message(self, action: SendAction) -> tuple[MessageType, bytes]:
        """Return what to send for an action."""
        if isinstance(action, receiver.SendOpen):
            request = self.request
            wire = self.conversion.wire if self.conversion is not None else None
            args = OpenArgs(request.attempt, action.have, self.plane, 0, request.traceparent, wire)
            return MessageType.OPEN, codec.open_body(request.signed_ticket, args)
        if isinstance(action, receiver.SendCredit):
            body = pb.Credit(size_bytes=action.total_bytes).SerializeToString()
            return MessageType.CREDIT, body
        if isinstance(action, receiver.SendNack):
            return MessageType.NACK, codec.nack_body(action.indexes, action.tail, action.reason)
        if isinstance(action, receiver.SendDone):
            done = pb.DoneTransfer(
                digest_of_digests=action.digest_of_digests,
                size_bytes=action.size_bytes,
                copy_us=round(self.copy_s * 1e6),
                announce_us=round(self.announce_s * 1e6),
            )
            return MessageType.DONE, done.SerializeToString()
        if isinstance(action, receiver.SendAbort):
            body = pb.Abort(reason=codec.clip(action.reason)).SerializeToString()
            return MessageType.ABORT, body
        return MessageType.ABORTED, b""

    def send(self, kind: MessageType, body: bytes) -> None:
        """Send over the connection, if there is one."""
        if self.link is not None:
            # Without a connection nothing is lost: all is repeated or covered by the lease.
            self.link.send(kind, body, *self.wire_id)

    def stats(self) -> TransferStats:
        """Say what it did."""
        machine = self.machine
        return TransferStats(
            plane=self.plane,
            peer=self.ticket.worker_id,
            size_bytes=machine.blocks_moved * machine.frame_bytes,
            blocks_moved=machine.blocks_moved,
            blocks_deduped=machine.blocks_deduped,
            open_us=_elapsed_us(machine.open_sent_at, machine.opened_at),
            pull_us=_elapsed_us(machine.first_ready_at, machine.finished_at),
            nacks=machine.num_nacks,
            blocks_attached=len(machine.in_place.indexes),
            single_shot=machine.final is not None and machine.final.is_single_shot,
        )

    def attached(self, *, verifies_moves: bool) -> AttachedKv | None:
        """Return what is to be read in the peer's pool, if something is."""
        machine = self.machine
        if not machine.in_place.indexes or self.pool is None:
            return None
        indexes = sorted(machine.in_place.indexes)
        blocks, gens = machine.sources_of(indexes)
        return AttachedKv(
            pool_id=self.pool_id,
            pool=self.pool,
            indexes=tuple(indexes),
            blocks=np.array(blocks, np.int64),
            gens=np.array(gens, np.uint64),
            digests=np.stack([machine.digests_of(index) for index in indexes]),
            verifies_moves=verifies_moves,
        )


def target_of(ticket: Ticket) -> Target:
    """Return the life of the worker a ticket is from."""
    return Target(ticket.zmq_endpoint, ticket.worker_id, ticket.incarnation)


def _elapsed_us(start: float | None, end: float | None) -> int:
    return 0 if start is None or end is None else round((end - start) * 1e6)
