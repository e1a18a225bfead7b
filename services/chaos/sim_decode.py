"""A decode worker of the transfer simulator: real pool, real receiver machines, writer, codec."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from services.chaos.sim_forgery import local_end
from services.chaos.sim_network import Frames, Link, Network, Target
from services.chaos.sim_prefill import LEASE_S, PrefillWorker, Prompt, Request
from services.chaos.sim_reader import InPlaceReader
from services.chaos.sim_world import PLAIN, Bytes, Violation, Worker, World, reference, valid_rows
from services.common.errors import BlocksExhausted
from services.common.ids import BlockId
from services.kv import block_copy
from services.kv.layout import KvLayout
from services.kv.memory import KvPoolMemory
from services.pb import transfer_pb2 as pb
from services.transfer import codec
from services.transfer import receiver as rx
from services.transfer.block_writer import BlockWriter
from services.transfer.conversion import Conversion
from services.transfer.credit import CreditRound
from services.transfer.handshake import Incompatible, hello_body, read_incompatible, read_welcome
from services.transfer.pairing import AS_STORED, mismatch, wire_layout
from services.transfer.placement import Placement
from services.transfer.planes import POOL_FD_PLANES
from services.transfer.receive import OpenRequest
from services.transfer.receive import Receive as WireReceive
from services.transfer.receiver import Pull, ReceiverState, ReceiverTransfer
from services.transfer.ticket import read_unverified
from services.transfer.values import Peer
from services.transfer.wire import Message, MessageType, WireError, decode

_BLOCK_SIZE = PLAIN.block_size
MAX_TRANSFER_S = 60.0
_HELLO_TIMEOUT_S = 2.0
_RENEW_S = LEASE_S / 3
_PEER_TIMEOUT_S = 5.0
_PULLS_A_STEP = 3
_LEASED = (ReceiverState.WAITING_BLOCKS, ReceiverState.PULLING, ReceiverState.ATTACHED)
# A process can be frozen while its deadline passes; it acts when it wakes.
END_SLACK_S = 5.0


@dataclass(frozen=True, slots=True)
class Ticketed:
    """A ticket and where it came from."""

    request: Request
    prefill: PrefillWorker
    incarnation: int
    xfer_id: int
    signed: bytes


@dataclass(eq=False, slots=True)
class Group:
    """One prompt's KV on its way here: from one prefill worker, or from the shards of one."""

    prompt: Prompt
    had: tuple[BlockId, ...]
    lanes: list[Receive] = field(default_factory=list)
    fresh: tuple[BlockId, ...] = ()  # lent: full blocks, then the tail
    num_ready: int = 0
    num_ended: int = 0
    retry_s: float = 0.1  # while there is no memory
    failure: str = ""
    can_recompute: bool = True

    @property
    def blocks(self) -> list[BlockId]:
        """Every block it holds, in token order."""
        return [*self.had, *self.fresh]


@dataclass(eq=False, slots=True)
class Receive:
    """One open: its session and the blocks it may write."""

    group: Group
    ticket: Ticketed
    attempt: int
    wire: WireReceive
    started_at: float
    link: Link | None = None
    armed_at: float = float("inf")
    is_ended: bool = False
    is_pulling: bool = False
    wants_connection: bool = False

    @property
    def machine(self) -> ReceiverTransfer:
        """Its session."""
        return self.wire.machine

    @property
    def target(self) -> Target:
        """The life of the worker that has its KV."""
        return self.ticket.prefill.name, self.ticket.incarnation

    @property
    def wire_id(self) -> tuple[Target, int, int]:
        """What messages call it."""
        return self.target, self.ticket.xfer_id, self.attempt


class DecodeListener(Protocol):
    """Who sends tickets here."""

    def on_received(self, request: Request) -> None:
        """One receive is over, one way or the other."""
        ...

    def on_group_failed(self, group: Group) -> None:
        """The KV of a prompt will not come."""
        ...


