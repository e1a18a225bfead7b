"""The nccl plane at the decode side: a group for each connection that wants one, made lazily.

Receives target staging slots only. A batch that comes late, for a transfer that was cancelled or
is received over another plane by now, is thrown away with its slot: it never was in the pool.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from services.common.address import family_of
from services.pb import transfer_pb2 as pb
from services.telemetry.logs import get_logger
from services.transfer import codec
from services.transfer.counters import SinkCounters
from services.transfer.device import DECODE_RANK, GroupError, GroupSpec, HostBytes
from services.transfer.end_parts import EndParts
from services.transfer.group_lanes import LaneTable
from services.transfer.group_runner import MAX_INSIDE, Batch, GroupRunner, RunnerParts
from services.transfer.group_table import group_name
from services.transfer.intake import Apply, Intake
from services.transfer.loop import Inbox, Timers
from services.transfer.pair_store import PairStore
from services.transfer.pairing import wire_layout
from services.transfer.peer_link import PeerLink
from services.transfer.receive import Receive
from services.transfer.receive_table import ReceiveTable
from services.transfer.receiver import ReceiverState
from services.transfer.wire import MAX_PAYLOAD_FRAMES, Message, MessageType, WireError
from services.transfer.zmq_plane import Block, is_loopback, split_endpoint

log = get_logger(__name__)

_MAX_SLOT_BYTES = 256 << 20


class GroupsOwner(Protocol):
    """What the groups ask of the sink, on its thread."""

    def on_connected(self, receive: Receive) -> None:
        """The connection of a receive is up; its plane is not settled."""
        ...

    def on_plane_settled(self, receive: Receive) -> None:
        """The connection of a receive is up, and so is the plane it says."""
        ...

    def on_connect_failed(self, receive: Receive, code: str, message: str) -> None:
        """There will be no plane."""
        ...

    def on_plane_changed(self, link: PeerLink) -> None:
        """The plane of a connection is another one now."""
        ...


@dataclass(frozen=True, slots=True)
class SinkParts:
    """What the groups share with the rest of their sink."""

    counters: SinkCounters
    receives: ReceiveTable
    inbox: Inbox
    timers: Timers
    intake: Intake
    apply: Apply


@dataclass(slots=True)
class SlotFrames:
    """The frames in a slot, read one after the other."""

    staging: HostBytes
    frame_bytes: int
    at: int = 0

    def recv_block(self, block: Block) -> bool:
        """Copy the next frame into a block; False if it has another length."""
        lo, self.at = self.at, self.at + self.frame_bytes
        if block.nbytes != self.frame_bytes:
            return False
        block[:] = self.staging[lo : self.at]
        return True

    def skip_block(self) -> None:
        """Leave the next frame out."""
        self.at += self.frame_bytes


@dataclass(frozen=True, slots=True)
class _Coming:
    """A batch the peer told of."""

    wire_id: tuple[int, int]
    batch: int
    frame_bytes: int
    num_frames: int
    data: bytes  # serialised Data


@dataclass(slots=True, eq=False)
class _Lane:
    """The group of one connection, from JOIN on."""

    link: PeerLink
    number: int
    join_deadline: float
    runner: GroupRunner | None = None
    is_ready: bool = False
    slot_bytes: int = 0
    free: list[int] = field(default_factory=list)
    waiting: list[Receive] = field(default_factory=list)  # for the group to be built
    unanswered: deque[_Coming] = field(default_factory=deque)  # for a free slot
    num_inside: int = 0
    next_batch: int = 0


class SinkGroups:
    """Belongs to the sink's thread."""

    def __init__(self, parts: EndParts, sink: SinkParts, owner: GroupsOwner) -> None:
        self._parts = parts
        self._counters = sink.counters
        self._receives = sink.receives
        self._inbox = sink.inbox
        self._timers = sink.timers
        self._intake = sink.intake
        self._apply = sink.apply
        self._owner = owner
        self._table: LaneTable[PeerLink, _Lane] = LaneTable(parts.config.max_groups)
        self._numbers = 0  # one sequence for all peers: no number is ever used twice
        self._retry_at: dict[PeerLink, float] = {}  # pairs that keep to another plane until then
        self._runner_parts: RunnerParts | None = None
        if parts.device is not None:
            self._runner_parts = RunnerParts(
                parts.device,
                parts.clock,
                sink.inbox.put,
                self,
                parts.config.group_batch_timeout_s,
            )

    # ---- from the sink ---------------------------------------------------------------------------

    def enter(self, receive: Receive) -> bool:
        """Settle the plane of a receive; False while it has to wait for the group."""
        link = receive.link
        assert link is not None
        lane = self._table.get(link)
        if lane is not None and lane.is_ready:
            self._table.use(link)
            receive.plane = "nccl"
            return True
        if lane is not None:
            lane.waiting.append(receive)
            return False
        now = self._parts.clock.now()
        if now < self._retry_at.get(link, now) and link.can_fall_back:
            receive.plane = "zmq"  # said aloud when the group was lost
            return True
        why = self._join(link, receive, now)
        if why is not None:
            self._fall_back(link, why, [receive])
        return False

    def handle(self, link: PeerLink, message: Message, receive: Receive | None) -> None:
        """Take a message about groups; `receive` is the one its header names."""
        kind, body = message.header.type, message.body
        if kind is MessageType.GROUP_JOINED:
            self._on_joined(link, codec.parse(pb.GroupJoined, body))
        elif kind is MessageType.GROUP_ENTRY:
            self._table.take_entry(link, codec.parse(pb.GroupEntry, body))
        elif kind is MessageType.GROUP_LEAVE:
            leave = codec.parse(pb.LeaveGroup, body)
            lane = self._table.numbered(link, leave.number)
            why = f"the prefill worker left: {codec.clip(leave.reason)}"
            if lane is not None and leave.is_broken:
                self._lost(lane, why)
            elif lane is not None:
                self._left(lane, why)
        elif kind is MessageType.GROUP_BATCH:
            self._on_batch(link, message, codec.parse(pb.GroupBatch, body), receive)
        else:
            raise WireError("direction")

    def on_due(self, link: PeerLink) -> None:
        """Give up on a peer that did not answer JOIN."""
        lane = self._table.get(link)
        if lane is not None and lane.runner is None:
            if self._parts.clock.now() >= lane.join_deadline:
                self._lost(lane, "no answer to GROUP_JOIN")
            else:
                self._timers.at_latest(JoinTimer(link), lane.join_deadline)

    def drop(self, receive: Receive) -> None:
        """Forget a receive that has ended."""
        lane = self._table.get(receive.link) if receive.link is not None else None
        if lane is not None and receive in lane.waiting:
            lane.waiting.remove(receive)

    def on_link_closed(self, link: PeerLink) -> None:
        """Abort on our own signal: a group does not notice that the other rank is frozen."""
        self._retry_at.pop(link, None)
        lane = self._table.get(link)
        if lane is not None:
            lane.waiting.clear()  # its owner tells them that the connection is gone
            self._end(lane, "the control connection is closed", is_told=False)

    def close(self, timeout_s: float) -> None:
        """Abort every group."""
        for lane in self._table.all():
            self._end(lane, "the worker stops", is_told=False)
        self._table.join_dying(timeout_s)

    @property
    def num_dying(self) -> int:
        """Groups whose slots are quarantined."""
        return self._table.num_dying

    @property
    def num_live(self) -> int:
        """Groups in use or being built."""
        return self._table.num_live

    # ---- RunnerOwner -----------------------------------------------------------------------------

    def on_ready(self, runner: GroupRunner) -> None:
        """Let the receives that waited begin."""
        lane = self._table.of_runner(runner)
        if lane is None:
            return
        lane.is_ready = True
        log.info("transfer.group_ready", group=runner.spec.name, side="receive")
        self._set_plane(lane.link, "nccl")
        waiting, lane.waiting = lane.waiting, []
        for receive in waiting:
            receive.plane = "nccl"
            self._owner.on_plane_settled(receive)

    def on_left(self, runner: GroupRunner, batch: Batch) -> None:
        """Take a batch that is here out of its slot."""
        lane = self._table.of_runner(runner)
        coming = batch.about
        if lane is None or not isinstance(coming, _Coming):
            return
        lane.num_inside -= 1
        self._take(lane, batch, coming)
        lane.free.append(batch.slot)
        while lane.unanswered and lane.free:
            self._accept(lane, lane.unanswered.popleft())

    def on_dead(self, runner: GroupRunner, why: str) -> None:
        """Go on over another plane; without anything to go on with, the next one may try again."""
        lane = self._table.of_runner(runner)
        if lane is not None and self._is_idle(lane):
            self._end(lane, why)
        elif lane is not None:
            self._lost(lane, why)

    def on_gone(self, runner: GroupRunner) -> None:
        """Its slots are free."""
        self._table.runner_gone(runner)

    # ---- making ----------------------------------------------------------------------------------

    def _join(self, link: PeerLink, receive: Receive, now: float) -> str | None:
        """Ask for a group, or say why not."""
        config, parts = self._parts.config, self._parts
        host, _ = split_endpoint(link.target.endpoint)
        if not (is_loopback(host) or config.allow_plaintext_kv):
            return "groups are not encrypted, and transfer.allow_plaintext_kv is not set"
        if self._table.is_choked:
            return "too many groups are still ending"
        if not self._table.has_room():
            idle = self._table.evictable(self._is_idle)
            if idle is None:
                return "too many groups"
            self._end(idle[1], "makes room for another worker's")
        self._numbers += 1
        lane = _Lane(link, self._numbers, now + config.group_build_timeout_s)
        lane.waiting.append(receive)
        self._table.add(link, lane)
        self._timers.at_latest(JoinTimer(link), lane.join_deadline)
        wire = wire_layout(link.layout, parts.layout, config.wire_dtype)
        join = pb.JoinGroup(number=lane.number, frame_bytes=wire.block_bytes)
        link.send(MessageType.GROUP_JOIN, join.SerializeToString(), 0, 0)
        return None

    def _is_idle(self, lane: _Lane) -> bool:
        if lane.waiting or lane.num_inside or lane.unanswered:
            return False
        of_peer = self._receives.of_peer(lane.link.target)
        return not any(r.link is lane.link and r.plane == "nccl" for r in of_peer)

    def _on_joined(self, link: PeerLink, joined: pb.GroupJoined) -> None:
        lane = self._table.numbered(link, joined.number)
        if lane is None or lane.runner is not None or self._runner_parts is None:
            return
        if not 0 < joined.slot_bytes <= _MAX_SLOT_BYTES:
            raise WireError("slot_bytes")
        config, target = self._parts.config, link.target
        spec = GroupSpec(
            name=group_name(target.incarnation, self._parts.incarnation, lane.number),
            rank=DECODE_RANK,
            host=_address_towards(target.endpoint),
            slot_bytes=joined.slot_bytes,
            num_slots=config.group_slots,
            build_timeout_s=config.group_build_timeout_s,
        )
        store = PairStore(self._teller(lane))
        lane.runner = GroupRunner(spec, store, self._runner_parts)
        lane.slot_bytes = joined.slot_bytes
        lane.free = list(range(spec.num_slots))
        lane.runner.start()

    def _teller(self, lane: _Lane) -> Callable[[bytes, bytes], None]:
        def tell(key: bytes, value: bytes) -> None:
            """Send an entry (called on the group's thread)."""
            entry = pb.GroupEntry(number=lane.number, key=key, value=value)
            body = entry.SerializeToString()
            self._inbox.put(lambda: lane.link.send(MessageType.GROUP_ENTRY, body, 0, 0))

        return tell

    # ---- batches ---------------------------------------------------------------------------------

    def _on_batch(
        self, link: PeerLink, message: Message, told: pb.GroupBatch, receive: Receive | None
    ) -> None:
        lane = self._table.numbered(link, told.number)
        if lane is None or lane.runner is None or told.batch < lane.next_batch:
            return  # of a group that was given up, or said twice
        if told.batch != lane.next_batch:
            self._lost(lane, "a message about a batch was lost")  # order is all a group has
            return
        lane.next_batch += 1
        size = told.frame_bytes * told.num_frames
        is_whole = 0 < told.num_frames <= MAX_PAYLOAD_FRAMES and 0 < size <= lane.slot_bytes
        is_bounded = len(lane.unanswered) < MAX_INSIDE
        if not is_whole or not is_bounded:
            self._lost(lane, "the prefill worker tells of batches that do not fit")
            return
        header = message.header
        coming = _Coming(
            (header.xfer_id, header.attempt),
            told.batch,
            told.frame_bytes,
            told.num_frames,
            told.data.SerializeToString(),
        )
        if receive is None or receive.machine.state is not ReceiverState.PULLING:
            if receive is not None:
                receive.machine.account(told.num_frames)
            self._counters.discarded_frames += told.num_frames
            self._say_go(lane, coming, is_refused=True)
        elif lane.free:
            self._accept(lane, coming)
        else:
            lane.unanswered.append(coming)

    def _accept(self, lane: _Lane, coming: _Coming) -> None:
        """Enter the group for a batch, and say so: the peer enters when it hears it."""
        assert lane.runner is not None
        size = coming.frame_bytes * coming.num_frames
        lane.num_inside += 1
        lane.link.last_data = self._parts.clock.now()  # what comes has its own deadline
        lane.runner.submit(Batch(lane.free.pop(), size, False, coming))
        self._say_go(lane, coming, is_refused=False)

    def _say_go(self, lane: _Lane, coming: _Coming, *, is_refused: bool) -> None:
        go = pb.GroupGo(number=lane.number, batch=coming.batch, is_refused=is_refused)
        lane.link.send(MessageType.GROUP_GO, go.SerializeToString(), *coming.wire_id)

    def _take(self, lane: _Lane, batch: Batch, coming: _Coming) -> None:
        receive = self._receives.by_wire(lane.link.target, coming.wire_id)
        is_wanted = receive is not None and receive.link is lane.link and receive.plane == "nccl"
        if receive is None or not is_wanted or lane.runner is None:
            self._counters.discarded_frames += coming.num_frames
            return
        try:
            frames = SlotFrames(lane.runner.host(batch.slot), coming.frame_bytes)
            self._intake.on_frames(lane.link, receive, frames, coming.data, coming.num_frames)
        except (WireError, GroupError) as error:
            self._counters.bad_frames += 1
            log.warning("transfer.bad_batch", group=lane.runner.spec.name, error=str(error))

    # ---- the end ---------------------------------------------------------------------------------

    def _lost(self, lane: _Lane, why: str) -> None:
        """End a group that failed, and let its receives go on without it."""
        link = lane.link
        waiting, lane.waiting = lane.waiting, []
        self._end(lane, why)
        self._fall_back(link, why, waiting)

    def _left(self, lane: _Lane, why: str) -> None:
        """End a group the peer has no room for any more; whoever still wants one joins another."""
        link = lane.link
        waiting, lane.waiting = lane.waiting, []
        self._end(lane, why, is_told=False)
        for receive in waiting:
            self._owner.on_connected(receive)
        self._change_plane(link, why)

    def _fall_back(self, link: PeerLink, why: str, waiting: list[Receive]) -> None:
        """Use zmq after nccl failed: never silently, and only if it is allowed."""
        self._counters.plane_fallbacks += 1
        log.warning(
            "transfer.plane_fallback",
            peer=link.target.worker_id,
            reason=why,
            plane="zmq" if link.can_fall_back else "none",
        )
        if link.can_fall_back:
            self._retry_at[link] = self._parts.clock.now() + self._parts.config.group_retry_s
            self._set_plane(link, "zmq")
        for receive in waiting:
            if link.can_fall_back:
                receive.plane = "zmq"
                self._owner.on_plane_settled(receive)
            else:
                message = f"the nccl plane failed: {why}"
                self._owner.on_connect_failed(receive, "handoff_failed", message)
        self._change_plane(link, why)

    def _change_plane(self, link: PeerLink, why: str) -> None:
        """Let receives that were inside a group that has ended connect again."""
        now = self._parts.clock.now()
        for receive in self._receives.of_peer(link.target):
            if receive.link is link and receive.plane == "nccl":
                self._apply(receive, receive.machine.on_plane_lost(why, now))

    def _end(self, lane: _Lane, why: str, *, is_told: bool = True) -> None:
        self._table.bury(lane.link)
        self._timers.discard(JoinTimer(lane.link))
        if is_told:
            leave = pb.LeaveGroup(number=lane.number, reason=codec.clip(why))
            lane.link.send(MessageType.GROUP_LEAVE, leave.SerializeToString(), 0, 0)
        if lane.runner is None:
            self._table.forget(lane)
            return
        lane.runner.abort(why)
        name = lane.runner.spec.name
        log.info("transfer.group_left", group=name, side="receive", reason=why)

    def _set_plane(self, link: PeerLink, plane: str) -> None:
        if link.plane != plane:
            link.plane = plane
            self._owner.on_plane_changed(link)


@dataclass(frozen=True, slots=True)
class JoinTimer:
    """Key of a timer of the sink: a peer was asked for a group."""

    link: PeerLink


def _address_towards(endpoint: str) -> str:
    """Return our address on the way to a peer: a group listens there and nowhere else."""
    host, port = split_endpoint(endpoint)
    address = host.strip("[]")
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing
        own: str = probe.getsockname()[0]
    return own
