"""A decode worker of the transfer simulator: real pool, real receiver machines and digests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from services.chaos.sim_network import Link, Network
from services.chaos.sim_prefill import LEASE_S, PrefillWorker, Request
from services.chaos.sim_world import LAYOUT, Violation, Worker, World, reference, valid_rows
from services.common.errors import BlocksExhausted
from services.common.ids import BlockId
from services.kv.digest import block_digests, tail_digest
from services.transfer import receiver as rx
from services.transfer import sender as tx
from services.transfer.credit import CreditRound
from services.transfer.receiver import Pull, ReceiverState, ReceiverTransfer
from services.transfer.values import FinalArgs, Peer, ReadyArgs

_BLOCK = LAYOUT.block_bytes
MAX_TRANSFER_S = 60.0
POLICY = rx.ReceiverPolicy(
    block_bytes=_BLOCK,
    block_size=LAYOUT.block_size,
    connect_timeout_s=4.0,
    open_timeout_s=2.0,
    max_wait_s=10.0,
    max_transfer_s=MAX_TRANSFER_S,
    stall_timeout_s=2.0,
    max_nacks=2,
    window_s=2.0,
)
_RENEW_S = LEASE_S / 3
_PEER_TIMEOUT_S = 5.0
_PULLS_A_STEP = 3
_OPENED = (ReceiverState.WAITING_BLOCKS, ReceiverState.PULLING)
# A process can be frozen while its deadline passes; it acts when it wakes.
END_SLACK_S = 5.0

Target = tuple[str, int]


@dataclass(eq=False, slots=True)
class Receive:
    """One open: its session and the blocks it may write."""

    request: Request
    signed: bytes
    xfer_id: int
    attempt: int
    prefill: PrefillWorker
    incarnation: int  # of the prefill worker that issued the ticket
    machine: ReceiverTransfer
    had: tuple[BlockId, ...]
    started_at: float
    fresh: tuple[BlockId, ...] = ()  # lent: full blocks, then the tail
    link: Link | None = None
    armed_at: float = float("inf")
    is_ended: bool = False
    is_pulling: bool = False
    wants_connection: bool = False

    @property
    def target(self) -> Target:
        """The life of the worker that has its KV."""
        return self.prefill.name, self.incarnation

    @property
    def wire_id(self) -> tuple[Target, int, int]:
        """What messages call it."""
        return self.target, self.xfer_id, self.attempt

    @property
    def blocks(self) -> list[BlockId]:
        """Every block it holds, in token order."""
        return [*self.had, *self.fresh]


class DecodeListener(Protocol):
    """Who sends tickets here."""

    def on_received(self, request: Request) -> None:
        """The KV is there."""
        ...

    def on_receive_failed(self, receive: Receive, code: str, can_recompute: bool) -> None:
        """It will not come."""
        ...


class DecodeWorker(Worker):
    """Pulls blocks into its pool, verifies them, and uses them."""

    def __init__(
        self, world: World, name: str, num_blocks: int, network: Network, router: DecodeListener
    ) -> None:
        self._network = network
        self._router = router
        self._num_links = 0
        super().__init__(world, name, num_blocks)

    def boot(self) -> None:
        """Begin a life without receives."""
        super().boot()
        self.receives: dict[tuple[Target, int, int], Receive] = {}
        self.links: dict[Target, Link] = {}
        self._dialing: set[Target] = set()
        self._hungry: OrderedDict[Receive, None] = OrderedDict()
        self._lent: dict[BlockId, Receive] = {}  # who may write a block
        self._is_renewing = False
        self._may_grant = False  # something happened since credit was last granted

    def crash(self) -> None:
        """Take every receive along."""
        for receive in self.receives.values():
            if not receive.is_ended:
                receive.is_ended = True
                self.world.at(0.0, self._router.on_receive_failed, receive, "died", True)
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
        if self.receives or self._lent:
            raise Violation(f"{self.name}: receives still open at rest")

    # ---- the engine ---------------------------------------------------------------------------

    def open(
        self, request: Request, ticket: tuple[PrefillWorker, int, int, bytes], attempt: int
    ) -> None:
        """Take a ticket; blocks are lent when there are some."""
        receive = self._make_receive(request, ticket, attempt)
        if receive.wire_id in self.receives:
            receive.is_ended = True
            self._router.on_receive_failed(receive, "duplicate", False)
            return
        self.hold(receive.had)
        self.receives[receive.wire_id] = receive
        self.at(MAX_TRANSFER_S + END_SLACK_S, self._check_ended, receive)
        self._apply(receive, receive.machine.start())
        rng = self.world.rng
        is_late = rng.random() < self.world.odds.decode_wait
        self.at(rng.uniform(0.1, 4.0) if is_late else rng.random() * 0.003, self._lend, receive)
        self.world.note(self.name, f"open {request.number} attempt {receive.attempt}")

    def _make_receive(
        self, request: Request, ticket: tuple[PrefillWorker, int, int, bytes], attempt: int
    ) -> Receive:
        """Look what the prefix cache has, as a work item arrives."""
        prefill, incarnation, xfer_id, signed = ticket
        had = self.pool.cache.match(request.family.hashes[: request.num_blocks])
        have = [i < len(had) for i in range(request.num_blocks)]
        now = self.world.now
        machine = ReceiverTransfer(request.num_tokens, have, POLICY, now)
        return Receive(request, signed, xfer_id, attempt, prefill, incarnation, machine, had, now)

    def cancel(self, request: Request) -> None:
        """The client left."""
        for receive in list(self.receives.values()):
            if receive.request is request:
                self._apply(receive, receive.machine.cancel("client left", self.world.now))

    def _check_ended(self, receive: Receive) -> None:
        if not receive.is_ended:
            raise Violation(f"{self.name}: a receive outlived its deadline")

    def _lend(self, receive: Receive) -> None:
        if receive.is_ended:
            return
        request = receive.request
        num_full = request.num_blocks - len(receive.had)
        has_tail = request.tail_valid > 0
        try:
            after = receive.had[-1] if receive.had else None
            receive.fresh = self.allocate(num_full + has_tail, after)
        except BlocksExhausted:
            self.at(0.1, self._lend, receive)
            return
        for block in receive.fresh:
            self._lent[block] = receive
        full: list[BlockId | None] = [None] * len(receive.had)
        full += receive.fresh[:num_full]
        tail = receive.fresh[-1] if has_tail else None
        self._apply(receive, receive.machine.reserve(full, tail, self.world.now))

    def _use(self, receive: Receive) -> None:
        """Put the blocks into the prefix cache, decode for a while, give them back."""
        self._check_content(receive)
        request = receive.request
        hashes, blocks = request.family.hashes, receive.blocks
        for index in range(len(receive.had), request.num_blocks):
            parent = hashes[index - 1] if index else None
            blocks[index] = self.seal(blocks[index], hashes[index], parent)
        self.at(self.world.rng.random() * 0.03, self.drop, blocks)

    def _check_content(self, receive: Receive) -> None:
        request = receive.request
        blocks = receive.blocks
        if len(blocks) != request.num_blocks + (request.tail_valid > 0):
            raise Violation(f"{self.name}: delivered without all of its blocks")
        for index in range(request.num_blocks):
            if self.memory.blocks[blocks[index]].tobytes() != reference(
                request.family.hashes[index]
            ):
                raise Violation(f"{self.name}: block {index} accepted with wrong content")
        if request.tail_valid:
            name = request.family.tail_name(request.num_tokens)
            expected = np.frombuffer(reference(name), np.uint8)
            row, valid = self.memory.blocks[blocks[-1]], request.tail_valid
            if valid_rows(row, valid) != valid_rows(expected, valid):
                raise Violation(f"{self.name}: a tail was accepted with wrong content")

    # ---- actions ------------------------------------------------------------------------------

    def _apply(self, receive: Receive, actions: list[rx.ReceiverAction]) -> None:
        machine = receive.machine
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
            else:
                self._send(receive, action)
        machine.check_integrity()
        if machine.state in _OPENED and not self._is_renewing:
            self._is_renewing = True
            self.at(_RENEW_S, self._renew)
        if machine.state is not ReceiverState.RELEASED:
            self._arm(receive)

    def _end(self, receive: Receive, how: str) -> None:
        if receive.is_ended:
            raise Violation(f"{self.name}: a receive ended twice")
        receive.is_ended = True
        self.world.note(self.name, f"request {receive.request.number} {how}")
        self.world.stats[f"sink {how}"] += 1
        self._hungry.pop(receive, None)
        for block in receive.fresh:
            del self._lent[block]

    def _deliver(self, receive: Receive, action: rx.Deliver) -> None:
        self._end(receive, "ready")
        if action.final.first[0].token_id != receive.request.first_token:
            raise Violation(f"{self.name}: the first token is another request's")
        self._check_content(receive)
        # The engine takes over a little later: until then nothing may write either.
        self.at(self.world.rng.random() * 0.005, self._use, receive)
        self._router.on_received(receive.request)

    def _fail(self, receive: Receive, action: rx.Fail) -> None:
        self._end(receive, f"failed {action.code}")
        if self.world.now >= receive.started_at + MAX_TRANSFER_S:
            raise Violation(f"{self.name}: nothing but its last limit ended a receive: a hang")
        self.at(self.world.rng.random() * 0.005, self.drop, receive.blocks)
        self._router.on_receive_failed(receive, action.code, action.can_recompute)

    def _queue(self, receive: Receive) -> None:
        machine = receive.machine
        if machine.has_pulls() and not receive.is_pulling:
            receive.is_pulling = True
            self.at(0.0001, self._pull, receive)
        if machine.credit_wanted():
            self._hungry[receive] = None

    def _send(self, receive: Receive, action: rx.ReceiverAction) -> None:
        link = receive.link
        if link is None or not link.is_up:
            return  # all of it is repeated or covered by the lease
        deliver = receive.prefill.on_message
        signed = receive.signed if isinstance(action, rx.SendOpen) else b""
        self._network.to_prefill(link, deliver, action, receive.xfer_id, receive.attempt, signed)

    # ---- connections --------------------------------------------------------------------------

    def _connect(self, receive: Receive) -> None:
        target = receive.target
        receive.wants_connection = True
        link = self.links.get(target)
        if link is not None:
            self.at(0.0, self._connected, link)
        elif target not in self._dialing:
            self._dialing.add(target)
            self.at(0.001 + self.world.rng.random() * 0.002, self._dialed, receive.prefill, target)

    def _dialed(self, prefill: PrefillWorker, target: Target) -> None:
        self._dialing.discard(target)
        network = self._network
        if network.is_cut(self, prefill) or network.is_cut(prefill, self):
            return  # no answer: the machines' own deadlines end the wait
        waiting = [r for r in self._of(target) if r.wants_connection]
        if prefill.incarnation != target[1]:  # dead, or another life answers HELLO
            for receive in waiting:
                receive.wants_connection = False
                self._apply(
                    receive, receive.machine.on_connect_failed("handoff_failed", "another life")
                )
            return
        self._num_links += 1
        base = self.name.encode() + b"\0" + self.incarnation.to_bytes(8, "little")
        peer = Peer(base, base + b"m%d" % self._num_links)
        link = Link(
            decode=self,
            prefill=prefill,
            decode_incarnation=self.incarnation,
            prefill_incarnation=target[1],
            peer=peer,
            plane="memfd" if (self.num_blocks + prefill.num_blocks) % 2 else "zmq",
            memory=prefill.memory,
            hears=self.on_message,
            hears_renewed=self.on_renewed,
            last_heard=self.world.now,
        )
        self.links[target] = link
        prefill.links[peer.route] = link
        self._connected(link)

    def _connected(self, link: Link) -> None:
        if not link.is_up:
            return
        target = (link.prefill.name, link.prefill_incarnation)
        for receive in self._of(target):
            if receive.wants_connection:
                receive.wants_connection = False
                receive.link = link
                self._apply(receive, receive.machine.on_connected(link.plane, self.world.now))

    def lose(self, link: Link, *, is_dead: bool) -> None:
        """A connection broke; what was under way on it is gone."""
        if not link.is_up:
            return
        link.is_up = False
        self.world.stats["links lost"] += 1
        self.world.note(self.name, f"lost its link to {link.prefill.name}")
        target = (link.prefill.name, link.prefill_incarnation)
        del self.links[target]
        for receive in self._of(target):
            receive.wants_connection = False
            self._apply(receive, receive.machine.on_peer_lost(is_dead, self.world.now))

    def _of(self, target: Target) -> list[Receive]:
        return [r for r in self.receives.values() if r.target == target]

    def _renew(self) -> None:
        """Renew every lease, as a thread of its own does, and look whether peers are silent."""
        self._is_renewing = False
        asked: dict[Target, list[int]] = {}
        for receive in self.receives.values():
            if receive.machine.state in _OPENED:
                asked.setdefault(receive.target, []).append(receive.xfer_id)
        if asked:
            self._is_renewing = True
            self.at(_RENEW_S, self._renew)
        for target, xfer_ids in asked.items():
            link = self.links.get(target)
            if link is None:
                continue
            if self.world.now - link.last_heard > _PEER_TIMEOUT_S:
                self.lose(link, is_dead=False)
            else:
                self._network.to_prefill(link, link.prefill.on_renew, tuple(sorted(set(xfer_ids))))

    def on_renewed(self, link: Link, asked: tuple[int, ...], known: tuple[int, ...]) -> None:
        """Take what the peer says about our leases."""
        link.last_heard = self.world.now
        for receive in self._of((link.prefill.name, link.prefill_incarnation)):
            if receive.xfer_id in asked and receive.xfer_id not in known:
                self._apply(receive, receive.machine.on_renewed(False, self.world.now))

    # ---- messages -----------------------------------------------------------------------------

    def on_message(self, link: Link, seq: int, kind: str, value: Any, *rest: Any) -> None:
        """Take a message of a prefill worker."""
        if not link.is_up:
            return
        now = self.world.now
        link.last_heard = now
        target = (link.prefill.name, link.prefill_incarnation)
        if link.has_gap(seq):
            self.world.stats["gaps"] += 1
            for receive in self._of(target):
                self._apply(receive, receive.machine.on_gap(now))
        xfer_id, attempt, *payload = rest
        found = self.receives.get((target, xfer_id, attempt))
        if found is None:
            if kind == "abort":
                self._network.to_prefill(
                    link, link.prefill.on_message, rx.SendAborted(), xfer_id, attempt, b""
                )
        elif kind == "data":
            self._on_data(link, found, value, payload[0])
        else:
            self._apply(found, self._event(found.machine, kind, value))

    def _event(self, machine: ReceiverTransfer, kind: str, value: Any) -> list[rx.ReceiverAction]:
        now = self.world.now
        if kind == "opened":
            return machine.on_opened(now)
        if kind == "ready":
            return machine.on_ready(cast(ReadyArgs, value), now)
        if kind == "final":
            return machine.on_final(cast(FinalArgs, value), now)
        if kind == "reject":
            self.world.stats[f"reject {value.code.name}"] += 1
            return machine.on_reject(value.code, value.retry_after_s, value.detail)
        if kind == "abort":
            return machine.on_abort(value)
        if kind in ("closed", "aborted"):
            return machine.on_closed()
        raise TypeError(f"the simulator does not carry {kind}")

    # ---- blocks -------------------------------------------------------------------------------

    def _check_may_write(self, receive: Receive, block: BlockId) -> None:
        if self._lent.get(block) is not receive or self.ledger.get(block) != 1:
            raise Violation(f"{self.name}: block {block} is written by who does not hold it")

    def _on_data(self, link: Link, receive: Receive, out: tx.DataOut, payload: list[bytes]) -> None:
        machine = receive.machine
        machine.account(len(payload))
        link.last_data = self.world.now
        for index, data in zip(out.indexes, payload, strict=True):
            dest = machine.dest_of(index)
            if dest is None:
                continue
            self._check_may_write(receive, dest)
            size = min(len(data), _BLOCK)
            self.memory.blocks[dest, :size] = np.frombuffer(data, np.uint8, size)
            wrong = self._judge(machine, index, dest) if len(data) == _BLOCK else "length"
            self._on_verdict(receive, index, wrong)
        if machine.credit_wanted():
            self._hungry[receive] = None
        self._may_grant = True

    def _pull(self, receive: Receive) -> None:
        receive.is_pulling = False
        machine, link = receive.machine, receive.link
        if link is None:
            return
        done: list[int] = []
        for pull in machine.take_pulls(_PULLS_A_STEP):
            if machine.dest_of(pull.index) is None:
                return
            if self._pull_one(receive, link, pull):
                done.append(pull.index)
        self._say_pulled(receive, done)
        self._queue(receive)

    def _say_pulled(self, receive: Receive, indexes: list[int]) -> None:
        """Tell which blocks were verified; not when the transfer ended with them."""
        link, machine = receive.link, receive.machine
        if link is None or not link.is_up or machine.state is not ReceiverState.PULLING:
            return
        for index in indexes:
            self._network.to_prefill(
                link,
                receive.prefill.on_pulled,
                receive.xfer_id,
                receive.attempt,
                index,
                index + 1,
            )

    def _pull_one(self, receive: Receive, link: Link, pull: Pull) -> bool:
        self._check_may_write(receive, pull.dest)
        is_torn = self.world.happens(self.world.odds.torn)
        if self._copy(link, pull, is_torn=is_torn):
            wrong = self._judge(receive.machine, pull.index, pull.dest)
        else:
            wrong = "generation"
        self._on_verdict(receive, pull.index, wrong)
        return wrong is None

    def _copy(self, link: Link, pull: Pull, *, is_torn: bool) -> bool:
        """Copy under the seqlock, in two halves; the owner may work in between."""
        source, gen = link.memory, pull.gen
        if gen % 2 or int(source.gens[pull.source_block]) != gen:
            return False
        row, dest = source.blocks[pull.source_block], self.memory.blocks[pull.dest]
        dest[:] = row
        if is_torn:
            prefill = link.prefill
            is_same_life = prefill.incarnation == link.prefill_incarnation
            if is_same_life and prefill.frozen_until <= self.world.now:
                self.world.stats["copies with the owner at work"] += 1
                prefill.press(1 + self.world.rng.randrange(12))
                prefill.check()
                dest[_BLOCK // 2 :] = row[_BLOCK // 2 :]
        return int(source.gens[pull.source_block]) == gen

    def _judge(self, machine: ReceiverTransfer, index: int, dest: BlockId) -> str | None:
        row, announced = self.memory.blocks[dest], machine.digests_of(index)
        if index == machine.num_blocks:
            found = tail_digest(LAYOUT, row, machine.tail_valid)
            return None if found == int(announced[0]) else "digest"
        if not (block_digests(LAYOUT, row) == announced).all():
            return "digest"
        self.memory.digests[dest] = announced
        return None

    def _on_verdict(self, receive: Receive, index: int, wrong: str | None) -> None:
        self.world.stats["blocks moved" if wrong is None else f"refused for its {wrong}"] += 1
        machine = receive.machine
        self._apply(receive, machine.on_block(index, wrong is None, self.world.now, wrong or ""))

    def _grant(self) -> None:
        used: dict[Hashable, int] = {}
        for receive in self.receives.values():
            size = used.get(receive.target, 0) + receive.machine.outstanding_bytes
            used[receive.target] = size
        credit = CreditRound(
            block_bytes=_BLOCK,
            window_bytes=4 * _BLOCK,
            budget_bytes=8 * _BLOCK,
            chunk_bytes=2 * _BLOCK,
            used=used,
        )
        for receive in list(self._hungry):
            wanted = receive.machine.credit_wanted()
            if not wanted:
                del self._hungry[receive]
                continue
            size = credit.grant(receive.target, wanted)
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