class _BusyPool:
    """A mapped pool whose owner goes to work between the look at a generation and the copy."""

    def __init__(self, memory: KvPoolMemory, work: Callable[[], None]) -> None:
        self._memory = memory
        self._work = work
        self.num_blocks = memory.num_blocks
        self.layout = memory.layout
        self.gens = memory.gens

    @property
    def blocks(self) -> Bytes:
        """The blocks, a moment after they were looked at."""
        self._work()
        return self._memory.blocks

    def pieces(self, part: KvLayout | None = None) -> Bytes:
        """Return them in pieces, a moment after they were looked at."""
        self._work()
        return self._memory.pieces(part)


class DecodeWorker(Worker):
    """Pulls blocks into its pool, verifies them, and uses them."""

    def __init__(self, world: World, index: int, network: Network, router: DecodeListener) -> None:
        self._network = network
        self._router = router
        self._num_links = 0
        self._host = f"host {index % 2}"
        layout = world.shape.decode[index]
        self._policy = rx.ReceiverPolicy(
            block_bytes=layout.block_bytes,
            block_size=_BLOCK_SIZE,
            connect_timeout_s=4.0,
            open_timeout_s=2.0,
            max_wait_s=10.0,
            max_transfer_s=MAX_TRANSFER_S,
            stall_timeout_s=2.0,
            max_nacks=2,
            window_s=2.0,
        )
        super().__init__(world, f"d{index}", 36 + index, layout)

    def boot(self) -> None:
        """Begin a life without receives."""
        super().boot()
        self.receives: dict[tuple[Target, int, int], Receive] = {}
        self.links: dict[Target, Link] = {}
        self._hungry: OrderedDict[Receive, None] = OrderedDict()
        self._lent: dict[BlockId, Group] = {}  # who may write a block
        self._is_renewing = False
        self._readers: dict[Receive, InPlaceReader] = {}
        self._may_grant = False  # something happened since credit was last granted
        self._writer = BlockWriter(
            self.memory, self.layout, self.world.shape.digest_sampling, _copy_blocks
        )
        self._local = local_end(
            self.name,
            self.incarnation,
            host=self._host,
            layout=self.layout,
            planes=self.world.shape.planes,
        )

    def crash(self) -> None:
        """Take every receive along."""
        for receive in self.receives.values():
            if not receive.is_ended:
                self._end_lane(receive, "died", can_recompute=True)
        super().crash()

    def check(self) -> None:
        """Grant credit, then count."""
        if self._hungry and self._may_grant:
            self._may_grant = False
            self._grant()
        super().check()

    def check_at_rest(self) -> None:
        """Every receive is over and forgotten."""
        super().check_at_rest()
        if self.receives or self._lent or self._readers:
            raise Violation(f"{self.name}: receives still open at rest")

    # ---- the engine ---------------------------------------------------------------------------

    def open(self, prompt: Prompt, tickets: Sequence[Ticketed], attempt: int) -> None:
        """Take the tickets of a prompt; blocks are lent when there are some."""
        had = self.pool.cache.match(prompt.family.hashes[: prompt.num_blocks])
        group = Group(prompt, had)
        group.lanes = [self._make_receive(group, ticket, attempt) for ticket in tickets]
        if any(lane.wire_id in self.receives for lane in group.lanes):
            for lane in group.lanes:
                lane.is_ended = True
                self._router.on_received(lane.ticket.request)
            return
        self.hold(had)
        for lane in group.lanes:
            self.receives[lane.wire_id] = lane
            self.at(MAX_TRANSFER_S + END_SLACK_S, self._check_ended, lane)
        for lane in group.lanes:
            if not lane.is_ended:
                self._apply(lane, lane.machine.start())
        rng = self.world.rng
        is_late = rng.random() < self.world.odds.decode_wait
        self.at(rng.uniform(0.1, 4.0) if is_late else rng.random() * 0.003, self._lend, group)
        self.world.note(self.name, f"open {prompt.number} attempt {attempt}")

    def _make_receive(self, group: Group, ticket: Ticketed, attempt: int) -> Receive:
        """Look what the prefix cache has, as a work item arrives."""
        prompt, now = group.prompt, self.world.now
        have = tuple(i < len(group.had) for i in range(prompt.num_blocks))
        machine = ReceiverTransfer(prompt.num_tokens, have, self._policy, now)
        wire = WireReceive(
            OpenRequest(f"{prompt.number}", ticket.signed, attempt, have, ""),
            read_unverified(ticket.signed),
            machine,
            Placement(prompt.num_tokens, _BLOCK_SIZE, _BLOCK_SIZE, have),
        )
        return Receive(group, ticket, attempt, wire, now)

    def overlaps(self, prefill: PrefillWorker) -> bool:
        """Whether that worker's blocks hold anything of ours."""
        return mismatch(prefill.layout, self.layout) is None

    def cancel(self, prompt: Prompt) -> None:
        """The client left."""
        for receive in list(self.receives.values()):
            if receive.group.prompt is prompt:
                self._apply(receive, receive.machine.cancel("client left", self.world.now))
        for receive, reader in list(self._readers.items()):
            if receive.group.prompt is prompt:
                reader.stop()

    def _check_ended(self, receive: Receive) -> None:
        if not receive.is_ended:
            raise Violation(f"{self.name}: a receive outlived its deadline")

    def _lend(self, group: Group) -> None:
        if group.failure or group.num_ended == len(group.lanes):
            return
        prompt = group.prompt
        num_full = prompt.num_blocks - len(group.had)
        has_tail = prompt.tail_valid > 0
        try:
            group.fresh = self.allocate(num_full + has_tail, group.had[-1] if group.had else None)
        except BlocksExhausted:
            self.at(group.retry_s, self._lend, group)
            group.retry_s = min(2.0 * group.retry_s, 1.0)
            return
        for block in group.fresh:
            self._lent[block] = group
        full: list[BlockId | None] = [None] * len(group.had)
        full += group.fresh[:num_full]
        tail = group.fresh[-1] if has_tail else None
        for lane in list(group.lanes):
            if not lane.is_ended:
                lane.wire.placement.bind(full, tail)
                self._apply(lane, lane.machine.reserve(full, tail, self.world.now))

    def _use(self, group: Group) -> None:
        """Put the blocks into the prefix cache, decode for a while, give them back."""
        self._check_content(group)
        hashes, blocks = group.prompt.family.hashes, group.blocks
        for index in range(len(group.had), group.prompt.num_blocks):
            parent = hashes[index - 1] if index else None
            blocks[index] = self.seal(blocks[index], hashes[index], parent)
        self.at(self.world.rng.random() * 0.03, self.drop, blocks)

    def _check_content(self, group: Group) -> None:
        prompt, blocks = group.prompt, group.blocks
        if len(blocks) != prompt.num_blocks + (prompt.tail_valid > 0):
            raise Violation(f"{self.name}: delivered without all of its blocks")
        for index in range(prompt.num_blocks):
            expected = reference(prompt.name_of(index), self.turns)
            if self.memory.blocks[blocks[index]].tobytes() != expected:
                raise Violation(f"{self.name}: block {index} accepted with wrong content")
        if prompt.tail_valid:
            name = prompt.name_of(prompt.num_blocks)
            tail = np.frombuffer(reference(name, self.turns), np.uint8)
            row, valid = self.memory.blocks[blocks[-1]], prompt.tail_valid
            if valid_rows(row, valid) != valid_rows(tail, valid):
                raise Violation(f"{self.name}: a tail was accepted with wrong content")

    # ---- actions ------------------------------------------------------------------------------

    def _apply(self, receive: Receive, actions: list[rx.ReceiverAction]) -> None:
        machine = receive.wire.machine
        self._may_grant = True
        for action in actions:
            if isinstance(action, rx.Deliver):
                self._deliver(receive, action)
            elif isinstance(action, rx.Fail):
                self._fail(receive, action)
            elif isinstance(action, rx.Forget):
                self.receives.pop(receive.wire_id, None)
            elif isinstance(action, rx.Connect):
                self._connect(receive)
            elif isinstance(action, rx.WorkReady):
                self._queue(receive)
            elif isinstance(action, rx.MoveIn):
                self._readers[receive].move_in()
            else:
                self._say(receive, *receive.wire.message(action))
        machine.check_integrity()
        if machine.state in _LEASED and not self._is_renewing:
            self._is_renewing = True
            self.at(_RENEW_S, self._renew)
        if machine.state is not ReceiverState.RELEASED:
            self._arm(receive)

    def _say(self, receive: Receive, kind: MessageType, body: bytes) -> None:
        link = receive.link
        if link is not None and link.is_up:  # else: all of it is repeated or covered by the lease
            self._network.to_prefill(link, kind, body, receive.ticket.xfer_id, receive.attempt)

    def _end(self, receive: Receive, how: str) -> None:
        if receive.is_ended:
            raise Violation(f"{self.name}: a receive ended twice")
        receive.is_ended = True
        group = receive.group
        group.num_ended += 1
        self.world.note(self.name, f"request {group.prompt.number} {how}")
        self.world.stats[f"sink {how}"] += 1
        self._hungry.pop(receive, None)
        if group.num_ended == len(group.lanes):
            for block in group.fresh:
                del self._lent[block]
        self.world.at(0.0, self._router.on_received, receive.ticket.request)

    def _deliver(self, receive: Receive, action: rx.Deliver) -> None:
        self._end(receive, "ready")
        group = receive.group
        group.num_ready += 1
        if action.final.first[0].token_id != group.prompt.number:
            raise Violation(f"{self.name}: the first token is another request's")
        if group.num_ready == len(group.lanes):
            self.world.stats["prompts ready"] += 1
            if receive.machine.in_place.indexes:
                self._read_in_place(receive)
                return
            self._check_content(group)
            # The engine takes over a little later: until then nothing may write either.
            self.at(self.world.rng.random() * 0.005, self._use, group)
        elif group.num_ended == len(group.lanes):
            self._give_up(group)

    def _read_in_place(self, receive: Receive) -> None:
        wire = receive.wire
        kv = wire.attached(verifies_moves=self.world.shape.digest_sampling == 1)
        if kv is None:
            raise Violation(f"{self.name}: delivered with blocks in a pool that is out of reach")
        self.world.stats["attached"] += 1
        reader = InPlaceReader(self, receive, kv)
        self._readers[receive] = reader
        reader.begin()

    def on_detached(self, receive: Receive, *, is_intact: bool, is_home: bool) -> None:
        """Nothing is read in place any more; what is home can be used like anything received."""
        del self._readers[receive]
        self._apply(receive, receive.machine.detach(is_intact, self.world.now))
        if is_home:
            self._use(receive.group)
        else:
            self.at(0.0, self.drop, receive.group.blocks)

    def let_owner_work(self, receive: Receive) -> None:
        """Let the owner of the blocks that are read write others, if it still lives."""
        link = receive.link
        if link is not None:
            work = self._work_of(link)
            if work is not None:
                work()

    def _fail(self, receive: Receive, action: rx.Fail) -> None:
        self._end(receive, f"failed {action.code}")
        if self.world.now >= receive.started_at + MAX_TRANSFER_S:
            raise Violation(f"{self.name}: nothing but its last limit ended a receive: a hang")
        self._note_failure(receive.group, action.code, action.can_recompute)
        if receive.group.num_ended == len(receive.group.lanes):
            self._give_up(receive.group)
        else:
            # No shard's KV is of use without the others'.
            self.at(0.0, self._cancel_lanes, receive.group)

    def _note_failure(self, group: Group, code: str, can_recompute: bool) -> None:
        group.failure = group.failure or code
        group.can_recompute = group.can_recompute and can_recompute

    def _cancel_lanes(self, group: Group) -> None:
        for lane in group.lanes:
            if not lane.is_ended:
                self._apply(lane, lane.machine.cancel("another shard failed", self.world.now))

    def _give_up(self, group: Group) -> None:
        self.at(self.world.rng.random() * 0.005, self.drop, group.blocks)
        self.world.at(0.0, self._router.on_group_failed, group)

    def _end_lane(self, receive: Receive, code: str, *, can_recompute: bool) -> None:
        """End a receive with its process: nobody is left to give blocks back to."""
        receive.is_ended = True
        group = receive.group
        group.num_ended += 1
        self.world.at(0.0, self._router.on_received, receive.ticket.request)
        self._note_failure(group, code, can_recompute)
        if group.num_ended == len(group.lanes):
            self.world.at(0.0, self._router.on_group_failed, group)

    def _queue(self, receive: Receive) -> None:
        machine = receive.machine
        if machine.has_pulls() and not receive.is_pulling:
            receive.is_pulling = True
            is_slow = self.world.happens(self.world.odds.slow_reader)
            delay_s = self.world.rng.uniform(0.5, 6.0) if is_slow else 0.0001
            self.at(delay_s, self._pull, receive)
        if machine.credit_wanted():
            self._hungry[receive] = None

    # ---- connections --------------------------------------------------------------------------

    def _connect(self, receive: Receive) -> None:
        target = receive.target
        receive.wants_connection = True
        link = self.links.get(target)
        if link is None:
            self._dial(receive.ticket.prefill, target)
        elif link.plane:
            self.at(0.0, self._connected, link)

    def _dial(self, prefill: PrefillWorker, target: Target) -> None:
        """Connect to whoever listens there now, and say HELLO."""
        self._num_links += 1
        base = self.name.encode() + b"\0" + self.incarnation.to_bytes(8, "little")
        link = Link(
            decode=self,
            prefill=prefill,
            decode_incarnation=self.incarnation,
            prefill_incarnation=prefill.incarnation,
            target=target,
            peer=Peer(base, base + b"m%d" % self._num_links),
            hears=self.on_frames,
            hears_renewed=self.on_renewed_frames,
            last_heard=self.world.now,
            deadline=self.world.now + _HELLO_TIMEOUT_S,
        )
        self.links[target] = link
        if not prefill.is_up:
            self.at(0.001, self._link_failed, link, "handoff_failed", "nobody listens")
            return
        self.at(0.001 + self.world.rng.random() * 0.002, self._greet, link)
        self.at(_HELLO_TIMEOUT_S, self._link_failed, link, "handoff_failed", "no answer to HELLO")

    def _greet(self, link: Link) -> None:
        if link.is_up:
            self._network.to_prefill(link, MessageType.HELLO, hello_body(self._local))

    def _link_failed(self, link: Link, code: str, why: str) -> None:
        """Drop a connection that did not come up; one that did has nothing to fear from this."""
        if link.plane or not link.is_up:
            return
        link.is_up = False
        self.world.stats[f"handshakes failed: {why}"] += 1
        del self.links[link.target]
        for receive in self._of(link.target):
            if receive.wants_connection:
                receive.wants_connection = False
                self._apply(receive, receive.machine.on_connect_failed(code, why))

    def _on_greeting(self, link: Link, message: Message) -> None:
        kind = message.header.type
        try:
            if kind is MessageType.WELCOME:
                self._on_welcome(link, message)
            elif kind is MessageType.INCOMPATIBLE:
                raise read_incompatible(message.body)
            elif kind is MessageType.REJECT:
                self._link_failed(link, "incompatible", "refused")
        except Incompatible:
            self._link_failed(link, "incompatible", "incompatible")

    def _on_welcome(self, link: Link, message: Message) -> None:
        if message.header.incarnation != link.target[1]:
            self._link_failed(link, "handoff_failed", "another life")
            return
        welcome = read_welcome(self._local, message.body)
        prefill = link.prefill
        link.layout = welcome.layout
        link.frame = wire_layout(welcome.layout, self.layout, AS_STORED)
        link.converts = not (
            welcome.layout.is_same(self.layout) and link.frame.is_same(self.layout)
        )
        is_there = prefill.incarnation == message.header.incarnation
        if welcome.plane in POOL_FD_PLANES and is_there:  # its socket hands the pool over
            link.plane, link.memory = welcome.plane, prefill.memory
        else:
            link.plane = "zmq"
        self.world.stats[f"links over {link.plane}"] += 1
        self._connected(link)

    def _connected(self, link: Link) -> None:
        if not link.is_up:
            return
        for receive in self._of(link.target):
            if receive.wants_connection:
                receive.wants_connection = False
                self._attach(receive, link)

    def _attach(self, receive: Receive, link: Link) -> None:
        """Give a receive its connection, as the sink does."""
        assert link.layout is not None, "the link has been welcomed"
        assert link.frame is not None, "the link has been welcomed"
        wire = receive.wire
        receive.link = link
        wire.plane, wire.pool, wire.conversion = link.plane, link.memory, None
        wire.pool_id = 1
        if link.converts:
            wire.conversion = Conversion(self.memory, wire.placement, link.layout, link.frame)
        size, now = link.frame.block_bytes, self.world.now
        self._apply(receive, receive.machine.on_connected(link.plane, now, size))

    def lose(self, link: Link, *, is_dead: bool) -> None:
        """A connection broke; what was under way on it is gone."""
        if not link.is_up:
            return
        if not link.plane:
            self._link_failed(link, "handoff_failed", "broken while greeting")
            return
        link.is_up = False
        self.world.stats["links lost"] += 1
        self.world.note(self.name, f"lost its link to {link.prefill.name}")
        del self.links[link.target]
        for receive in self._of(link.target):
            receive.wants_connection = False
            self._apply(receive, receive.machine.on_peer_lost(is_dead, self.world.now))

    def lose_plane(self, link: Link) -> None:
        """The mapping is of no use any more; the connection stands."""
        if not link.is_up or link.plane not in POOL_FD_PLANES:
            return
        self.world.stats["planes lost"] += 1
        link.plane, link.memory = "zmq", None
        for receive in self._of(link.target):
            if receive.link is link:
                self._apply(receive, receive.machine.on_plane_lost("unmapped", self.world.now))

    def _of(self, target: Target) -> list[Receive]:
        return [r for r in self.receives.values() if r.target == target]

    def _renew(self) -> None:
        """Renew every lease, as a thread of its own does, and look whether peers are silent."""
        self._is_renewing = False
        asked: dict[Target, list[int]] = {}
        for receive in self.receives.values():
            if receive.machine.state in _LEASED:
                asked.setdefault(receive.target, []).append(receive.ticket.xfer_id)
        if asked:
            self._is_renewing = True
            self.at(_RENEW_S, self._renew)
        for target, xfer_ids in asked.items():
            link = self.links.get(target)
            if link is None or not link.plane:
                continue
            if self.world.now - link.last_heard > _PEER_TIMEOUT_S:
                self.lose(link, is_dead=False)
                continue
            ids = tuple(sorted(set(xfer_ids)))
            link.asked.append(ids)
            body = pb.Renew(xfer_ids=ids).SerializeToString()
            self._network.to_prefill(link, MessageType.RENEW, body)

    def on_renewed_frames(self, link: Link, frames: Frames) -> None:
        """Take what the peer says about our leases."""
        try:
            message = decode((frames.head, frames.body))
            known = codec.parse(pb.Renewed, message.body).xfer_ids
        except WireError as error:
            self.world.stats[f"bad frame: {error.reason}"] += 1
            return
        if not link.asked or not link.is_up:
            return
        link.last_heard = self.world.now
        # On a connection of its own answers keep their order; here some are lost, or come twice.
        asked = set(link.asked.pop(0)).intersection(*link.asked)
        for receive in self._of(link.target):
            xfer_id = receive.ticket.xfer_id
            if xfer_id in asked and xfer_id not in known:
                self._apply(receive, receive.machine.on_renewed(False, self.world.now))

    # ---- messages -----------------------------------------------------------------------------

    def on_frames(self, link: Link, frames: Frames) -> None:
        """Take a message off the wire, as the sink's thread does."""
        if not link.is_up:
            return
        try:
            self._handle(link, decode((frames.head, frames.body)), frames.payload)
        except WireError as error:
            self.world.stats[f"bad frame: {error.reason}"] += 1

    def _handle(self, link: Link, message: Message, payload: Sequence[bytes]) -> None:
        header, now = message.header, self.world.now
        if not link.plane:
            self._on_greeting(link, message)
            return
        if header.incarnation != link.target[1]:
            raise WireError("incarnation")
        link.last_heard = now
        if link.has_gap(header.seq):
            self.world.stats["gaps"] += 1
            for receive in self._of(link.target):
                self._apply(receive, receive.machine.on_gap(now))
        found = self.receives.get((link.target, header.xfer_id, header.attempt))
        if found is None:
            if header.type is MessageType.ABORT:
                self._network.to_prefill(
                    link, MessageType.ABORTED, b"", header.xfer_id, header.attempt
                )
        elif header.type is MessageType.DATA:
            self._on_data(link, found, message, payload)
        else:
            if header.type is MessageType.REJECT:
                code, _, _ = codec.reject_args(message.body)
                self.world.stats[f"reject {code.name}"] += 1
            self._apply(found, found.wire.event(message, self.layout, now))

    # ---- blocks -------------------------------------------------------------------------------

    def _check_may_write(self, receive: Receive, block: BlockId) -> None:
        is_lent = self._lent.get(block) is receive.group and self.ledger.get(block) == 1
        if receive.is_ended or not is_lent:
            raise Violation(f"{self.name}: block {block} is written by who does not hold it")

    def _on_data(
        self, link: Link, receive: Receive, message: Message, payload: Sequence[bytes]
    ) -> None:
        machine, conversion = receive.machine, receive.wire.conversion
        indexes = codec.data_indexes(message.body, len(payload), machine.num_blocks)
        machine.account(len(payload))
        good: list[int] = []
        link.last_data = self.world.now
        for index, data in zip(indexes, payload, strict=True):
            dest = machine.dest_of(index)
            if dest is None:
                continue
            self._check_may_write(receive, dest)
            take = _taker(data)
            if conversion is None:
                wrong = self._writer.receive(machine, index, dest, take)
            else:
                wrong = self._writer.receive_converted(machine, conversion, index, take, None)
            self._on_verdict(receive, index, wrong)
            if wrong is None:
                good.append(index)
        self._say_pulled(receive, good)
        if machine.credit_wanted():
            self._hungry[receive] = None
        self._may_grant = True

    def _pull(self, receive: Receive) -> None:
        receive.is_pulling = False
        machine, link, conversion = receive.machine, receive.link, receive.wire.conversion
        if link is None or link.memory is None or receive.wire.pool is not link.memory:
            return
        pulls = machine.take_pulls(_PULLS_A_STEP)
        for pull in pulls:
            self._check_may_write(receive, pull.dest)
        pool = self._maybe_busy(link, link.memory)
        in_place = [pull for pull in pulls if pull.in_place]
        copied = [pull for pull in pulls if not pull.in_place]
        if in_place:
            verdicts = self._writer.verify_in_place(machine, pool, in_place)
            self._judged(receive, in_place, verdicts)
        if copied and conversion is None:
            self._judged(receive, copied, self._writer.pull(machine, pool, copied))
        elif copied and conversion is not None:
            verdicts = self._writer.pull_converted(machine, conversion, pool, copied)
            self._judged(receive, copied, verdicts)
        self._queue(receive)

    def _judged(
        self, receive: Receive, pulls: Sequence[Pull], verdicts: Sequence[str | None]
    ) -> None:
        """Take the verdicts on blocks that were copied, or looked at where they are."""
        machine = receive.machine
        good = [p.index for p, wrong in zip(pulls, verdicts, strict=True) if wrong is None]
        self.world.stats["blocks moved"] += len(good)
        if pulls[0].in_place:
            self._apply(receive, machine.on_attached(good, self.world.now))
        else:
            self._apply(receive, machine.on_good_blocks(good, self.world.now))
            self._say_pulled(receive, good)
        for pull, wrong in zip(pulls, verdicts, strict=True):
            if wrong is not None:
                self._on_verdict(receive, pull.index, wrong)

    def _maybe_busy(self, link: Link, memory: KvPoolMemory) -> KvPoolMemory:
        if not self.world.happens(self.world.odds.torn):
            return memory
        work = self._work_of(link)
        if work is None:
            return memory
        return _BusyPool(memory, work)  # type: ignore[return-value]  # what a puller needs of one

    def _work_of(self, link: Link) -> Callable[[], None] | None:
        """Return what makes the owner of a mapped pool write into it; None if it cannot now."""
        prefill, rng = link.prefill, self.world.rng
        is_same_life = prefill.incarnation == link.prefill_incarnation
        if not is_same_life or prefill.frozen_until > self.world.now:
            return None

        def work() -> None:
            self.world.stats["copies with the owner at work"] += 1
            prefill.press(1 + rng.randrange(12))
            prefill.check()

        return work

    def _say_pulled(self, receive: Receive, indexes: list[int]) -> None:
        """Tell which blocks were verified; not when the transfer ended with them."""
        if receive.machine.state is ReceiverState.PULLING:
            for index in indexes:
                body = pb.Pulled(lo=index, hi=index + 1).SerializeToString()
                self._say(receive, MessageType.PULLED, body)

    def _on_verdict(self, receive: Receive, index: int, wrong: str | None) -> None:
        self.world.stats["blocks moved" if wrong is None else f"refused for its {wrong}"] += 1
        machine = receive.machine
        self._apply(receive, machine.on_block(index, wrong is None, self.world.now, wrong or ""))

    def _grant(self) -> None:
        used: dict[Hashable, int] = {}
        for receive in self.receives.values():
            size = used.get(receive.target, 0) + receive.machine.outstanding_bytes
            used[receive.target] = size
        block_bytes = self.layout.block_bytes
        credit = CreditRound(
            block_bytes=block_bytes,
            window_bytes=4 * block_bytes,
            budget_bytes=8 * block_bytes,
            chunk_bytes=2 * block_bytes,
            used=used,
        )
        for receive in list(self._hungry):
            wanted = receive.machine.credit_wanted()
            if not wanted:
                del self._hungry[receive]
                continue
            size = credit.grant(receive.target, wanted, receive.machine.frame_bytes)
            if size:
                self._apply(receive, receive.machine.grant(size, self.world.now))

    # ---- time ---------------------------------------------------------------------------------

    def _arm(self, receive: Receive) -> None:
        due = receive.machine.next_deadline()
        if due < receive.armed_at:
            receive.armed_at = due
            self.at(max(0.0, due - self.world.now), self._on_time, receive, due)

    def _on_time(self, receive: Receive, due: float) -> None:
        if receive.armed_at != due:
            return  # an earlier timer took its place
        receive.armed_at = float("inf")
        if receive.machine.state is ReceiverState.RELEASED:
            return
        if self.world.now >= receive.machine.next_deadline():
            last_data = receive.link.last_data if receive.link is not None else 0.0
            self._apply(receive, receive.machine.on_time(self.world.now, last_data))
        else:
            self._arm(receive)


def _copy_blocks(
    source: KvPoolMemory,
    source_blocks: Sequence[int],
    gens: Sequence[int],
    dest: Bytes,
    dest_blocks: Sequence[int],
    part: KvLayout | None = None,
) -> list[bool]:
    """Copy by the path that a busy owner can interrupt: one native call cannot be."""
    rows, wanted = np.array(source_blocks, np.int64), np.array(gens, np.uint64)
    return block_copy.pull_with_numpy(source, rows, wanted, dest, dest_blocks, part)


def _taker(data: bytes) -> Callable[[Bytes], bool]:
    """Return what copies a frame off the socket; False when it has another length."""

    def take(view: Bytes) -> bool:
        size = min(len(data), len(view))
        view[:size] = np.frombuffer(data, np.uint8, size)
        return len(data) == len(view)

    return take
