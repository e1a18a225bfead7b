"""The nccl plane at the prefill side: groups by decode worker, and batches on their way.

A batch is packed into a staging slot, told of by GROUP_BATCH, and enters the group only when
decode has answered GROUP_GO. Blocks of the pool are read while packing and never after: a
cancelled transfer gives them back at once, whatever the group does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.pb import transfer_pb2 as pb
from services.telemetry.logs import get_logger
from services.transfer import codec
from services.transfer.device import PREFILL_RANK, GroupError, GroupSpec, HostBytes
from services.transfer.end_parts import EndParts
from services.transfer.group_lanes import LaneTable
from services.transfer.group_runner import MAX_INSIDE, Batch, GroupRunner, RunnerParts
from services.transfer.group_table import group_name
from services.transfer.loop import Inbox
from services.transfer.pair_store import PairStore
from services.transfer.pairing import max_frame_bytes
from services.transfer.values import Peer
from services.transfer.wire import Message, MessageType, WireError
from services.transfer.zmq_plane import worker_id_of

log = get_logger(__name__)

SendTo = Callable[[Peer, MessageType, bytes, int, int], None]


@dataclass(frozen=True, slots=True)
class FramesOut:
    """The frames of one batch and what they are."""

    xfer_id: int
    attempt: int
    frames: Sequence[HostBytes]
    data: bytes  # serialised Data


@dataclass(slots=True, eq=False)
class _Lane:
    """One peer's group."""

    peer: Peer
    number: int
    slot_bytes: int
    runner: GroupRunner
    free: list[int]
    is_ready: bool = False
    next_batch: int = 0
    told: OrderedDict[int, Batch] = field(default_factory=OrderedDict)  # wait for GROUP_GO
    num_inside: int = 0

    @property
    def has_room(self) -> bool:
        """Tell whether one more batch may be told of."""
        return self.is_ready and bool(self.free) and len(self.told) + self.num_inside < MAX_INSIDE


