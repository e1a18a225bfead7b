"""A prefill worker of the transfer simulator: real pool, real sender machines, scripted engine."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from services.chaos.sim_forgery import FINGERPRINT, local_end
from services.chaos.sim_network import Frames, Link, Network, PrefillEnd
from services.chaos.sim_world import PLAIN, Family, Violation, World, reference
from services.common.errors import BlocksExhausted
from services.common.ids import BlockHash, BlockId
from services.kv.block_copy import write_block
from services.kv.digest import block_digests, tail_digest
from services.kv.layout import KvLayout
from services.pb import transfer_pb2 as pb
from services.transfer import codec
from services.transfer import sender as tx
from services.transfer.announce import OFF, AnnouncePlan, CostMeter
from services.transfer.api import FinalInfo, FirstTokenInfo
from services.transfer.api import Offer as OfferArgs
from services.transfer.handshake import answer_hello
from services.transfer.offered import Offered, SendAction
from services.transfer.pairing import AS_STORED, Unservable, requested
from services.transfer.sender import SenderState, SenderTransfer
from services.transfer.ticket import Ticket, TicketError, TicketSigner, read_unverified
from services.transfer.values import FinalBlocks, Peer, RejectCode
from services.transfer.wire import Message, MessageType, WireError, decode

LEASE_S = 2.0
TICKET_TTL_S = 5.0
_BLOCK_SIZE = PLAIN.block_size
_MAX_FLIGHTS = 3
_SINGLE_SHOT = AnnouncePlan(True, "costs_more")
_LEASE_SLACK_S = 1.0
_PREFILL_DEADLINE_S = 10.0
_MAX_RETRY_S = 1.0
_ENDED = (SenderState.ABORTING, SenderState.CLOSED)
_ANSWERS = {MessageType.DONE: MessageType.CLOSED, MessageType.ABORT: MessageType.ABORTED}


@dataclass(eq=False, slots=True)
class Prompt:
    """What a client asked for; computed by one prefill worker, or by all shards of one."""

    number: int
    family: Family
    num_tokens: int
    is_slow: bool
    is_at_once: bool  # lent when all is computed, as a migration lends it
    attempt: int = 0
    is_cancelled: bool = False
    requests: list[Request] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Full blocks of the prompt."""
        return self.num_tokens // _BLOCK_SIZE

    @property
    def tail_valid(self) -> int:
        """Tokens of the partial last block."""
        return self.num_tokens % _BLOCK_SIZE

    def name_of(self, index: int) -> BlockHash:
        """Name the content of a block; the tail comes after the full ones."""
        if index < self.num_blocks:
            return self.family.hashes[index]
        return self.family.tail_name(self.num_tokens)


@dataclass(eq=False, slots=True)
class Request:
    """One prompt at one prefill worker; one transfer."""

    prompt: Prompt
    num_receives: int = 0  # now open
    outcome: str = ""


@dataclass(eq=False, slots=True)
class Offer:
    """What the source keeps of one transfer."""

    request: Request
    wire: Offered
    touched_at: float
    held: list[BlockId] = field(default_factory=list)
    num_flights: int = 0
    armed_at: float = float("inf")
    is_unpinning: bool = False
    outcome: str = ""

    @property
    def machine(self) -> SenderTransfer:
        """Its session."""
        return self.wire.machine

    @property
    def xfer_id(self) -> int:
        """What messages call it."""
        return self.wire.machine.xfer_id


