"""A sender and receivers joined by a network that drops, doubles, reorders and delays; pure.

Content of a block is a number and its digest is that number, so wrong content is seen at once.
The moment the sender releases, its blocks are overwritten (as if another request had got them),
and so are a receiver's the moment it ends: whatever reads or writes them later is caught.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.common.ids import BlockId
from services.transfer import receiver as rx
from services.transfer import sender as tx
from services.transfer.api import FinalInfo, FirstTokenInfo
from services.transfer.values import FinalArgs, FinalBlocks, OpenArgs, Peer, ReadyArgs

BLOCK_BYTES = 1024
BLOCK_SIZE = 16
SENDER_POLICY = tx.SenderPolicy(
    block_bytes=BLOCK_BYTES,
    ticket_ttl_s=5.0,
    lease_s=10.0,
    tombstone_s=60.0,
    data_message_bytes=2 * BLOCK_BYTES,
    max_nacks=2,
)
RECEIVER_POLICY = rx.ReceiverPolicy(
    block_bytes=BLOCK_BYTES,
    block_size=BLOCK_SIZE,
    connect_timeout_s=2.0,
    open_timeout_s=2.0,
    max_wait_s=20.0,
    max_transfer_s=120.0,
    stall_timeout_s=2.0,
    max_nacks=2,
    window_s=4.0,
)


@dataclass
class Decode:
    """One receiver with its blocks."""

    name: str
    attempt: int
    machine: rx.ReceiverTransfer
    route: int = 0
    dest: dict[int, int] = field(default_factory=dict)  # destination block -> content
    ended: list[Any] = field(default_factory=list)
    is_forgotten: bool = False
    is_crashed: bool = False
    wants_connection: bool = False
    next_renew: float = 0.0

    @property
    def peer(self) -> Peer:
        """How the sender knows it."""
        base = self.name.encode() + b"\0" + bytes(8)
        return Peer(base, base + bytes([self.route]))


@dataclass(frozen=True)
class Pulled:
    """The message the shells send: these blocks are verified."""

    lo: int
    hi: int


@dataclass(eq=False)
class Packet:
    """A message under way; DATA holds the sender's blocks until it has left."""

    to: str  # "sender" or a decode's name
    route: int
    body: Any
    attempt: int
    blocks: tuple[BlockId, ...] = ()


