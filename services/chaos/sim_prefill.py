"""A prefill worker of the transfer simulator: real pool, real sender machines, scripted engine."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from services.chaos.sim_network import Link, Network, PrefillEnd
from services.chaos.sim_world import LAYOUT, Family, Violation, World, reference
from services.common.errors import BlocksExhausted
from services.common.ids import BlockId
from services.kv.digest import block_digests, tail_digest
from services.transfer import receiver as rx
from services.transfer import sender as tx
from services.transfer.api import FinalInfo, FirstTokenInfo
from services.transfer.sender import SenderState, SenderTransfer
from services.transfer.ticket import Ticket, TicketError, TicketSigner, read_unverified
from services.transfer.values import (
    FinalArgs,
    FinalBlocks,
    OpenArgs,
    Peer,
    ReadyArgs,
    RejectCode,
    U64Array,
)

LEASE_S = 2.0
TICKET_TTL_S = 5.0
POLICY = tx.SenderPolicy(
    block_bytes=LAYOUT.block_bytes,
    ticket_ttl_s=TICKET_TTL_S,
    lease_s=LEASE_S,
    tombstone_s=5.0,
    data_message_bytes=2 * LAYOUT.block_bytes,
    max_nacks=2,
)
_MAX_FLIGHTS = 3
_LEASE_SLACK_S = 1.0
_PREFILL_DEADLINE_S = 10.0
_IDENTITY = "simulated"


_Message = (
    tx.SendOpened
    | tx.SendReject
    | tx.SendReady
    | tx.SendFinal
    | tx.SendAbort
    | tx.SendAborted
    | tx.SendClosed
)


@dataclass(eq=False, slots=True)
class Request:
    """One prompt on its way through two pools; one transfer."""

    number: int
    family: Family
    num_tokens: int
    is_slow: bool
    first_token: int
    attempt: int = 0
    num_receives: int = 0  # now open
    is_cancelled: bool = False
    outcome: str = ""

    @property
    def num_blocks(self) -> int:
        """Full blocks of the prompt."""
        return self.num_tokens // LAYOUT.block_size

    @property
    def tail_valid(self) -> int:
        """Tokens of the partial last block."""
        return self.num_tokens % LAYOUT.block_size


@dataclass(eq=False, slots=True)
class Offer:
    """What the source keeps of one transfer."""

    request: Request
    xfer_id: int
    machine: SenderTransfer
    gens: U64Array
    digests: U64Array
    touched_at: float
    held: list[BlockId] = field(default_factory=list)
    num_flights: int = 0
    armed_at: float = float("inf")
    is_unpinning: bool = False
    outcome: str = ""


@dataclass(eq=False, slots=True)
class Job:
    """A prompt being computed; the engine holds `table` and `tail` until it is done."""

    request: Request
    deadline: float
    table: list[BlockId] = field(default_factory=list)
    tail: BlockId | None = None
    offer: Offer | None = None
    is_over: bool = False


class PrefillListener(Protocol):
    """Who sends prompts here."""

    def on_ticket(self, worker: PrefillWorker, offer: Offer, signed: bytes) -> None:
        """KV can be pulled."""
        ...

    def on_prefill_over(self, request: Request, outcome: str) -> None:
        """No ticket will come, or its blocks were given back."""
        ...


class PrefillWorker(PrefillEnd):
    """Computes prompts chunk by chunk and lends their blocks."""

    def __init__(
        self, world: World, name: str, num_blocks: int, network: Network, router: PrefillListener
    ) -> None:
        self._network = network
        self._router = router
        super().__init__(world, name, num_blocks)

    def boot(self) -> None:
        """Begin a life with an own key and no transfers."""
        super().boot()
        self._signer = TicketSigner(self.world.rng.randbytes(32))
        self.offers: dict[int, Offer] = {}
        self.links: dict[bytes, Link] = {}
        self._jobs: dict[int, Job] = {}
        self._num_flights: dict[bytes, int] = {}
        self._hungry: OrderedDict[Offer, None] = OrderedDict()
        self._next_xfer = 1

    def crash(self) -> None:
        """Take everything along."""
        for job in self._jobs.values():
            if job.offer is None:
                self.world.at(0.0, self._router.on_prefill_over, job.request, "prefill died")
        for offer in self.offers.values():
            if not offer.outcome:
                offer.outcome = "died"
                self.world.at(0.0, self._router.on_prefill_over, offer.request, "prefill died")
        super().crash()

    def check(self) -> None:
        """Send what credit allows, then count."""
        if self._hungry:
            self._pump()
        super().check()

    def check_at_rest(self) -> None:
        """Every transfer is over."""
        super().check_at_rest()
        if self._jobs or any(not offer.outcome for offer in self.offers.values()):
            raise Violation(f"{self.name}: transfers still open at rest")

    # ---- the engine ---------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Take a prompt."""
        job = Job(request, self.world.now + _PREFILL_DEADLINE_S)
        self._jobs[request.number] = job
        self._match(job)
        self._chunk(job)

    def cancel(self, request: Request) -> None:
        """The client left."""
        job = self._jobs.get(request.number)
        if job is not None:
            self._end_job(job)
            if job.offer is None:
                self._router.on_prefill_over(request, "cancelled before its ticket")
        for offer in self.offers.values():
            if offer.request is request:
                self._apply(offer, offer.machine.cancel("client left", self.world.now))

    def _match(self, job: Job) -> None:
        matched = self.pool.cache.match(job.request.family.hashes[: job.request.num_blocks])
        self.hold(matched)
        job.table = list(matched)

    def _chunk(self, job: Job) -> None:
        if job.is_over:
            return
        rng, request = self.world.rng, job.request
        if job.offer is not None and job.table and rng.random() < 0.02:
            self._preempt(job)
            return
        lo = len(job.table)
        hi = min(lo + rng.randrange(1, 4), request.num_blocks)
        is_last = hi == request.num_blocks
        needs_tail = is_last and request.tail_valid > 0
        try:
            fresh = list(self.allocate(hi - lo + needs_tail, job.table[-1] if job.table else None))
        except BlocksExhausted:
            self._wait_for_blocks(job)
            return
        job.tail = fresh.pop() if needs_tail else None
        for index, block in enumerate(fresh, lo):
            job.table.append(self._compute(request, index, block))
        self._announce(job)
        if is_last:
            self._finish(job)
        else:
            self.at(rng.uniform(0.1, 1.5) if request.is_slow else rng.random() * 0.01,
                    self._chunk, job)  # fmt: skip

    def _wait_for_blocks(self, job: Job) -> None:
        self.unpin_all()
        if self.world.now < job.deadline:
            self.at(0.1, self._chunk, job)
            return
        self._end_job(job)
        if job.offer is None:
            self._router.on_prefill_over(job.request, "no memory for the prompt")
        else:
            machine = job.offer.machine
            self._apply(job.offer, machine.cancel("no memory", self.world.now))

    def unpin_all(self) -> None:
        """Memory is short: have blocks back as soon as they are pulled."""
        for offer in self.offers.values():
            is_lent = not offer.outcome and offer.request.number not in self._jobs
            if is_lent and not offer.is_unpinning:
                offer.is_unpinning = True  # asked once is enough
                self._apply(offer, offer.machine.unpin())

    def _compute(self, request: Request, index: int, block: BlockId) -> BlockId:
        name = request.family.hashes[index]
        row = self.memory.blocks[block]
        row[:] = np.frombuffer(reference(name), np.uint8)
        self.memory.digests[block] = block_digests(LAYOUT, row)
        return self.seal(block, name, request.family.hashes[index - 1] if index else None)

    def _preempt(self, job: Job) -> None:
        """Take the engine's blocks away; those under transfer stay, for the transfer holds them."""
        self.world.stats["preemptions"] += 1
        self.drop(job.table)
        job.table = []
        self.at(0.02, self._resume, job)

    def _resume(self, job: Job) -> None:
        if job.is_over:
            return
        self._match(job)
        assert job.offer is not None, "only offered jobs are preempted"
        machine = job.offer.machine
        is_open = machine.state not in (SenderState.ABORTING, SenderState.CLOSED)
        if is_open and job.table[: len(machine.block_ids)] != machine.block_ids:
            raise Violation(f"{self.name}: blocks under transfer were evicted by a preemption")
        self._chunk(job)

    def _announce(self, job: Job) -> None:
        if job.offer is None:
            job.offer = self._offer(job.request)
        offer, machine = job.offer, job.offer.machine
        if machine.state in (SenderState.ABORTING, SenderState.CLOSED):
            return
        lo = len(machine.block_ids)
        fresh = job.table[lo:]
        if not fresh:
            return
        self.hold(fresh)
        offer.held += fresh
        index = np.array(fresh, dtype=np.int64)
        offer.gens[lo : lo + len(fresh)] = self.memory.gens[index]
        offer.digests[lo : lo + len(fresh)] = self.memory.digests[index]
        self._apply(offer, machine.on_sealed(lo, fresh))

    def _finish(self, job: Job) -> None:
        request, offer = job.request, job.offer
        assert offer is not None, "an offer is made with the first chunk"
        gen = digest = 0
        if job.tail is not None:
            row = self.memory.blocks[job.tail]
            name = request.family.tail_name(request.num_tokens)
            row[:] = np.frombuffer(reference(name), np.uint8)
            self.pool.freeze(job.tail)
            gen = self.pool.gen(job.tail)
            digest = tail_digest(LAYOUT, row, request.tail_valid)
        if offer.machine.state not in (SenderState.ABORTING, SenderState.CLOSED):
            if job.tail is not None:
                self.hold([job.tail])
                offer.held.append(job.tail)
            info = FinalInfo(
                (FirstTokenInfo(0, request.first_token),),
                request.num_tokens,
                job.tail,
                request.tail_valid,
                1,
            )
            final = FinalBlocks(info, gen, digest)
            self._apply(offer, offer.machine.on_prefill_finished(final))
        self._end_job(job)

    def _stop_job(self, offer: Offer) -> None:
        """Compute no further for a transfer that is over."""
        job = self._jobs.get(offer.request.number)
        if job is not None:
            self._end_job(job)

    def _end_job(self, job: Job) -> None:
        job.is_over = True
        del self._jobs[job.request.number]
        self.drop(job.table if job.tail is None else [*job.table, job.tail])

    # ---- the source ---------------------------------------------------------------------------

    def _offer(self, request: Request) -> Offer:
        xfer_id, now = self._next_xfer, self.world.now
        self._next_xfer += 1
        has_tail = request.tail_valid > 0
        machine = SenderTransfer(xfer_id, request.num_blocks, has_tail, POLICY, now)
        gens = np.zeros(request.num_blocks, np.uint64)
        digests = np.zeros((request.num_blocks, LAYOUT.digests_per_block), np.uint64)
        offer = Offer(request, xfer_id, machine, gens, digests, now)
        self.offers[xfer_id] = offer
        ticket = Ticket(
            xfer_id=xfer_id,
            worker_id=self.name,
            zmq_endpoint=f"sim://{self.name}",
            uds_path="",
            incarnation=self.incarnation,
            kv_identity_fp=_IDENTITY,
            num_tokens=request.num_tokens,
            block_hashes=request.family.hashes[: request.num_blocks],
            tenant="",
            expires_unix_ms=self.world.wall_ms + round(TICKET_TTL_S * 1000),
            request_id=str(request.number),
        )
        signed = self._signer.issue(ticket)
        self.at(TICKET_TTL_S + _LEASE_SLACK_S, self._check_lease, offer)
        self.world.at(0.0005, self._router.on_ticket, self, offer, signed)
        self._arm(offer)
        return offer

    def _check_lease(self, offer: Offer) -> None:
        """Whatever happened, blocks are back a lease and a second after the last sign of life."""
        if offer.outcome:
            return
        due = offer.touched_at + LEASE_S + _LEASE_SLACK_S
        if self.world.now > due:
            raise Violation(
                f"{self.name}: transfer {offer.xfer_id} holds its blocks "
                f"{self.world.now - offer.touched_at:.2f} s after the last sign of life"
            )
        self.at(due - self.world.now + 1e-6, self._check_lease, offer)

    def on_message(
        self,
        link: Link,
        action: rx.ReceiverAction,
        xfer_id: int,
        attempt: int,
        signed: bytes,
    ) -> None:
        """Take a message of a decode worker."""
        if isinstance(action, rx.SendOpen):
            self._on_open(link, action, xfer_id, attempt, signed)
            return
        offer = self.offers.get(xfer_id)
        if offer is None:
            if isinstance(action, rx.SendDone | rx.SendAbort):
                answer = "closed" if isinstance(action, rx.SendDone) else "aborted"
                self._send(link.peer, answer, None, xfer_id, attempt)
            return
        machine = offer.machine
        owner = machine.owner
        is_stale = owner is None or owner.base != link.peer.base or attempt != machine.attempt
        before = (machine.state, owner, machine.attempt, machine.num_nacks, offer.outcome)
        self._apply(offer, self._event(offer, link.peer, action, attempt))
        after = (machine.state, machine.owner, machine.attempt, machine.num_nacks, offer.outcome)
        if is_stale:
            self.world.stats["stale frames"] += 1
            if before != after:
                raise Violation(f"{self.name}: a frame of another attempt or life had an effect")

    def _event(
        self, offer: Offer, peer: Peer, action: rx.ReceiverAction, attempt: int
    ) -> list[tx.SenderAction]:
        machine, now = offer.machine, self.world.now
        if isinstance(action, rx.SendCredit):
            return machine.on_credit(peer, attempt, action.total_bytes)
        if isinstance(action, rx.SendNack):
            return machine.on_nack(peer, attempt, action.indexes, action.tail, now)
        if isinstance(action, rx.SendDone):
            return machine.on_done(peer, attempt, action.size_bytes, now)
        if isinstance(action, rx.SendAbort):
            return machine.on_abort(peer, attempt, action.reason, now)
        if isinstance(action, rx.SendAborted):
            return machine.on_aborted(peer, attempt, now)
        raise TypeError(f"the simulator does not carry {type(action).__name__}")

    def on_pulled(self, link: Link, xfer_id: int, attempt: int, lo: int, hi: int) -> None:
        """Note a reader's progress."""
        offer = self.offers.get(xfer_id)
        if offer is not None:
            offer.touched_at = self.world.now
            self._apply(offer, offer.machine.on_pulled(link.peer, attempt, lo, hi, self.world.now))

    def on_renew(self, link: Link, xfer_ids: tuple[int, ...]) -> None:
        """Renew leases and say which are known."""
        now, base = self.world.now, link.peer.base
        known: list[int] = []
        for xfer_id in xfer_ids:
            offer = self.offers.get(xfer_id)
            if offer is not None and offer.machine.on_renew(base, now):
                offer.touched_at = now
                self._arm(offer)
                known.append(xfer_id)
        self._network.renewed(link, xfer_ids, tuple(known))

    def _on_open(
        self, link: Link, action: rx.SendOpen, xfer_id: int, attempt: int, signed: bytes
    ) -> None:
        offer, refusal = self._find_offer(xfer_id, signed)
        if offer is None:
            value = tx.SendReject(link.peer, attempt, refusal, 0.0, "no such transfer")
            self._send(link.peer, "reject", value, xfer_id, attempt)
            return
        offer.touched_at = self.world.now
        args = OpenArgs(attempt, action.have, link.plane)
        self._apply(offer, offer.machine.on_open(link.peer, args, self.world.now))

    def _find_offer(self, xfer_id: int, signed: bytes) -> tuple[Offer | None, RejectCode]:
        if read_unverified(signed).incarnation != self.incarnation:
            return None, RejectCode.UNKNOWN
        try:
            ticket = self._signer.verify(signed)
        except TicketError:
            return None, RejectCode.AUTH
        if ticket.xfer_id != xfer_id:
            return None, RejectCode.AUTH
        return self.offers.get(xfer_id), RejectCode.UNKNOWN

    def peer_lost(self, base: bytes) -> None:
        """A connection of a decode worker broke."""
        for offer in list(self.offers.values()):
            if not offer.outcome:
                self._apply(offer, offer.machine.on_peer_lost(base, self.world.now))

    # ---- actions ------------------------------------------------------------------------------

    def _apply(self, offer: Offer, actions: list[tx.SenderAction]) -> None:
        for action in actions:
            if isinstance(action, tx.Release):
                self._release(offer, action)
            elif isinstance(action, tx.DataReady):
                if offer.machine.plane == "zmq":
                    self._hungry[offer] = None
            elif isinstance(action, tx.Unpin):
                self._unpin(offer, frozenset(action.block_ids))
            elif isinstance(action, _Message):
                kind, value = self._message(offer, action)
                self._send(action.peer, kind, value, offer.xfer_id, action.attempt)
            else:
                raise TypeError(f"the simulator does not carry {type(action).__name__}")
        offer.machine.check_integrity()
        if offer.xfer_id in self.offers:
            self._arm(offer)

    def _release(self, offer: Offer, action: tx.Release) -> None:
        if offer.outcome:
            raise Violation(f"{self.name}: transfer {offer.xfer_id} was released twice")
        if offer.num_flights:
            raise Violation(f"{self.name}: transfer {offer.xfer_id} released while it is read")
        offer.outcome = action.outcome
        self.world.note(self.name, f"xfer {offer.xfer_id} released {action.outcome}")
        self.world.stats[f"source {action.outcome}"] += 1
        self.drop(offer.held)
        self._hungry.pop(offer, None)
        self.at(0.0005, self._stop_job, offer)
        self.world.at(0.0, self._router.on_prefill_over, offer.request, action.outcome)

    def _unpin(self, offer: Offer, pulled: frozenset[BlockId]) -> None:
        """Give back what was pulled; as in the engine, no cached block outlives its parent."""
        dropped: list[BlockId] = []
        for block in reversed(offer.held[: offer.machine.num_blocks]):
            if block in pulled:
                dropped.append(block)
            elif not self._lets_go_of_parents(block):
                break
        offer.held = [block for block in offer.held if block not in dropped]
        self.drop(dropped[::-1])
        self.world.stats["unpinned"] += len(dropped)

    def _lets_go_of_parents(self, block: BlockId) -> bool:
        pool = self.pool
        # One who shares it may give it back, or build on it: it must stay, and so must its parents.
        return not pool.is_cached(block) or (pool.num_refs(block) == 1 and pool.uncache(block))

    def _message(self, offer: Offer, action: _Message) -> tuple[str, object]:
        if isinstance(action, tx.SendReady):
            lo, hi = action.lo, action.hi
            blocks = np.array(offer.machine.block_ids[lo:hi], np.uint32)
            return "ready", ReadyArgs(lo, offer.gens[lo:hi], offer.digests[lo:hi], blocks)
        if isinstance(action, tx.SendFinal):
            return "final", _final_args(offer)
        if isinstance(action, tx.SendAbort):
            return "abort", action.reason
        return _NAMES[type(action)], action

    def _send(self, peer: Peer, kind: str, value: object, xfer_id: int, attempt: int) -> None:
        link = self.links[peer.route]
        if not link.is_up:
            self.at(0.0, self.peer_lost, peer.base)  # the socket says that nobody is there
            return
        self._network.to_decode(link, None, kind, value, xfer_id, attempt)

    # ---- data, time ---------------------------------------------------------------------------

    def _pump(self) -> None:
        for offer in list(self._hungry):
            machine = offer.machine
            while machine.owner is not None:
                if self._num_flights.get(machine.owner.base, 0) >= _MAX_FLIGHTS:
                    break
                out = machine.take_data()
                if out is None:
                    self._hungry.pop(offer, None)
                    break
                self._fly(offer, out)

    def _fly(self, offer: Offer, out: tx.DataOut) -> None:
        base = out.peer.base
        offer.num_flights += 1
        self._num_flights[base] = self._num_flights.get(base, 0) + 1
        is_stuck = self.world.happens(self.world.odds.delay)
        self.at(0.3 if is_stuck else 0.0002, self._leave, offer, out)

    def _leave(self, offer: Offer, out: tx.DataOut) -> None:
        """The socket has read the blocks: only now is the message independent of the pool."""
        payload = [self.memory.blocks[block].tobytes() for block in out.block_ids]
        for index, data in zip(out.indexes, payload, strict=True):
            if data != _reference(offer.request, index):
                raise Violation(f"{self.name}: a block under transfer was written")
        offer.num_flights -= 1
        self._num_flights[out.peer.base] -= 1
        link = self.links[out.peer.route]
        self._apply(offer, offer.machine.on_data_left(self.world.now))
        if link.is_up:
            self._network.to_decode(link, payload, "data", out, offer.xfer_id, out.attempt)

    def _arm(self, offer: Offer) -> None:
        due = offer.machine.next_deadline()
        if due < offer.armed_at:
            offer.armed_at = due
            self.at(max(0.0, due - self.world.now), self._on_time, offer, due)

    def _on_time(self, offer: Offer, due: float) -> None:
        if offer.armed_at != due:
            return  # an earlier timer took its place
        offer.armed_at = float("inf")
        if offer.machine.is_forgotten(self.world.now):
            del self.offers[offer.xfer_id]
        elif self.world.now >= offer.machine.next_deadline():
            self._apply(offer, offer.machine.on_time(self.world.now))
        else:
            self._arm(offer)


_NAMES: dict[type, str] = {
    tx.SendOpened: "opened",
    tx.SendReject: "reject",
    tx.SendAborted: "aborted",
    tx.SendClosed: "closed",
}


def _reference(request: Request, index: int) -> bytes:
    if index < request.num_blocks:
        return reference(request.family.hashes[index])
    return reference(request.family.tail_name(request.num_tokens))


def _final_args(offer: Offer) -> FinalArgs:
    final = offer.machine.final
    assert final is not None, "FINAL is sent once there is one"
    return FinalArgs(
        first=final.info.first,
        num_tokens=final.info.num_tokens,
        num_blocks=offer.machine.num_blocks,
        tail_valid_tokens=final.info.tail_valid_tokens,
        tail_source_block=final.info.tail_block or 0,
        tail_gen=final.tail_gen,
        tail_digest=final.tail_digest,
        prefill_us=1,
    )
