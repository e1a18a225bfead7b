"""The prefill side of groups, message by message: who may join, and what enters when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from services.common.clock import SystemClock
from services.common.errors import ConfigError
from services.kv.memory import KvPoolMemory
from services.pb import transfer_pb2 as pb
from services.transfer import codec
from services.transfer.device import Group, GroupSpec, HostBytes, PeerBlocks, Pending
from services.transfer.end_parts import EndParts
from services.transfer.loop import Inbox
from services.transfer.pair_store import PairStore
from services.transfer.source_groups import FramesOut, SourceGroups
from services.transfer.values import Peer
from services.transfer.wire import Header, Message, MessageType, WireError
from services.transfer.zmq_plane import parse_route
from tests.support.transfer_ends import CALM, IDENTITY, LAYOUT, wait_until

FRAME = np.full(LAYOUT.block_bytes, 7, np.uint8)


def peer_of(life: int) -> Peer:
    """Return a decode worker's life."""
    return parse_route(b"decode\0" + life.to_bytes(8, "little") + b"m1234")


@dataclass
class SilentGroup:
    """A group that notes what enters and never ends it."""

    entered: list[tuple[int, int]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    slots: HostBytes = field(default_factory=lambda: np.zeros((4, 1 << 21), np.uint8))

    def host(self, slot: int) -> HostBytes:
        view: HostBytes = self.slots[slot]
        return view

    def send(self, slot: int, size_bytes: int) -> Pending:
        self.entered.append((slot, size_bytes))
        return self

    def recv(self, slot: int, size_bytes: int) -> Pending:
        raise AssertionError("this end sends")

    def wait(self) -> None:
        self.ended.wait(10)

    def abort(self) -> None:
        self.ended.set()


@dataclass
class SilentDevice:
    """Builds a silent group for everybody."""

    made: list[tuple[GroupSpec, PairStore, SilentGroup]] = field(default_factory=list)
    kind: str = "cpu"
    group_backend: str = "silent"

    def export_pool(self) -> bytes:
        raise AssertionError("not asked for")

    def open_pool(self, handle: bytes, num_blocks: int, block_bytes: int) -> PeerBlocks:
        raise AssertionError("not asked for")

    def make_group(self, spec: GroupSpec, store: PairStore) -> Group:
        self.made.append((spec, store, SilentGroup()))
        return self.made[-1][2]


class Rig:
    """The groups of a source, on this thread."""

    def __init__(self, max_groups: int = 2) -> None:
        self.device = SilentDevice()
        self.sent: list[tuple[Peer, MessageType, bytes]] = []
        self.busy: set[bytes] = set()
        self.ended: list[bytes] = []
        self.memory = KvPoolMemory.create(LAYOUT, 1)
        config = replace(CALM, max_groups=max_groups, planes=("nccl",))
        clock = SystemClock()
        parts = EndParts(self.memory, IDENTITY, "p", 5, clock, config, device=self.device)
        self.inbox = Inbox()

        def send(peer: Peer, kind: MessageType, body: bytes, _xfer: int, _attempt: int) -> None:
            self.sent.append((peer, kind, body))

        self.groups = SourceGroups(
            parts, "127.0.0.1", self.inbox, send, self.busy.__contains__, self.ended.append
        )

    def run(self) -> None:
        """Take what the groups' threads have posted."""
        for command in self.inbox.take():
            command()

    def hear(self, peer: Peer, kind: MessageType, body: bytes, plane: str = "nccl") -> None:
        header = Header(kind, int.from_bytes(peer.base[-8:], "little"), body_len=len(body))
        self.groups.handle(peer, Message(header, body), plane)

    def join(self, peer: Peer, number: int, plane: str = "nccl") -> str:
        """Ask for a group; return the refusal, or "" once it is built."""
        join = pb.JoinGroup(number=number, frame_bytes=LAYOUT.block_bytes)
        num_made = len(self.device.made)
        self.hear(peer, MessageType.GROUP_JOIN, join.SerializeToString(), plane)
        _, kind, body = self.sent[-1]
        if kind is MessageType.GROUP_LEAVE:
            return codec.parse(pb.LeaveGroup, body).reason
        wait_until(lambda: len(self.device.made) == num_made + 1)
        wait_until(lambda: self.is_ready(peer))
        return ""

    def is_ready(self, peer: Peer) -> bool:
        """Take what was posted, and tell whether a batch may be told of."""
        self.run()
        return self.groups.can_send(peer.base)

    def tell(self, peer: Peer, num_frames: int) -> int:
        """Announce a batch; return its number."""
        out = FramesOut(1, 1, [FRAME] * num_frames, codec.data_body(range(num_frames), False))
        self.groups.send(peer, out)
        return int(codec.parse(pb.GroupBatch, self.sent[-1][2]).batch)

    def go(self, peer: Peer, number: int, batch: int, *, is_refused: bool = False) -> None:
        go = pb.GroupGo(number=number, batch=batch, is_refused=is_refused)
        self.hear(peer, MessageType.GROUP_GO, go.SerializeToString())

    def close(self) -> None:
        self.groups.close(5.0)
        self.inbox.close()
        self.memory.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_nothing_enters_before_both_have_said_so(rig: Rig) -> None:
    peer = peer_of(1)
    assert rig.join(peer, 1) == ""
    group = rig.device.made[0][2]
    first, second = rig.tell(peer, 2), rig.tell(peer, 1)
    assert not rig.groups.can_send(peer.base)  # two at a time
    threading.Event().wait(0.05)
    assert group.entered == []
    rig.go(peer, 1, first)
    wait_until(lambda: len(group.entered) == 1)
    slot, size = group.entered[0]
    assert size == 2 * LAYOUT.block_bytes
    assert (group.slots[slot, :size] == 7).all()
    rig.go(peer, 1, first)  # said twice
    rig.go(peer, 1, second, is_refused=True)
    threading.Event().wait(0.05)
    assert len(group.entered) == 1
    assert rig.groups.can_send(peer.base)


def test_go_out_of_order_ends_the_group(rig: Rig) -> None:
    peer = peer_of(1)
    rig.join(peer, 1)
    rig.tell(peer, 1)
    rig.go(peer, 1, rig.tell(peer, 1))
    leave = codec.parse(pb.LeaveGroup, rig.sent[-1][2])
    assert (leave.number, leave.is_broken) == (1, True)
    assert "was lost" in leave.reason
    assert rig.device.made[0][2].entered == []
    assert rig.ended == [peer.base]


def test_a_number_is_used_once_and_a_plane_has_to_be_agreed(rig: Rig) -> None:
    peer = peer_of(1)
    assert "agreed" in rig.join(peer, 1, plane="zmq")
    assert rig.join(peer, 4) == ""
    assert "used before" in rig.join(peer, 4)
    assert "used before" in rig.join(peer, 3)
    assert rig.join(peer, 5) == ""
    assert len(rig.device.made) == 2


def test_another_life_has_a_group_of_its_own_and_no_say_in_this_one(rig: Rig) -> None:
    """RB-099 for groups: same worker id, new incarnation."""
    old, new = peer_of(1), peer_of(2)
    rig.join(old, 1)
    entry = pb.GroupEntry(number=1, key=b"1/address", value=b"there").SerializeToString()
    rig.hear(new, MessageType.GROUP_ENTRY, entry)
    rig.hear(new, MessageType.GROUP_LEAVE, pb.LeaveGroup(number=1).SerializeToString())
    store = rig.device.made[0][1]
    assert not store.has(["1/address"])
    assert rig.groups.has_group(old.base)
    assert rig.join(new, 1) == ""
    names = {spec.name for spec, _, _ in rig.device.made}
    assert len(names) == 2
    rig.hear(old, MessageType.GROUP_ENTRY, entry)
    assert store.has(["1/address"])


def test_busy_groups_are_not_evicted(rig: Rig) -> None:
    peers = [peer_of(life) for life in (1, 2, 3)]
    rig.join(peers[0], 1)
    rig.join(peers[1], 1)
    rig.busy.update(peer.base for peer in peers[:2])
    assert rig.join(peers[2], 1) == "too many groups"
    rig.busy.discard(peers[0].base)
    assert rig.join(peers[2], 2) == ""
    assert [rig.groups.has_group(peer.base) for peer in peers] == [False, True, True]
    assert rig.ended == [peers[0].base]


def test_frames_no_pool_has_and_messages_the_wrong_way_are_refused(rig: Rig) -> None:
    peer = peer_of(1)
    join = pb.JoinGroup(number=1, frame_bytes=1 << 40).SerializeToString()
    rig.hear(peer, MessageType.GROUP_JOIN, join)
    assert "length" in codec.parse(pb.LeaveGroup, rig.sent[-1][2]).reason
    with pytest.raises(WireError, match="direction"):
        rig.hear(peer, MessageType.GROUP_BATCH, b"")


def test_planes_that_no_pool_of_this_device_can_use_are_refused_at_the_start(rig: Rig) -> None:
    """Every hand-off used to end as incompatible, and every prompt was computed twice."""
    config = replace(CALM, planes=("cuda_ipc",))
    parts = EndParts(rig.memory, IDENTITY, "p", 5, SystemClock(), config)
    with pytest.raises(ConfigError, match="a pool on cpu can use none of"):
        parts.local_end()