class SourceGroups:
    """Belongs to the source's thread."""

    def __init__(
        self,
        parts: EndParts,
        host: str,
        inbox: Inbox,
        send: SendTo,
        is_busy: Callable[[bytes], bool],
        on_ended: Callable[[bytes], None],
    ) -> None:
        """Take what sends a control message, whether a peer has transfers open, who is told."""
        self._incarnation = parts.incarnation
        self._config = parts.config
        self._host = host
        self._send = send
        self._is_busy = is_busy
        self._on_ended = on_ended
        self._post = inbox.put
        self._largest_frame = max_frame_bytes(parts.layout)
        self._table: LaneTable[bytes, _Lane] = LaneTable(parts.config.max_groups)
        # The last number of each peer: a message that was long on its way cannot bring one back.
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._runner_parts: RunnerParts | None = None
        if parts.device is not None:
            self._runner_parts = RunnerParts(
                parts.device,
                parts.clock,
                self._post,
                self,
                parts.config.group_batch_timeout_s,
            )

    # ---- from the source -------------------------------------------------------------------------

    def handle(self, peer: Peer, message: Message, agreed_plane: str) -> None:
        """Take a message about groups."""
        kind, body = message.header.type, message.body
        if kind is MessageType.GROUP_JOIN:
            self._on_join(peer, codec.parse(pb.JoinGroup, body), agreed_plane)
        elif kind is MessageType.GROUP_ENTRY:
            self._table.take_entry(peer.base, codec.parse(pb.GroupEntry, body))
        elif kind is MessageType.GROUP_LEAVE:
            leave = codec.parse(pb.LeaveGroup, body)
            lane = self._table.numbered(peer.base, leave.number)
            if lane is not None:
                self._end(lane, f"decode left: {codec.clip(leave.reason)}")
        elif kind is MessageType.GROUP_GO:
            self._on_go(peer, codec.parse(pb.GroupGo, body))
        else:
            raise WireError("direction")

    def problem(self, peer: Peer, frame_bytes: int) -> str | None:
        """Say why an OPEN of this peer cannot be served by its group; None if it can."""
        lane = self._table.get(peer.base)
        if lane is None:
            return "there is no group with this worker"
        if frame_bytes > lane.slot_bytes:
            return "its frames are longer than the group's slots"
        self._table.use(peer.base)
        return None

    def tell_gone(self, peer: Peer) -> None:
        """Let a peer that counts on a group know that there is none."""
        number = self._numbers.get(peer.base, 0)
        self._say_leave(peer, number, "the prefill worker has no such group", is_broken=False)

    def has_group(self, base: bytes) -> bool:
        """Tell whether a peer has a group, be it not yet built."""
        return self._table.get(base) is not None

    def can_send(self, base: bytes) -> bool:
        """Tell whether a batch may be packed for a peer now."""
        lane = self._table.get(base)
        return lane is not None and lane.has_room

    def send(self, peer: Peer, out: FramesOut) -> None:
        """Pack frames, all of one size, and tell the peer; the frames are read before return."""
        lane = self._table.get(peer.base)
        assert lane is not None, "ask can_send first"
        assert lane.has_room, "ask can_send first"
        frame_bytes = out.frames[0].nbytes
        slot = lane.free.pop()
        try:
            staging = lane.runner.host(slot)
        except GroupError:
            return  # on_dead is on its way, and with it another plane
        at = 0
        for frame in out.frames:
            staging[at : at + frame_bytes] = frame
            at += frame_bytes
        lane.told[lane.next_batch] = Batch(slot, at, True, None)
        body = pb.GroupBatch(
            number=lane.number,
            batch=lane.next_batch,
            frame_bytes=frame_bytes,
            num_frames=len(out.frames),
            data=pb.Data.FromString(out.data),
        ).SerializeToString()
        lane.next_batch += 1
        self._table.use(peer.base)
        self._send(peer, MessageType.GROUP_BATCH, body, out.xfer_id, out.attempt)

    def on_peer_lost(self, base: bytes) -> None:
        """Abort on our own signal: a group does not notice that the other rank is frozen."""
        lane = self._table.get(base)
        if lane is not None:
            self._end(lane, "the control connection broke")

    def close(self, timeout_s: float) -> None:
        """Abort every group."""
        for lane in self._table.all():
            self._end(lane, "the worker stops")
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
        """The group is built at this end."""
        lane = self._table.of_runner(runner)
        if lane is not None:
            lane.is_ready = True
            log.info("transfer.group_ready", group=runner.spec.name, side="send")

    def on_left(self, runner: GroupRunner, batch: Batch) -> None:
        """A batch was sent."""
        lane = self._table.of_runner(runner)
        if lane is not None:
            lane.num_inside -= 1
            lane.free.append(batch.slot)

    def on_dead(self, runner: GroupRunner, why: str) -> None:
        """Tell the peer; it opens its transfers again over another plane."""
        lane = self._table.of_runner(runner)
        if lane is not None:
            self._bury(lane)
            log.warning(
                "transfer.group_lost",
                group=runner.spec.name,
                side="send",
                peer=worker_id_of(lane.peer.base),
                reason=why,
            )
            self._say_leave(lane.peer, lane.number, why, is_broken=True)

    def on_gone(self, runner: GroupRunner) -> None:
        """Its slots are free."""
        self._table.runner_gone(runner)

    # ---- inside ----------------------------------------------------------------------------------

    def _on_join(self, peer: Peer, join: pb.JoinGroup, agreed_plane: str) -> None:
        why = self._refusal(peer, join, agreed_plane) or self._make_room(peer)
        runner_parts = self._runner_parts
        if why is not None or runner_parts is None:
            log.warning("transfer.group_refused", peer=worker_id_of(peer.base), reason=why)
            self._say_leave(peer, join.number, why or "no device", is_broken=True)
            return
        self._note_number(peer.base, join.number)
        slot_bytes = max(self._config.data_message_bytes, join.frame_bytes)
        spec = GroupSpec(
            name=group_name(
                self._incarnation, int.from_bytes(peer.base[-8:], "little"), join.number
            ),
            rank=PREFILL_RANK,
            host=self._host,
            slot_bytes=slot_bytes,
            num_slots=self._config.group_slots,
            build_timeout_s=self._config.group_build_timeout_s,
        )
        store = PairStore(lambda key, value: self._tell(peer, join.number, key, value))
        runner = GroupRunner(spec, store, runner_parts)
        lane = _Lane(peer, join.number, slot_bytes, runner, list(range(spec.num_slots)))
        self._table.add(peer.base, lane)
        joined = pb.GroupJoined(number=join.number, slot_bytes=slot_bytes).SerializeToString()
        self._send(peer, MessageType.GROUP_JOINED, joined, 0, 0)
        runner.start()

    def _refusal(self, peer: Peer, join: pb.JoinGroup, agreed_plane: str) -> str | None:
        if agreed_plane != "nccl":
            return "the plane was not agreed"
        if join.number <= self._numbers.get(peer.base, 0):
            return "the number was used before"
        if not 0 < join.frame_bytes <= self._largest_frame:
            return "no pool here has frames of that length"
        return "too many groups are still ending" if self._table.is_choked else None

    def _make_room(self, peer: Peer) -> str | None:
        """End this peer's last group, or an idle one when there are too many."""
        old = self._table.get(peer.base)
        if old is not None:
            self._end(old, "decode joins another one")
        if self._table.has_room():
            return None
        idle = self._table.evictable(self._is_idle)
        if idle is None:
            return "too many groups"
        self._end(idle[1], "makes room for another worker's")
        return None

    def _is_idle(self, lane: _Lane) -> bool:
        return not lane.told and not lane.num_inside and not self._is_busy(lane.peer.base)

    def _note_number(self, base: bytes, number: int) -> None:
        self._numbers.pop(base, None)
        self._numbers[base] = number
        if len(self._numbers) > 4 * self._config.max_peers:
            self._numbers.popitem(last=False)

    def _tell(self, peer: Peer, number: int, key: bytes, value: bytes) -> None:
        """Send an entry (called on the group's thread)."""
        body = pb.GroupEntry(number=number, key=key, value=value).SerializeToString()
        self._post(lambda: self._send(peer, MessageType.GROUP_ENTRY, body, 0, 0))

    def _on_go(self, peer: Peer, go: pb.GroupGo) -> None:
        lane = self._table.numbered(peer.base, go.number)
        if lane is None or go.batch not in lane.told:
            return  # said twice, or about a group that was given up
        if go.batch != next(iter(lane.told)):
            # Decode has entered for the one before too: entering for this would cross them.
            self._end(lane, "a message about a batch was lost", is_broken=True)
            return
        batch = lane.told.pop(go.batch)
        if go.is_refused:
            lane.free.append(batch.slot)
            return
        lane.num_inside += 1
        lane.runner.submit(batch)

    def _end(self, lane: _Lane, why: str, *, is_broken: bool = False) -> None:
        self._bury(lane)
        lane.runner.abort(why)
        log.info("transfer.group_left", group=lane.runner.spec.name, side="send", reason=why)
        self._say_leave(lane.peer, lane.number, why, is_broken=is_broken)

    def _bury(self, lane: _Lane) -> None:
        self._table.bury(lane.peer.base)
        self._on_ended(lane.peer.base)

    def _say_leave(self, peer: Peer, number: int, why: str, *, is_broken: bool) -> None:
        leave = pb.LeaveGroup(number=number, reason=codec.clip(why), is_broken=is_broken)
        body = leave.SerializeToString()
        self._send(peer, MessageType.GROUP_LEAVE, body, 0, 0)