class World:
    """One transfer of `num_tokens` with everything around it."""

    def __init__(self, num_tokens: int, plane: str) -> None:
        self.now = 100.0
        self.plane = plane
        self.num_tokens = num_tokens
        self.num_blocks = num_tokens // BLOCK_SIZE
        self.has_tail = num_tokens % BLOCK_SIZE != 0
        self.sender = tx.SenderTransfer(1, self.num_blocks, self.has_tail, SENDER_POLICY, self.now)
        self.content = {i: 1_000 + i for i in range(self.num_blocks + 1)}  # source pool
        self.gens = dict.fromkeys(range(self.num_blocks + 1), 2)
        self.releases: list[tx.Release] = []
        self.num_sealed = 0
        self.is_finished = False
        self.is_sender_crashed = False
        self.decodes: dict[str, Decode] = {}
        self.packets: list[Packet] = []
        self.bit_flips = 0
        self.unpinned: set[int] = set()

    # ---- what tests do ------------------------------------------------------------------------

    def open(self, name: str, attempt: int, have: tuple[bool, ...] = ()) -> Decode:
        """Start a receiver."""
        had = have or (False,) * self.num_blocks
        machine = rx.ReceiverTransfer(self.num_tokens, had, RECEIVER_POLICY, self.now)
        decode = Decode(name, attempt, machine, next_renew=self.now + 3)
        self.decodes[name] = decode
        self.do_receiver(decode, machine.start())
        return decode

    def connect(self, decode: Decode) -> None:
        """Finish a pending connection attempt."""
        if not decode.wants_connection or decode.is_crashed:
            return
        decode.wants_connection = False
        if self.is_sender_crashed:
            actions = decode.machine.on_connect_failed("handoff_failed", "refused")
        else:
            actions = decode.machine.on_connected(self.plane, self.now)
        self.do_receiver(decode, actions)

    def reserve(self, decode: Decode) -> None:
        """Lend the receiver its blocks."""
        if decode.dest or decode.ended or decode.is_crashed:
            return
        count = self.num_blocks + self.has_tail
        decode.dest = dict.fromkeys(range(count), -1)
        blocks = [BlockId(i) for i in range(self.num_blocks)]
        tail = BlockId(self.num_blocks) if self.has_tail else None
        self.do_receiver(decode, decode.machine.reserve(blocks, tail, self.now))

    def seal(self, count: int) -> None:
        """Compute some more blocks."""
        if self.is_sender_crashed or self.releases:
            return
        count = min(count, self.num_blocks - self.num_sealed)
        if count <= 0:
            return
        blocks = [BlockId(i) for i in range(self.num_sealed, self.num_sealed + count)]
        actions = self.sender.on_sealed(self.num_sealed, blocks)
        self.num_sealed += count
        self.do_sender(actions)

    def finish(self) -> None:
        """End the prefill."""
        if self.is_finished or self.is_sender_crashed or self.releases:
            return
        self.seal(self.num_blocks)
        self.is_finished = True
        tail = BlockId(self.num_blocks) if self.has_tail else None
        info = FinalInfo(
            (FirstTokenInfo(0, 9),), self.num_tokens, tail, self.num_tokens % BLOCK_SIZE, 5
        )
        tail_digest = self.content[self.num_blocks]
        final = FinalBlocks(info, self.gens[self.num_blocks], tail_digest)
        self.do_sender(self.sender.on_prefill_finished(final))

    def unpin(self) -> None:
        """Memory is short at the prefill side."""
        if not self.is_sender_crashed:
            self.do_sender(self.sender.unpin())

    def cancel_source(self) -> None:
        """Cancel at the prefill side."""
        if not self.is_sender_crashed:
            self.do_sender(self.sender.cancel("client left", self.now))

    def cancel_sink(self, decode: Decode) -> None:
        """Cancel at a decode side."""
        if not decode.is_crashed:
            self.do_receiver(decode, decode.machine.cancel("client left", self.now))

    def crash_sender(self) -> None:
        """Kill the prefill worker: its packets vanish, its connections break."""
        if self.is_sender_crashed:
            return
        self.is_sender_crashed = True
        self.packets = [p for p in self.packets if p.to != "sender"]
        for decode in self.decodes.values():
            self.break_connection(decode, is_dead=True)

    def crash_decode(self, decode: Decode) -> None:
        """Kill a decode worker."""
        if decode.is_crashed:
            return
        decode.is_crashed = True
        for packet in [p for p in self.packets if p.to == decode.name]:
            self.lose(packet)
        if not self.is_sender_crashed:
            self.do_sender(self.sender.on_peer_lost(decode.peer.base, self.now))

    def break_connection(self, decode: Decode, *, is_dead: bool = False) -> None:
        """Cut the connection: what is under way on it is lost both ways."""
        for packet in [p for p in self.packets if p.to == decode.name]:
            self.lose(packet)
        keep = [p for p in self.packets if not (p.to == "sender" and p.body[0] == decode.name)]
        self.packets = keep
        if not decode.is_crashed:
            decode.route += 1
            self.do_receiver(decode, decode.machine.on_peer_lost(is_dead, self.now))

    def advance(self, seconds: float) -> None:
        """Let time pass, in steps no longer than a tick."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            self.tick()

    def tick(self) -> None:
        """Run every due timer; renew leases from live receivers."""
        if not self.is_sender_crashed and self.now >= self.sender.next_deadline():
            self.do_sender(self.sender.on_time(self.now))
        for decode in self.decodes.values():
            if decode.is_crashed or decode.is_forgotten:
                continue
            if self.now >= decode.machine.next_deadline():
                self.do_receiver(decode, decode.machine.on_time(self.now))
            opened = (rx.ReceiverState.WAITING_BLOCKS, rx.ReceiverState.PULLING)
            if self.now >= decode.next_renew and decode.machine.state in opened:
                decode.next_renew = self.now + 3
                is_known = not self.is_sender_crashed and self.sender.on_renew(
                    decode.peer.base, self.now
                )
                if not self.is_sender_crashed:
                    self.do_receiver(decode, decode.machine.on_renewed(is_known, self.now))

    def lose(self, packet: Packet) -> None:
        """Drop a packet; the blocks it held are free of it."""
        if packet in self.packets:
            self.packets.remove(packet)
            self._left(packet)

    def deliver(self, packet: Packet, *, keep: bool = False, flip: bool = False) -> None:
        """Deliver a packet; with `keep` it will come once more."""
        if packet not in self.packets:
            return
        contents = [self.content[b] for b in packet.blocks]
        if flip and contents:
            contents[0] ^= 1 << 20
            self.bit_flips += 1
        if keep and not packet.blocks:
            self.packets.append(packet)
        self.packets.remove(packet)
        if packet.to == "sender":
            if not self.is_sender_crashed:
                self._to_sender(packet)
        else:
            decode = self.decodes[packet.to]
            if not decode.is_crashed and packet.route == decode.route:
                self._to_decode(decode, packet, contents)
        if keep and not packet.blocks:
            return
        self._left(packet)

    def settle(self) -> None:
        """Let the network behave until everything has ended; fail if it does not."""
        for _ in range(2_000):
            for packet in list(self.packets):
                self.deliver(packet)
            for decode in self.decodes.values():
                self.connect(decode)
                if not decode.is_crashed:
                    self.pull(decode)
            self.pump()
            if not self.packets and self.is_terminal():
                return
            self.advance(0.25)
        raise AssertionError(f"not terminal: {self.sender.state} {self._states()}")

    def is_terminal(self) -> bool:
        """Tell whether both sides are done."""
        sender_done = self.is_sender_crashed or self.sender.state is tx.SenderState.CLOSED
        return sender_done and all(d.is_crashed or d.is_forgotten for d in self.decodes.values())

    def check(self) -> None:
        """Assert what must hold after every step."""
        self.sender.check_integrity()
        assert len(self.releases) <= 1
        for decode in self.decodes.values():
            decode.machine.check_integrity()
            assert len(decode.ended) <= 1

    # ---- data ---------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what the credit allows, and grant what is wanted."""
        for decode in self.decodes.values():
            wanted = decode.machine.credit_wanted()
            if wanted and not decode.is_crashed:
                grant = min(wanted, 4 * BLOCK_BYTES)
                self.do_receiver(decode, decode.machine.grant(grant, self.now))
        while not self.is_sender_crashed and (out := self.sender.take_data()) is not None:
            name = out.peer.base.split(b"\0")[0].decode()
            self.packets.append(
                Packet(name, out.peer.route[-1], ("data", out), out.attempt, out.block_ids)
            )

    def pull(self, decode: Decode) -> None:
        """Copy over memfd, with the seqlock's two looks at the generation."""
        for pull in decode.machine.take_pulls(4):
            if decode.machine.dest_of(pull.index) is None:
                continue
            assert not decode.ended
            is_good = self.gens[pull.source_block] == pull.gen
            if is_good:
                decode.dest[pull.dest] = self.content[pull.source_block]
            announced = int(decode.machine.digests_of(pull.index)[0])
            is_good = is_good and decode.dest[pull.dest] == announced
            actions = decode.machine.on_block(pull.index, is_good, self.now, "generation")
            self.do_receiver(decode, actions)
            self._say_pulled(decode, pull.index, is_good)

    def _say_pulled(self, decode: Decode, index: int, is_good: bool) -> None:
        if is_good and decode.machine.state is rx.ReceiverState.PULLING:
            body = (decode.name, Pulled(index, index + 1))
            self.packets.append(Packet("sender", decode.route, body, decode.attempt))

    # ---- inside -------------------------------------------------------------------------------

    def _states(self) -> dict[str, str]:
        return {name: d.machine.state.value for name, d in self.decodes.items()}

    def _left(self, packet: Packet) -> None:
        if packet.blocks and not self.is_sender_crashed:
            self.do_sender(self.sender.on_data_left(self.now))

    def _to_sender(self, packet: Packet) -> None:
        name, action = packet.body
        decode = self.decodes[name]
        base = decode.peer.base
        peer = Peer(base, base + bytes([packet.route]))
        machine, attempt = self.sender, packet.attempt
        if isinstance(action, rx.SendOpen):
            args = OpenArgs(attempt, action.have, self.plane)
            actions = machine.on_open(peer, args, self.now)
        elif isinstance(action, rx.SendCredit):
            actions = machine.on_credit(peer, attempt, action.total_bytes)
        elif isinstance(action, rx.SendNack):
            actions = machine.on_nack(peer, attempt, action.indexes, action.tail, self.now)
        elif isinstance(action, rx.SendDone):
            actions = machine.on_done(peer, attempt, action.size_bytes, self.now)
        elif isinstance(action, Pulled):
            actions = machine.on_pulled(peer, attempt, action.lo, action.hi, self.now)
        elif isinstance(action, rx.SendAbort):
            actions = machine.on_abort(peer, attempt, action.reason, self.now)
        else:
            assert isinstance(action, rx.SendAborted)
            actions = machine.on_aborted(peer, attempt, self.now)
        self.do_sender(actions)

    def _to_decode(self, decode: Decode, packet: Packet, contents: list[int]) -> None:
        kind, value = packet.body
        machine = decode.machine
        if packet.attempt != decode.attempt:
            return
        if kind == "data":
            self._data(decode, value, contents)
            return
        handlers = {
            "opened": lambda: machine.on_opened(self.now),
            "reject": lambda: machine.on_reject(value.code, value.retry_after_s, value.detail),
            "ready": lambda: machine.on_ready(value, self.now),
            "final": lambda: machine.on_final(value, self.now),
            "abort": lambda: machine.on_abort(value),
            "aborted": machine.on_closed,
            "closed": machine.on_closed,
        }
        self.do_receiver(decode, handlers[kind]())

    def _data(self, decode: Decode, out: tx.DataOut, contents: list[int]) -> None:
        machine = decode.machine
        machine.account(len(contents))
        for index, content in zip(out.indexes, contents, strict=True):
            dest = machine.dest_of(index)
            if dest is None:
                continue
            assert not decode.ended, "a block was written after it was given back"
            decode.dest[dest] = content
            is_good = content == int(machine.digests_of(index)[0])
            self.do_receiver(decode, machine.on_block(index, is_good, self.now, "digest"))
            self._say_pulled(decode, index, is_good)

    def do_sender(self, actions: list[tx.SenderAction]) -> None:
        """Carry out what the sender decided."""
        for action in actions:
            if isinstance(action, tx.Unpin):
                self._unpin(action)
            elif isinstance(action, tx.Release):
                self.releases.append(action)
                held = [b for p in self.packets for b in p.blocks]
                assert not held, "released while DATA still reads the blocks"
                for block in self.content:
                    self.gens[block] += 1
                    self.content[block] = 7  # a canary: another request's KV
            elif not isinstance(action, tx.DataReady):
                name = action.peer.base.split(b"\0")[0].decode()
                body = self._sender_body(action)
                self.packets.append(Packet(name, action.peer.route[-1], body, action.attempt))

    def _unpin(self, action: tx.Unpin) -> None:
        assert not self.releases, "given back twice"
        assert self.is_finished, "prefill still reads its blocks"
        held = {b for p in self.packets for b in p.blocks}
        for block in action.block_ids:
            assert block not in held, "given back while DATA still reads it"
            assert block not in self.unpinned, "given back twice"
            assert block < self.num_blocks, "the tail is never given back early"
            self.unpinned.add(block)
            self.gens[block] += 1
            self.content[block] = 7  # a canary: another request's KV

    def _sender_body(self, action: Any) -> tuple[str, Any]:
        if isinstance(action, tx.SendReady):
            blocks = list(range(action.lo, action.hi))
            ready = ReadyArgs(
                lo=action.lo,
                gens=np.array([2 for _ in blocks], np.uint64),
                digests=np.array([[1_000 + b] for b in blocks], np.uint64),
                source_blocks=np.array(blocks, np.uint32),
            )
            return "ready", ready
        if isinstance(action, tx.SendFinal):
            final = self.sender.final
            assert final is not None
            args = FinalArgs(
                first=final.info.first,
                num_tokens=final.info.num_tokens,
                num_blocks=self.num_blocks,
                tail_valid_tokens=final.info.tail_valid_tokens,
                tail_source_block=self.num_blocks,
                tail_gen=final.tail_gen,
                tail_digest=final.tail_digest,
                prefill_us=1,
            )
            return "final", args
        names = {
            tx.SendOpened: "opened",
            tx.SendReject: "reject",
            tx.SendAbort: "abort",
            tx.SendAborted: "aborted",
            tx.SendClosed: "closed",
        }
        value = action.reason if isinstance(action, tx.SendAbort) else action
        return names[type(action)], value

    def do_receiver(self, decode: Decode, actions: list[rx.ReceiverAction]) -> None:
        """Carry out what a receiver decided."""
        for action in actions:
            if isinstance(action, rx.Deliver):
                self._check_delivery(decode, action)
                decode.ended.append(action)
            elif isinstance(action, rx.Fail):
                decode.ended.append(action)
            elif isinstance(action, rx.Forget):
                decode.is_forgotten = True
            elif isinstance(action, rx.Connect):
                decode.wants_connection = True
            elif not isinstance(action, rx.WorkReady) and not decode.is_crashed:
                packet = Packet("sender", decode.route, (decode.name, action), decode.attempt)
                self.packets.append(packet)

    def _check_delivery(self, decode: Decode, action: rx.Deliver) -> None:
        assert action.final.first[0].token_id == 9
        for block in range(self.num_blocks + self.has_tail):
            assert decode.dest[block] == 1_000 + block, "wrong content was accepted"