@dataclass(eq=False, slots=True)
class Job:
    """A prompt being computed; the engine holds `table` and `tail` until it is done."""

    request: Request
    prompt: Prompt
    deadline: float
    table: list[BlockId] = field(default_factory=list)
    tail: BlockId | None = None
    offer: Offer | None = None
    retry_s: float = 0.1  # while there is no memory
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

    def __init__(self, world: World, index: int, network: Network, router: PrefillListener) -> None:
        self._network = network
        self._router = router
        self._host = f"host {index}"
        layout = world.shape.prefill[index]
        self._policy = tx.SenderPolicy(
            block_bytes=layout.block_bytes,
            ticket_ttl_s=TICKET_TTL_S,
            lease_s=LEASE_S,
            tombstone_s=5.0,
            data_message_bytes=2 * layout.block_bytes,
            max_nacks=2,
        )
        super().__init__(world, f"p{index}", 40 + index, layout)

    def boot(self) -> None:
        """Begin a life with an own key and no transfers."""
        super().boot()
        self._signer = TicketSigner(self.world.rng.randbytes(32))
        self.offers: dict[int, Offer] = {}
        self.links: dict[bytes, Link] = {}
        self._planes: dict[bytes, str] = {}  # agreed with each life of a decode worker
        self._local = local_end(
            self.name,
            self.incarnation,
            host=self._host,
            layout=self.layout,
            planes=self.world.shape.planes,
            uds_path=f"/sim/{self.name}",
            num_blocks=self.num_blocks,
        )
        self._jobs: dict[Request, Job] = {}
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
        job = Job(request, request.prompt, self.world.now + _PREFILL_DEADLINE_S)
        self._jobs[request] = job
        self._match(job)
        self._chunk(job)

    def cancel(self, prompt: Prompt) -> None:
        """The client left."""
        for request in prompt.requests:
            job = self._jobs.get(request)
            if job is not None:
                self._end_job(job)
                if job.offer is None:
                    self._router.on_prefill_over(request, "cancelled before its ticket")
        for offer in self.offers.values():
            if offer.request.prompt is prompt:
                self._apply(offer, offer.machine.cancel("client left", self.world.now))

    def _match(self, job: Job) -> None:
        matched = self.pool.cache.match(job.prompt.family.hashes[: job.prompt.num_blocks])
        self.hold(matched)
        job.table = list(matched)

    def _chunk(self, job: Job) -> None:
        if job.is_over:
            return
        rng, prompt = self.world.rng, job.prompt
        if job.offer is not None and job.table and rng.random() < 0.02:
            self._preempt(job)
            return
        lo = len(job.table)
        hi = min(lo + rng.randrange(1, 4), prompt.num_blocks)
        is_last = hi == prompt.num_blocks
        needs_tail = is_last and prompt.tail_valid > 0
        try:
            fresh = list(self.allocate(hi - lo + needs_tail, job.table[-1] if job.table else None))
        except BlocksExhausted:
            self._wait_for_blocks(job)
            return
        job.tail = fresh.pop() if needs_tail else None
        for index, block in enumerate(fresh, lo):
            job.table.append(self._compute(prompt, index, block))
        if is_last or not prompt.is_at_once:
            self._announce(job)
        if is_last:
            self._finish(job)
        else:
            self.at(rng.uniform(0.1, 1.5) if prompt.is_slow else rng.random() * 0.01,
                    self._chunk, job)  # fmt: skip

    def _wait_for_blocks(self, job: Job) -> None:
        self.unpin_all()
        if self.world.now < job.deadline:
            self.at(job.retry_s, self._chunk, job)
            job.retry_s = min(2.0 * job.retry_s, _MAX_RETRY_S)
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
            is_lent = not offer.outcome and offer.request not in self._jobs
            if is_lent and not offer.is_unpinning:
                offer.is_unpinning = True  # asked once is enough
                self._apply(offer, [*offer.machine.unpin(), *offer.machine.ask_back()])

    def _compute(self, prompt: Prompt, index: int, block: BlockId) -> BlockId:
        self._write(prompt, index, block)
        self.memory.digests[block] = block_digests(self.layout, self.content(block))
        hashes = prompt.family.hashes
        return self.seal(block, hashes[index], hashes[index - 1] if index else None)

    def _write(self, prompt: Prompt, index: int, block: BlockId) -> None:
        content = reference(prompt.name_of(index), self.turns)
        write_block(self.memory, block, np.frombuffer(content, np.uint8))

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
        if machine.state in _ENDED:
            return
        lo = len(machine.block_ids)
        fresh = job.table[lo:]
        if not fresh:
            return
        self.hold(fresh)
        offer.held += fresh
        index = np.array(fresh, dtype=np.int64)
        offer.wire.note_sealed(lo, self.memory.gens[index], self.memory.digests[index])
        self._apply(offer, machine.on_sealed(lo, fresh))

    def _finish(self, job: Job) -> None:
        prompt, offer, tail = job.prompt, job.offer, job.tail
        assert offer is not None, "an offer is made with the first chunk"
        gen = digest = 0
        if tail is not None:
            self._write(prompt, prompt.num_blocks, tail)
            self.pool.freeze(tail)
            gen = self.pool.gen(tail)
            digest = tail_digest(self.layout, self.content(tail), prompt.tail_valid)
        if offer.machine.state not in _ENDED:
            if tail is not None:
                self.hold([tail])
                offer.held.append(tail)
            first = (FirstTokenInfo(0, prompt.number),)
            info = FinalInfo(first, prompt.num_tokens, tail, prompt.tail_valid, 1)
            final = FinalBlocks(info, gen, digest)
            self._apply(offer, offer.machine.on_prefill_finished(final))
        if tail is not None and self.world.happens(self.world.odds.goes_on):
            self._go_on(tail, prompt.tail_valid)
        self._end_job(job)

    def _go_on(self, tail: BlockId, num_rows: int) -> None:
        """Decode here too: the next rows go into a copy, for the frozen tail is on its way."""
        if not self.pool.num_available:
            return
        self.world.stats["went on beside a transfer"] += 1
        block = self._copy_on_write(tail)
        content = self.content(block).copy()
        content.reshape(len(self.turns), _BLOCK_SIZE, -1)[:, num_rows:] = 0xEE
        write_block(self.memory, block, content)
        self.at(self.world.rng.random() * 0.1, self.drop, (block,))

    def _copy_on_write(self, tail: BlockId) -> BlockId:
        (copy,) = self.allocate(1)
        write_block(self.memory, copy, self.content(tail))
        return copy

    def _stop_job(self, offer: Offer) -> None:
        """Compute no further for a transfer that is over."""
        job = self._jobs.get(offer.request)
        if job is not None:
            self._end_job(job)

    def _end_job(self, job: Job) -> None:
        job.is_over = True
        del self._jobs[job.request]
        self.drop(job.table if job.tail is None else [*job.table, job.tail])

    # ---- the source ---------------------------------------------------------------------------

    def _offer(self, request: Request) -> Offer:
        xfer_id, now, prompt = self._next_xfer, self.world.now, request.prompt
        self._next_xfer += 1
        hashes = prompt.family.hashes[: prompt.num_blocks]
        args = OfferArgs(f"{prompt.number}", f"{prompt.number}", prompt.num_tokens, hashes, "")
        machine = SenderTransfer(
            xfer_id,
            prompt.num_blocks,
            prompt.tail_valid > 0,
            self._policy,
            now,
            lambda _plane, _pending: _SINGLE_SHOT if xfer_id % 3 == 0 else OFF,
        )
        offer = Offer(request, Offered.make(args, machine, self.memory, CostMeter()), now)
        self.offers[xfer_id] = offer
        ticket = Ticket(
            xfer_id=xfer_id,
            worker_id=self.name,
            zmq_endpoint=f"sim://{self.name}",
            uds_path="",
            incarnation=self.incarnation,
            kv_identity_fp=FINGERPRINT,
            num_tokens=prompt.num_tokens,
            block_hashes=hashes,
            tenant="",
            expires_unix_ms=self.world.wall_ms + round(TICKET_TTL_S * 1000),
            request_id=str(prompt.number),
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
        # A process that stood still ends its leases when it goes on.
        due = max(offer.touched_at + LEASE_S, self.frozen_until) + _LEASE_SLACK_S
        if self.world.now > due:
            raise Violation(
                f"{self.name}: transfer {offer.xfer_id} holds its blocks "
                f"{self.world.now - offer.touched_at:.2f} s after the last sign of life"
            )
        self.at(due - self.world.now + 1e-6, self._check_lease, offer)

    def on_frames(self, link: Link, frames: Frames) -> None:
        """Take a message off the wire, as the source's thread does."""
        try:
            self._handle(link, decode((frames.head, frames.body)))
        except WireError as error:
            self.world.stats[f"bad frame: {error.reason}"] += 1

    def _handle(self, link: Link, message: Message) -> None:
        header, peer = message.header, link.peer
        if peer.base[-8:] != header.incarnation.to_bytes(8, "little"):
            raise WireError("incarnation")
        if header.type is MessageType.HELLO:
            self._on_hello(link, message)
        elif header.type is MessageType.RENEW:
            self._on_renew(link, message)
        elif header.type is MessageType.OPEN:
            self._on_open(peer, message)
        else:
            self._on_session_message(peer, message)

    def _on_hello(self, link: Link, message: Message) -> None:
        answer = answer_hello(self._local, message.body)
        self.links[link.peer.route] = link
        if answer.plane is not None:
            self._planes[link.peer.base] = answer.plane
        self._send(link.peer, answer.type, answer.body)

    def _on_session_message(self, peer: Peer, message: Message) -> None:
        header = message.header
        offer = self.offers.get(header.xfer_id)
        if offer is None:
            answer = _ANSWERS.get(header.type)
            if answer is not None:
                self._send(peer, answer, b"", header.xfer_id, header.attempt)
            return
        if header.type is MessageType.PULLED:
            offer.touched_at = self.world.now
        machine = offer.machine
        owner = machine.owner
        is_stale = owner is None or owner.base != peer.base or header.attempt != machine.attempt
        before = (machine.state, owner, machine.attempt, machine.num_nacks, offer.outcome)
        self._apply(offer, offer.wire.event(peer, message, self.world.now))
        after = (machine.state, machine.owner, machine.attempt, machine.num_nacks, offer.outcome)
        if is_stale:
            self.world.stats["stale frames"] += 1
            if before != after:
                raise Violation(f"{self.name}: a frame of another attempt or life had an effect")

    def _on_renew(self, link: Link, message: Message) -> None:
        now, base = self.world.now, link.peer.base
        known: list[int] = []
        for xfer_id in codec.parse(pb.Renew, message.body).xfer_ids:
            offer = self.offers.get(xfer_id)
            if offer is not None and offer.machine.on_renew(base, now):
                offer.touched_at = now
                self._arm(offer)
                known.append(xfer_id)
        self._network.renewed(link, pb.Renewed(xfer_ids=known).SerializeToString())

    def _on_open(self, peer: Peer, message: Message) -> None:
        header = message.header
        request = codec.parse(pb.Open, message.body)
        offer, refusal = self._find_offer(peer, header.xfer_id, request.signed_ticket)
        if offer is None:
            body = codec.reject_body(refusal, 0.0, "no such transfer")
            self._send(peer, MessageType.REJECT, body, header.xfer_id, header.attempt)
            return
        machine, attempt = offer.machine, offer.machine.attempt
        try:
            args = codec.open_args(request, machine.num_blocks, self._wire_of(request))
        except Unservable as error:
            body = codec.reject_body(RejectCode.LAYOUT, 0.0, str(error))
            self._send(peer, MessageType.REJECT, body, header.xfer_id, header.attempt)
            return
        if args.attempt != header.attempt:
            raise WireError("attempt")
        if args.plane != "zmq" and self._planes[peer.base] != args.plane:
            raise Violation(f"{self.name}: an OPEN names a plane that was not agreed")
        offer.touched_at = self.world.now
        self._apply(offer, machine.on_open(peer, args, self.world.now))
        if machine.attempt < attempt:
            raise Violation(f"{self.name}: a lower attempt was obeyed")

    def _wire_of(self, request: pb.Open) -> KvLayout | None:
        layers = (request.layer_lo, request.layer_hi)
        heads = (request.head_lo, request.head_hi)
        return requested(self.layout, layers, heads, request.wire_dtype, AS_STORED)

    def _find_offer(
        self, peer: Peer, xfer_id: int, signed: bytes
    ) -> tuple[Offer | None, RejectCode]:
        if peer.base not in self._planes:
            return None, RejectCode.AUTH
        try:
            if read_unverified(signed).incarnation != self.incarnation:
                return None, RejectCode.UNKNOWN
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
            elif isinstance(action, SendAction):
                for kind, body in offer.wire.messages(action):
                    self._send(action.peer, kind, body, offer.xfer_id, action.attempt)
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

    def _send(
        self, peer: Peer, kind: MessageType, body: bytes, xfer_id: int = 0, attempt: int = 0
    ) -> None:
        link = self.links[peer.route]
        if not link.is_up:
            self.at(0.0, self.peer_lost, peer.base)  # the socket says that nobody is there
            return
        self._network.to_decode(link, kind, body, xfer_id, attempt)

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
        for index, block in zip(out.indexes, out.block_ids, strict=True):
            name = offer.request.prompt.name_of(index)
            if self.content(block).tobytes() != reference(name, self.turns):
                raise Violation(f"{self.name}: a block under transfer was written")
        frames, digests = offer.wire.frames(out)
        payload = [frame.tobytes() for frame in frames]
        body = codec.data_body(() if out.is_tail else out.indexes, out.is_tail, digests)
        offer.num_flights -= 1
        self._num_flights[out.peer.base] -= 1
        link = self.links[out.peer.route]
        self._apply(offer, offer.machine.on_data_left(self.world.now))
        if link.is_up:
            self._network.to_decode(
                link, MessageType.DATA, body, offer.xfer_id, out.attempt, payload
            )

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
