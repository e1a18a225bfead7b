"""One offer as the source keeps it: its session, and what that hears and says on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from services.kv.block_copy import read_blocks
from services.kv.digest import block_digests, digest_columns, tail_digest
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.pb import transfer_pb2 as pb
from services.transfer import codec, sender
from services.transfer.announce import CostMeter
from services.transfer.api import Offer, TransferStats
from services.transfer.conversion import cut_frame
from services.transfer.sender import DataOut, SenderAction, SenderTransfer
from services.transfer.values import FinalArgs, Peer, ReadyArgs, U64Array
from services.transfer.wire import Message, MessageType, WireError
from services.transfer.zmq_plane import Block, worker_id_of

SendAction = (
    sender.SendOpened
    | sender.SendReject
    | sender.SendReady
    | sender.SendFinal
    | sender.SendAbort
    | sender.SendAborted
    | sender.SendClosed
    | sender.SendDrain
)


@dataclass(slots=True)
class Offered:
    """An offer, its session, and what stood beside its blocks when they were announced."""

    offer: Offer
    machine: SenderTransfer
    memory: KvPoolMemory
    gens: U64Array  # [num_blocks]
    digests: U64Array  # [num_blocks, digests_per_block]
    meter: CostMeter
    data_sent: tuple[int, int, float] | None = None  # last index, bytes and time of a message

    @classmethod
    def make(
        cls, offer: Offer, machine: SenderTransfer, memory: KvPoolMemory, meter: CostMeter
    ) -> Offered:
        """Make room for what will be announced."""
        gens = np.zeros(machine.num_blocks, np.uint64)
        digests = np.zeros((machine.num_blocks, memory.layout.digests_per_block), np.uint64)
        return cls(offer, machine, memory, gens, digests, meter)

    def note_sealed(self, lo: int, gens: U64Array, digests: U64Array) -> None:
        """Keep what is announced of blocks from `lo` on."""
        self.gens[lo : lo + len(gens)] = gens
        self.digests[lo : lo + len(gens)] = digests

    def is_unchanged(self, out: DataOut, current_gens: U64Array) -> bool:
        """Tell whether the blocks about to be sent still are what was announced."""
        if out.is_tail:
            final = self.machine.final
            return final is not None and int(current_gens[0]) == final.tail_gen
        return bool(np.array_equal(current_gens, self.gens[list(out.indexes)]))

    def frames(self, out: DataOut) -> tuple[list[Block], U64Array | None]:
        """Return the payload of a DATA message, and its digests where it was converted."""
        blocks = read_blocks(self.memory, out.block_ids)
        layout, wire = self.memory.layout, self.machine.wire
        if wire is None:
            return blocks, None
        rows = self._tail_valid() if out.is_tail else layout.block_size
        frames = [cut_frame(layout, block, wire, rows) for block in blocks]
        if wire.kv_dtype == layout.kv_dtype:
            return frames, None
        return frames, np.stack([block_digests(wire, frame) for frame in frames])

    def event(self, peer: Peer, message: Message, now: float) -> list[SenderAction]:
        """Hand a message of an opened transfer to the session."""
        machine = self.machine
        kind, attempt = message.header.type, message.header.attempt
        if kind is MessageType.CREDIT:
            credit = codec.parse(pb.Credit, message.body)
            return machine.on_credit(peer, attempt, credit.size_bytes)
        if kind is MessageType.PULLED:
            pulled = codec.parse(pb.Pulled, message.body)
            self._meter_data(pulled.lo, pulled.hi, now)
            return machine.on_pulled(peer, attempt, pulled.lo, pulled.hi, now)
        if kind is MessageType.NACK:
            indexes, tail = codec.nack_args(message.body)
            return machine.on_nack(peer, attempt, indexes, tail, now)
        if kind is MessageType.DONE:
            done = codec.parse(pb.DoneTransfer, message.body)
            self.meter.note_done(
                machine.plane,
                machine.num_announcements,
                done.size_bytes,
                done.copy_us / 1e6,
                done.announce_us / 1e6,
            )
            return machine.on_done(peer, attempt, done.size_bytes, now)
        if kind is MessageType.ABORT:
            reason = codec.clip(codec.parse(pb.Abort, message.body).reason)
            return machine.on_abort(peer, attempt, reason, now)
        if kind is MessageType.ABORTED:
            return machine.on_aborted(peer, attempt, now)
        raise WireError("direction")

    def note_data(self, out: DataOut, now: float) -> None:
        """Note that a DATA message is on its way; its PULLED tells how long it took."""
        if self.data_sent is None and not out.is_tail:
            size = len(out.indexes) * self.machine.frame_bytes
            self.data_sent = (out.indexes[-1], size, now)

    def _meter_data(self, lo: int, hi: int, now: float) -> None:
        if self.data_sent is None:
            return
        index, size, sent_at = self.data_sent
        if lo <= index < hi:
            self.meter.plane(self.machine.plane).copy_s_per_byte.add((now - sent_at) / size)
            self.data_sent = None

    def stats(self) -> TransferStats:
        """Say what it did."""
        machine = self.machine
        return TransferStats(
            plane=machine.plane,
            peer=worker_id_of(machine.owner.base) if machine.owner else "",
            size_bytes=machine.bytes_moved,
            blocks_moved=machine.blocks_moved,
            blocks_deduped=machine.blocks_deduped,
            nacks=machine.num_nacks,
            single_shot=machine.is_single_shot,
        )

    def messages(self, action: SendAction) -> Iterator[tuple[MessageType, bytes]]:
        """Yield what to send for an action; a long READY is several messages."""
        if isinstance(action, sender.SendReady):
            for _, _, body in codec.ready_bodies(self._ready(action.lo, action.hi)):
                yield MessageType.READY, body
        elif isinstance(action, sender.SendReject):
            body = codec.reject_body(action.code, action.retry_after_s, action.detail)
            yield MessageType.REJECT, body
        elif isinstance(action, sender.SendOpened):
            lease_ms = round(action.lease_s * 1000)
            yield MessageType.OPENED, pb.Opened(lease_ms=lease_ms).SerializeToString()
        elif isinstance(action, sender.SendFinal):
            yield MessageType.FINAL, codec.final_body(self._final())
        elif isinstance(action, sender.SendAbort):
            body = pb.Abort(reason=codec.clip(action.reason)).SerializeToString()
            yield MessageType.ABORT, body
        elif isinstance(action, sender.SendAborted):
            yield MessageType.ABORTED, b""
        elif isinstance(action, sender.SendDrain):
            yield MessageType.DRAIN, pb.DrainNotice().SerializeToString()
        else:
            yield MessageType.CLOSED, b""

    def _ready(self, lo: int, hi: int) -> ReadyArgs:
        digests, wire = self.digests[lo:hi], self.machine.wire
        if wire is not None:
            columns = digest_columns(self.memory.layout, wire)
            assert columns is not None, "an OPEN off the digest lines is refused"
            digests = digests[:, columns]
        return ReadyArgs(
            lo=lo,
            gens=self.gens[lo:hi],
            digests=digests,
            source_blocks=np.array(self.machine.block_ids[lo:hi], dtype=np.uint32),
        )

    def _final(self) -> FinalArgs:
        final = self.machine.final
        assert final is not None, "FINAL is sent once there is one"
        info = final.info
        has_tail = info.tail_block is not None
        digest = final.tail_digest
        if info.tail_block is not None and self.machine.wire is not None:
            (block,) = read_blocks(self.memory, [info.tail_block])
            digest = self._tail_digest(block, self.machine.wire)
        return FinalArgs(
            first=info.first,
            num_tokens=info.num_tokens,
            num_blocks=self.machine.num_blocks,
            tail_valid_tokens=info.tail_valid_tokens if has_tail else 0,
            tail_source_block=info.tail_block or 0,
            tail_gen=final.tail_gen,
            tail_digest=digest,
            prefill_us=info.prefill_us,
            is_single_shot=self.machine.is_single_shot,
        )

    def _tail_digest(self, block: Block, wire: KvLayout) -> int:
        """Digest the part of the tail its owner gets, as stored."""
        layout, valid = self.memory.layout, self._tail_valid()
        stored = replace(wire, kv_dtype=layout.kv_dtype)
        return tail_digest(stored, cut_frame(layout, block, stored, valid), valid)

    def _tail_valid(self) -> int:
        return self.offer.num_tokens % self.memory.layout.block_size
