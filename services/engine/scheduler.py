"""Decides each step: who is computed, who is let in, who gives way, and what results mean. Pure.

One step: `schedule(now)` gives a plan, the runner executes it, `apply(result, now)` takes the
outcome. Commands (submit, cancel, received, ...) come between steps. All of them put events in
an outbox that `take_events` empties.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from services.common.errors import BlocksExhausted
from services.common.ids import BlockHash, BlockId
from services.engine.admission import AdmissionQueue, check_request
from services.engine.api import (
    AttachReleased,
    BlocksReserved,
    BlocksSealed,
    CancelReceive,
    CancelSource,
    ChoiceDone,
    EndReason,
    EngineEvent,
    EngineLoad,
    EngineRequest,
    FirstToken,
    MigrateRefused,
    OfferReady,
    PrefillFinished,
    ReceiveWanted,
    Refused,
    RequestKey,
    TokensOut,
    UnpinWanted,
    WorkKind,
)
from services.engine.attachment import AttachedChanged, num_to_move, will_move
from services.engine.config import EngineConfig, check_role_weights
from services.engine.plan import (
    AttachedRow,
    PlanRow,
    RowResult,
    Sampled,
    SampleTask,
    StepPlan,
    StepResult,
)
from services.engine.request import Request, RequestState, Sequence, SequenceStatus
from services.engine.residency import BlockContent, Residency
from services.engine.stats import EngineStats
from services.kv.attached import AttachedKv
from services.kv.block_pool import BlockPool
from services.kv.block_table import is_own
from services.kv.form import EXACT, UNKNOWN, cache_key
from services.kv.hashing import HashScope


class Scheduler:
    """All work items of one engine. Blocks move only through here."""

    def __init__(self, config: EngineConfig, pool: BlockPool, content: BlockContent) -> None:
        self.config = config
        self.pool = pool
        self.stats = EngineStats()
        self._blocks = Residency(pool, content, config.block_size, self._on_detached)
        self._queue = AdmissionQueue(config)
        self._requests: dict[RequestKey, Request] = {}
        self._running: dict[Sequence, None] = {}
        self._receiving: dict[Request, None] = {}  # in state RECEIVING
        self._attached: dict[Sequence, None] = {}  # read a peer's pool
        self._changed: set[RequestKey] = set()  # of them, those just found to read other content
        self._deadlines: list[tuple[float, int, RequestKey]] = []
        self._outbox: list[EngineEvent] = []
        self._plan: StepPlan | None = None
        self._num_arrived = 0
        self._step = 0
        self._prefill_weight = config.prefill_weight
        self._decode_weight = config.decode_weight

    # -- what the loop asks ----------------------------------------------------------------

    @property
    def has_events(self) -> bool:
        """Whether `take_events` would return something."""
        return bool(self._outbox)

    def take_events(self) -> tuple[EngineEvent, ...]:
        """Return and forget the events since the last call, in order."""
        events, self._outbox = tuple(self._outbox), []
        return events

    def next_deadline(self) -> float | None:
        """Return when `schedule` must be called even if nothing happens until then."""
        while self._deadlines and self._deadlines[0][2] not in self._requests:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def set_role(self, prefill_weight: float, decode_weight: float) -> None:
        """Change the shares of the step budget."""
        check_role_weights(prefill_weight, decode_weight)
        self._prefill_weight = prefill_weight
        self._decode_weight = decode_weight

    def drop_cache(self) -> tuple[int, int]:
        """Forget prefixes no request uses; return the blocks that became free and those kept."""
        dropped = self.pool.drop_cached()
        return dropped, len(self.pool.cache)

    def load(self) -> EngineLoad:
        """Return the current load."""
        counts = self.pool.counts()
        prefilling = sum(seq.num_pending for seq in self._running if not seq.is_decoding)
        tbt_a, tbt_b = self.stats.decode_line_us()
        return EngineLoad(
            queued_uncached_tokens=self._queue.num_uncached_tokens() + prefilling,
            resident_tokens=self._resident_tokens(),
            blocks_total=counts.total,
            blocks_in_use=counts.in_use,
            blocks_cached=counts.cached,
            blocks_free=counts.free,
            rate_tok_s=self.stats.prefill_tok_s or 0.0,
            tbt_a_us=tbt_a,
            tbt_b_us=tbt_b,
            running=len(self._running),
            waiting=len(self._queue),
            requests_open=len(self._requests),
            steps=self.stats.steps,
            preemptions=self.stats.preemptions,
            blocks_attached=sum(seq.attached.num_left for seq in self._attached if seq.attached),
            attach_moved=self.stats.attach_moved,
            attach_changed=self.stats.attach_changed,
            prefill_tokens=self.stats.prefill_tokens,
            decode_tokens=self.stats.decode_tokens,
            busy_s=self.stats.busy_s,
        )

    # -- commands --------------------------------------------------------------------------

    def submit(self, source: EngineRequest, now: float) -> None:
        """Take a work item, or say why not by Refused. ValueError for a key in use."""
        if source.key in self._requests:
            raise ValueError("a work item with this key is open")
        if len(self._requests) >= self.config.max_open_requests:
            limit = self.config.max_open_requests
            message = f"{limit} work items are open, the most this worker takes"
            self._outbox.append(Refused(source.key, "overloaded", message))
            return
        refusal = check_request(source, self.config, self.pool.num_blocks, now)
        if refusal is not None:
            self._outbox.append(Refused(source.key, refusal.code, refusal.message))
            return
        scope = HashScope(self.config.model_digest, tenant=source.tenant)
        request = Request(source, scope, self._num_arrived, now, self.config.block_size)
        self._num_arrived += 1
        self._requests[source.key] = request
        self._watch_deadline(request)
        if request.state is RequestState.OPENING:
            self._open_ticket(request)
            self._queue.add(request.trunk, now)
            return
        coming = max(len(self._blocks.cached_prefix(request.trunk)), self._shared_ahead(request))
        num_cached = coming * self.config.block_size
        for seq in request.sequences:
            seq.num_uncached_hint = max(seq.num_tokens - num_cached, 1)
            self._queue.add(seq, now)

    def cancel(self, key: RequestKey, reason: str, now: float) -> None:
        """End a work item in whatever state it is; idempotent."""
        request = self._requests.get(key)
        if request is not None:
            self._end(request, EndReason.CANCELLED, "cancelled", reason, now)

    def _shared_ahead(self, request: Request) -> int:
        """Return the most leading blocks a prompt shares with one that is still to be computed.

        Else every prompt behind it would count them too: routers would see a queue many times too
        long, and send what shares the prefix elsewhere.
        """
        hashes = request.trunk.known_hashes()
        pending = [s for s in (*self._queue.prompts(), *self._running) if not s.is_decoding]
        return max((_num_shared(hashes, seq.known_hashes()) for seq in pending), default=0)

    def pause(self, key: RequestKey) -> None:
        """Give a work item no more decode steps; it may still be preempted, and its deadline runs.

        Prompts are still computed: they make at most one token a choice.
        """
        request = self._requests.get(key)
        if request is not None:
            request.is_paused = True

    def resume(self, key: RequestKey) -> None:
        """Go on with a paused work item."""
        request = self._requests.get(key)
        if request is not None:
            request.is_paused = False

    def migrate(self, key: RequestKey, now: float) -> None:
        """Stop a decoding work item and lend its KV, as prefill does; or MigrateRefused."""
        request = self._requests.get(key)
        refusal = _why_it_stays(request)
        if request is None or refusal:
            self._outbox.append(MigrateRefused(key, refusal))
            return
        if not self._move_all(request.trunk, now):
            refusal = "its KV is another worker's and cannot be moved in now"
            self._outbox.append(MigrateRefused(key, refusal))
            return
        self._hand_on(request, now)

    def _hand_on(self, request: Request, now: float) -> None:
        """Stop a request under way and offer all it has to another worker."""
        self._stop_running(request, SequenceStatus.HELD)
        self._lend_all(request)
        done = self._done(request, 0, EndReason.LENGTH, True, now, handed_off=True)
        self._outbox.append(done)
        request.move(RequestState.HANDING_OFF)

    def _lend_all(self, request: Request) -> None:
        """Offer what is computed. The newest token goes along: only its KV is not there yet."""
        trunk, source = request.trunk, request.source
        request.is_offered = request.is_lent = True
        hashes = tuple(trunk.block_hash(idx) for idx in range(trunk.num_sealed))
        offer = OfferReady(
            request.key,
            source.request_id,
            trunk.num_computed,
            hashes,
            source.tenant,
            tuple(trunk.generated),
            is_exact=trunk.kv_form == EXACT,
        )
        sealed = BlocksSealed(request.key, 0, trunk.table.block_ids[: trunk.num_sealed])
        tail, num_valid = self._blocks.freeze_tail(trunk)
        newest = FirstToken(trunk.choice, trunk.generated[-1])
        final = PrefillFinished(request.key, (newest,), trunk.num_computed, tail, num_valid, 0)
        request.num_announced = trunk.num_sealed
        self._outbox += [offer, sealed, final] if hashes else [offer, final]

    def source_released(self, key: RequestKey, now: float) -> None:
        """The sender no longer reads this request's blocks."""
        request = self._requests.get(key)
        if request is None or not request.is_lent:
            return
        request.is_lent = False
        if request.state in (RequestState.HANDING_OFF, RequestState.RELEASING):
            self._forget(request)
        # Else prefill still runs: nobody pulls any more, but the client awaits the first token.

    def source_unpinned(self, key: RequestKey, block_ids: tuple[BlockId, ...]) -> None:
        """The sender no longer reads these blocks; prefill is done, so we do not either."""
        request = self._requests.get(key)
        if request is None:
            return
        if request.state not in (RequestState.HANDING_OFF, RequestState.RELEASING):
            raise RuntimeError(f"blocks unpinned in state {request.state.value}")
        self.stats.unpinned += self._blocks.unpin(request.trunk, frozenset(block_ids))

    def _ask_unpin(self) -> None:
        """Memory is short: have what is handed off give its pulled blocks back early."""
        for request in self._requests.values():
            if request.state is RequestState.HANDING_OFF and not request.is_unpinning:
                request.is_unpinning = True
                self._outbox.append(UnpinWanted(request.key))

    def received(
        self,
        key: RequestKey,
        first: tuple[FirstToken, ...],
        now: float,
        kv_form: str = EXACT,
        attached: AttachedKv | None = None,
    ) -> None:
        """All blocks of a CONTINUE item are verified: written, or `attached` where they are.

        `kv_form` is of all of them; attached ones are exact.
        """
        request = self._requests.get(key)
        if attached is not None:
            self._attach(key, request, attached)
        if request is None:
            return
        if request.state is RequestState.RELEASING:
            self._forget(request)
            return
        if request.state is not RequestState.RECEIVING:
            raise RuntimeError(f"KV received in state {request.state.value}")
        wrong = _why_unusable(request, first, kv_form, self.config.vocab_size)
        if wrong:
            self._take_back(request)
            self._end(request, EndReason.ERROR, "internal", wrong, now)
            return
        request.trunk.kv_form = kv_form
        self._start_received(request, first, now)

    def _attach(self, key: RequestKey, request: Request | None, kv: AttachedKv) -> None:
        """Read these blocks in the peer's pool, in place of those reserved for them."""
        if request is None or request.state is not RequestState.RECEIVING:
            self._outbox.append(AttachReleased(key, is_intact=True))  # it has ended meanwhile
            return
        self._blocks.attach(request.trunk, kv)
        self._attached[request.trunk] = None

    def move_attached(self, key: RequestKey) -> None:
        """Move what a work item reads in a peer's pool into ours, from the next step on."""
        request = self._requests.get(key)
        if request is None or request.trunk.attached is None:
            return
        request.trunk.attached.is_urgent = True
        request.trunk.attached.verifies = True  # its owner may be gone: nobody else vouches for it

    def _on_detached(self, seq: Sequence) -> None:
        key = seq.request.key
        self._attached.pop(seq, None)
        self._outbox.append(AttachReleased(key, is_intact=key not in self._changed))
        self._changed.discard(key)

    def receive_failed(
        self, key: RequestKey, code: str, message: str, *, recompute: bool, now: float
    ) -> None:
        """The receiver has stopped writing: prefill here, or end the item."""
        request = self._requests.get(key)
        if request is None:
            return
        if request.state is RequestState.RELEASING:
            self._forget(request)
            return
        if request.state not in (RequestState.OPENING, RequestState.RECEIVING):
            raise RuntimeError(f"receive failed in state {request.state.value}")
        self._take_back(request)
        if not recompute:
            self._end(request, EndReason.ERROR, code, message, now)
            return
        request.kind = WorkKind.WHOLE
        request.cached_tokens = None
        request.trunk.generated.extend(request.source.generated[-1:])
        request.trunk.num_uncached_hint = request.trunk.num_tokens
        request.clock.enter("queue", now)
        self._queue.add(request.trunk, now)

    def fail(self, key: RequestKey, code: str, message: str, now: float) -> None:
        """End one work item by a fault that is its own."""
        request = self._requests.get(key)
        if request is not None:
            self._end(request, EndReason.ERROR, code, message, now)

    def end_all(self, reason: EndReason, code: str, message: str, now: float) -> None:
        """End every work item; blocks that are lent stay with the transfer layer."""
        self._plan = None
        for request in list(self._requests.values()):
            self._end(request, reason, code, message, now)

    # -- a step ----------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step. Its result, or `end_all`, must come before the next call."""
        if self._plan is not None:
            raise RuntimeError("the last plan has no result yet")
        self._expire(now)
        self._move_some(now)
        decodes = self._grow_decodes(now)
        self._admit(now)
        decodes = self._cap_decodes([seq for seq in decodes if self._is_running(seq)])
        room = self.config.max_step_tokens - len(decodes)
        chunks = self._plan_chunks(now, min(room, self._chunk_budget(bool(decodes))))
        self._step += 1
        rows = [self._row(seq, 1, now) for seq in decodes]
        rows += [self._row(seq, num_tokens, now) for seq, num_tokens in chunks]
        num_prefill = sum(num_tokens for _, num_tokens in chunks)
        plan = StepPlan(tuple(rows), num_prefill, len(decodes))
        self._plan = plan if rows else None
        return plan

    def apply(self, result: StepResult, now: float) -> None:
        """Take the result of the plan last scheduled."""
        plan, self._plan = self._plan, None
        if plan is None or len(result.rows) != len(plan.rows):
            raise RuntimeError("the result does not belong to the last plan")
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            # A work item may have been cancelled while its step ran.
            if self._is_running(row.sequence):
                self._apply_row(row, outcome, now)
        self.stats.step_done(
            elapsed_s=result.elapsed_s,
            num_prefill=plan.num_prefill_tokens,
            num_decode=plan.num_decode_tokens,
            resident_tokens=self._resident_tokens(),
        )

    # -- tickets ---------------------------------------------------------------------------

    def _open_ticket(self, request: Request) -> None:
        """Ask for the KV at once, so that the lease is held while we wait for blocks."""
        trunk = request.trunk
        num_full = trunk.num_tokens // self.config.block_size
        hashes = tuple(trunk.block_hash(idx) for idx in range(num_full))
        cached: tuple[BlockId, ...] = ()
        form = request.source.kv_form
        if form != UNKNOWN and self._may_pin(request):
            cached = self.pool.cache.match([cache_key(block_hash, form) for block_hash in hashes])
        self._blocks.share(trunk, cached)
        trunk.kv_form = form
        request.cached_tokens = len(cached) * self.config.block_size
        have = tuple(idx < len(cached) for idx in range(num_full))
        self._outbox.append(ReceiveWanted(request.key, have, hashes, form))

    def _may_pin(self, request: Request) -> bool:
        """Say whether cached blocks may be held while waiting for the others.

        Several items that each hold a part and wait for the rest could wait for ever. Those
        that hold something together never need more than the pool has, so one can always go.
        """
        needed = self._blocks.blocks_for(request.trunk.num_tokens)
        for other in self._requests.values():
            if other.state is RequestState.OPENING and len(other.trunk.table):
                needed += self._blocks.blocks_for(other.trunk.num_tokens)
        return needed <= self.pool.num_blocks

    def _start_received(self, request: Request, first: tuple[FirstToken, ...], now: float) -> None:
        trunk = request.trunk
        written = tuple(filter(is_own, trunk.table.block_ids[trunk.num_sealed :]))
        self._blocks.seal_received(trunk, written)
        request.clock.enter("queue", now)
        del self._receiving[request]
        request.move(RequestState.RUNNING)
        trunk.choice = first[0].choice
        self._run(trunk)
        trunk.generated.append(first[0].token_id)
        others = [token.choice for token in first[1:]]
        # Forks share blocks of ours only.
        may_share = not others or self._move_all(trunk, now)
        self._fork(request, others, now, may_share=may_share)
        for seq, token in zip(request.sequences[1:], first[1:], strict=True):
            seq.generated.append(token.token_id)

    def _take_back(self, request: Request) -> None:
        """A receive is over: nothing is lent any more, the item waits or ends without blocks."""
        self._queue.discard(request.trunk)
        self._receiving.pop(request, None)
        self._blocks.release(request.trunk)
        request.trunk.status = SequenceStatus.WAITING
        request.move(RequestState.QUEUED)

    # -- blocks in a peer's pool -----------------------------------------------------------

    def _move_some(self, now: float) -> None:
        """Bring attached blocks home, as many as this step has time for."""
        for seq in list(self._attached):
            if seq.attached is None or not self._is_running(seq):
                continue
            count = num_to_move(seq.attached, len(seq.generated), self.config)
            is_urgent = seq.attached.is_urgent
            if not self._move(seq, count, now) and is_urgent and self._is_running(seq):
                # Its owner needs the blocks more than this one needs to go on at once: it is
                # computed again when there is room.
                self._ask_unpin()
                self._preempt((seq,), now)

    def _move_all(self, seq: Sequence, now: float) -> bool:
        """Bring every attached block home at once; False if that failed."""
        return seq.attached is None or self._move(seq, seq.attached.num_left, now)

    def _move(self, seq: Sequence, count: int, now: float) -> bool:
        """Bring some home; False without room, or when they have changed: then it is preempted."""
        try:
            self.stats.attach_moved += self._blocks.move_in(seq, count)
        except BlocksExhausted:
            return False
        except AttachedChanged:
            self._lose_attached(seq, now)
            return False
        return True

    def _lose_attached(self, seq: Sequence, now: float) -> None:
        """What a sequence read in a peer's pool has changed: compute its KV here, from nothing."""
        self.stats.attach_changed += 1
        self._changed.add(seq.request.key)
        self._preempt((seq,), now)

    # -- letting in ------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        num_blocked = 0
        for seq in self._queue.ordered(now):
            is_pinning = seq.request.state is RequestState.OPENING and len(seq.table) > 0
            may_try = num_blocked <= self.config.look_ahead or is_pinning
            if may_try and self._try_admit(seq, now):
                continue
            num_blocked += 1
            if self._queue.has_waited_out(seq, now):
                num_blocked = self.config.look_ahead + 1

    def _try_admit(self, seq: Sequence, now: float) -> bool:
        cached = self._cached_for(seq)
        if not self._fits(seq, cached) and not self._make_room(seq, cached, now):
            if self._slots_taken() + seq.request.num_slots <= self.config.max_num_seqs:
                self._ask_unpin()
            return False
        self._queue.discard(seq)
        if seq.request.state is RequestState.OPENING:
            self._reserve(seq)
        else:
            self._start(seq, cached)
        return True

    def _fits(self, seq: Sequence, cached: tuple[BlockId, ...]) -> bool:
        if self._slots_taken() + seq.request.num_slots > self.config.max_num_seqs:
            return False
        spare = self.pool.num_available - self._cost(seq, cached)
        if spare < 0:
            return False
        # What the running ones will probably grow to is theirs already; when nothing runs,
        # whatever fits may go.
        return not self._running or self._growth_of_others() + self._growth(seq) <= spare

    def _slots_taken(self) -> int:
        receiving = sum(request.num_slots for request in self._receiving)
        return receiving + sum(seq.request.num_slots for seq in self._running)

    def _cached_for(self, seq: Sequence) -> tuple[BlockId, ...]:
        if seq.request.state is RequestState.OPENING:
            return ()  # it holds those it uses already
        return self._blocks.cached_prefix(seq)

    def _cost(self, seq: Sequence, cached: tuple[BlockId, ...]) -> int:
        if seq.request.state is RequestState.OPENING:
            return self._blocks.blocks_for(seq.num_tokens) - len(seq.table)
        return self._blocks.cost(seq, cached)

    def _reserve(self, seq: Sequence) -> None:
        """Lend all blocks a receive needs, at once: no receive ever waits with a part."""
        request, num_had = seq.request, len(seq.table)
        self._blocks.extend(seq, self._blocks.blocks_for(seq.num_tokens) - num_had)
        seq.status = SequenceStatus.HELD
        request.move(RequestState.RECEIVING)
        self._receiving[request] = None
        num_full = seq.num_tokens // self.config.block_size
        blocks = seq.table.block_ids
        lent = tuple(None if i < num_had else blocks[i] for i in range(num_full))
        tail = blocks[num_full] if len(blocks) > num_full else None
        self._outbox.append(BlocksReserved(request.key, lent, tail))

    def _start(self, seq: Sequence, cached: tuple[BlockId, ...]) -> None:
        request = seq.request
        self._blocks.take(seq, cached)
        if request.cached_tokens is None:
            request.cached_tokens = seq.num_computed
        if request.state is RequestState.QUEUED:
            request.move(RequestState.RUNNING)
        self._run(seq)

    def _run(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        self._running[seq] = None

    def _growth(self, seq: Sequence) -> int:
        """Blocks this sequence will probably need beyond those for its known tokens."""
        request = seq.request
        if request.kind is WorkKind.PREFILL:
            return 0
        expected = self.stats.expected_length(request.source.sampling.max_tokens)
        # One that outlived the estimate needs at least the room of its next token.
        final_tokens = max(len(request.prompt) + expected, seq.num_tokens + 1) - 1
        more = self._blocks.blocks_for(final_tokens) - self._blocks.blocks_for(seq.num_tokens)
        if seq.attached is not None:
            more += will_move(seq.attached, expected, self.config)
        return more * request.num_slots + (request.num_slots - 1)  # forks copy their tail

    def _growth_of_others(self) -> int:
        running = sum(self._growth(seq) for seq in self._running)
        return running + sum(self._growth(request.trunk) for request in self._receiving)

    # -- giving way ------------------------------------------------------------------------

    def _victims(self, below: int | None = None) -> list[Sequence]:
        """Running sequences that may be preempted, first victim first.

        Args:
            below: only those of lower priority.
        """
        victims = [
            seq
            for seq in self._running
            if not seq.request.is_lent and (below is None or seq.request.source.priority < below)
        ]
        return sorted(victims, key=_standing, reverse=True)

    def _make_room(self, seq: Sequence, cached: tuple[BlockId, ...], now: float) -> bool:
        """Preempt sequences of lower priority for `seq`, if that is enough; else none at all."""
        victims = self._victims(below=seq.request.source.priority)
        slots = self._slots_taken() + seq.request.num_slots - self.config.max_num_seqs
        blocks = self._cost(seq, cached) - self.pool.num_available
        shared = set(cached)
        chosen: list[Sequence] = []
        for victim in victims:
            if slots <= 0 and blocks <= 0:
                break
            chosen.append(victim)
            slots -= victim.request.num_slots
            blocks -= sum(
                self.pool.num_refs(block_id) == 1 and block_id not in shared
                for block_id in victim.table.own_ids
            )
        if not victims or slots > 0 or blocks > 0:
            return False
        # Room for growth is not asked for here: the victims' kind will give it when needed.
        self._preempt(chosen, now)
        return True

    def _preempt(self, victims: Iterable[Sequence], now: float) -> None:
        """Take the blocks; the sequence is computed again later, from what stays cached."""
        for seq in victims:
            del self._running[seq]
            self._blocks.release(seq)
            self.stats.preemptions += 1
            self._wait_again(seq, now)

    def _wait_again(self, seq: Sequence, now: float) -> None:
        seq.status = SequenceStatus.WAITING
        seq.was_preempted = True
        seq.num_uncached_hint = seq.num_tokens
        self._queue.add(seq, now)
        request = seq.request
        if not any(map(self._is_running, request.live)):
            request.move(RequestState.QUEUED)

    # -- composing a step ------------------------------------------------------------------

    def _is_running(self, seq: Sequence) -> bool:
        return seq.status is SequenceStatus.RUNNING

    def _grow_decodes(self, now: float) -> list[Sequence]:
        """Decoding sequences that have a slot for their next token, best standing first."""
        return [
            seq
            for seq in sorted(self._running, key=_standing)
            # Growing one may preempt a later one of the list.
            if self._is_running(seq)
            and seq.is_decoding
            and not seq.request.is_paused
            and self._grow(seq, now)
        ]

    def _grow(self, seq: Sequence, now: float) -> bool:
        while seq.table.num_slots < seq.num_tokens:
            try:
                self._blocks.extend(seq, 1)
            except BlocksExhausted:
                self._ask_unpin()
                # The one of worst standing gives way: it may be this one, never a better one.
                victim = self._victims()[0]
                self._preempt((victim,), now)
                if victim is seq:
                    return False
        return True

    def _cap_decodes(self, decodes: list[Sequence]) -> list[Sequence]:
        """Bound decodes by the role's share while prompts wait; the longest unserved go first."""
        is_prefill_waiting = any(not seq.is_decoding for seq in self._running)
        share = self._decode_weight / max(self._prefill_weight, self._decode_weight)
        cap = max(1, math.ceil(self.config.max_num_seqs * share))
        if not is_prefill_waiting or len(decodes) <= cap:
            return decodes
        return sorted(decodes, key=lambda seq: seq.last_step)[:cap]

    def _chunk_budget(self, has_decodes: bool) -> int:
        """Prompt tokens of one step, by its time target."""
        config = self.config
        target_s = config.chunk_target_s if has_decodes else config.chunk_target_alone_s
        tokens = self.stats.chunk_tokens(target_s) or config.initial_chunk_tokens
        if has_decodes:
            tokens *= self._prefill_weight / max(self._prefill_weight, self._decode_weight)
        return max(config.min_chunk_tokens, int(min(tokens, config.max_step_tokens)))

    def _plan_chunks(self, now: float, budget: int) -> list[tuple[Sequence, int]]:
        """Share the budget among prefilling sequences: least left first, aged by waiting."""
        chunks: list[tuple[Sequence, int]] = []
        prefilling = [seq for seq in self._running if not seq.is_decoding]
        prefilling.sort(key=lambda seq: self._chunk_rank(seq, now))
        for seq in prefilling:
            num_tokens = self._chunk(seq, min(budget, self.config.max_chunk_tokens))
            if num_tokens < 1:
                break
            chunks.append((seq, num_tokens))
            budget -= num_tokens
        return chunks

    def _chunk_rank(self, seq: Sequence, now: float) -> tuple[int, float, int]:
        rate = self.stats.prefill_tok_s or 1000.0
        waited = now - seq.waiting_since
        request = seq.request
        return (-request.source.priority, seq.num_pending / rate - waited, request.arrival)

    def _chunk(self, seq: Sequence, limit: int) -> int:
        """Tokens of the next chunk: all that is left, or up to a block's end if one is near."""
        if seq.num_pending <= limit:
            return seq.num_pending
        end = seq.num_computed + limit
        aligned = end - end % self.config.block_size
        return (aligned if aligned > seq.num_computed else end) - seq.num_computed

    def _row(self, seq: Sequence, num_tokens: int, now: float) -> PlanRow:
        request = seq.request
        seq.last_step = self._step
        if request.clock.stage == "queue":
            request.clock.enter("decode" if seq.is_decoding else "prefill", now)
        start, end = seq.num_computed, seq.num_computed + num_tokens
        return PlanRow(
            sequence=seq,
            start=start,
            token_ids=seq.token_ids(start, end),
            slots=seq.table.slots(start, end),
            block_ids=seq.table.as_array(),
            tasks=self._tasks(seq) if end == seq.num_tokens else (),
            attached=AttachedRow(seq.attached.kv, seq.attached.num_moved) if seq.attached else None,
        )

    def _tasks(self, seq: Sequence) -> tuple[SampleTask, ...]:
        request = seq.request
        params = request.source.sampling
        is_first = not request.is_forked and not seq.generated
        choices = range(params.n) if is_first else (seq.choice,)
        return tuple(
            SampleTask(choice, len(seq.generated), params, seq.prompt, seq.generated)
            for choice in choices
        )

    # -- results ---------------------------------------------------------------------------

    def _apply_row(self, row: PlanRow, outcome: RowResult, now: float) -> None:
        seq, request = row.sequence, row.sequence.request
        if outcome.is_stale:
            self._lose_attached(seq, now)
            return
        if outcome.error is None and len(outcome.samples) != len(row.tasks):
            raise RuntimeError("a row has not one sample for each of its tasks")
        if outcome.error is not None:
            self._end(request, EndReason.ERROR, "internal", outcome.error, now)
            return
        if not seq.is_decoding:
            request.computed_tokens += len(row.token_ids)
            request.clock.chunk(len(row.token_ids), now)
        seq.num_computed += len(row.token_ids)
        self._blocks.seal_computed(seq)
        if row.tasks and not request.is_forked and not seq.generated:
            self._first_tokens(request, outcome.samples, now)
        elif row.tasks:
            self._next_token(seq, outcome.samples[0], now)
        elif request.kind is WorkKind.PREFILL and not request.source.generated:
            self._announce(request)

    def _next_token(self, seq: Sequence, sampled: Sampled, now: float) -> None:
        if seq.request.clock.stage == "prefill":  # of tokens another worker made
            seq.request.clock.enter("decode", now)
        self._add_token(seq, sampled)
        reason = self._end_of(seq)
        if reason is not None:
            self._end_choice(seq, reason, now)
        elif seq.request.kind is WorkKind.PREFILL:
            self._hand_on(seq.request, now)

    def _first_tokens(self, request: Request, samples: tuple[Sampled, ...], now: float) -> None:
        trunk = request.trunk
        if request.kind is WorkKind.PREFILL:
            self._finish_prefill(request, samples, now)
            return
        request.clock.enter("decode", now)
        self._fork(request, list(range(1, len(samples))), now)
        for seq, sampled in zip((trunk, *request.sequences[1:]), samples, strict=True):
            self._next_token(seq, sampled, now)

    def _fork(
        self, request: Request, choices: list[int], now: float, *, may_share: bool = True
    ) -> None:
        """Give the other choices sequences of their own, sharing the prompt's full blocks."""
        request.is_forked = True
        for choice in choices:
            child = Sequence(request, choice)
            request.sequences.append(child)
            if may_share and self._blocks.fork(request.trunk, child):
                self._run(child)
            else:
                child.was_preempted = True
                child.num_uncached_hint = child.num_tokens
                self._queue.add(child, now)

    def _finish_prefill(self, request: Request, samples: tuple[Sampled, ...], now: float) -> None:
        """The prompt of a hand-off is done: first tokens out, then end or lend the rest."""
        sampling = request.source.sampling
        going_on: list[FirstToken] = []
        ended: list[tuple[int, EndReason]] = []
        for choice, sampled in enumerate(samples):
            self._emit_token(request, choice, 0, sampled)
            reason = self._reason(request, sampled.token_id, num_generated=1)
            if reason is None:
                going_on.append(FirstToken(choice, sampled.token_id, sampled.logprobs))
            else:
                ended.append((choice, reason))
        self._stop_running(request, SequenceStatus.HELD)
        if sampling.max_tokens > 1 and going_on:
            self._announce(request)
        if going_on and request.is_lent:
            tail, num_valid = self._blocks.freeze_tail(request.trunk)
            prefill_us = request.clock.times(now).prefill_us
            self._outbox.append(
                PrefillFinished(
                    request.key,
                    tuple(going_on),
                    len(request.prompt),
                    tail,
                    num_valid,
                    prefill_us,
                )
            )
        self._end_prefill_choices(request, going_on, ended, now)

    def _end_prefill_choices(
        self,
        request: Request,
        going_on: list[FirstToken],
        ended: list[tuple[int, EndReason]],
        now: float,
    ) -> None:
        for choice, reason in ended:
            is_last = not going_on and choice == ended[-1][0]
            self._outbox.append(self._done(request, choice, reason, is_last, now))
        if going_on:
            # The end is not this item's: LENGTH stands for "as far as was asked of us".
            done = self._done(
                request, going_on[0].choice, EndReason.LENGTH, True, now, handed_off=True
            )
            self._outbox.append(done)
            request.move(RequestState.HANDING_OFF)
        if not request.is_lent:
            self._forget(request)
        elif not going_on:
            self._outbox.append(CancelSource(request.key, "every choice ended at its first token"))
            request.move(RequestState.RELEASING)

    def _announce(self, request: Request) -> None:
        """Offer the KV after the first chunk, then name the blocks sealed since the last time."""
        if request.source.sampling.max_tokens == 1:
            return
        if not request.is_offered:
            request.is_offered = request.is_lent = True
            source = request.source
            self._outbox.append(
                OfferReady(
                    request.key,
                    source.request_id,
                    len(request.prompt),
                    request.prompt_hashes,
                    source.tenant,
                )
            )
        lo, hi = request.num_announced, request.trunk.num_sealed
        if request.is_lent and hi > lo:
            block_ids = request.trunk.table.block_ids[lo:hi]
            self._outbox.append(BlocksSealed(request.key, lo, block_ids))
            request.num_announced = hi

    def _add_token(self, seq: Sequence, sampled: Sampled) -> None:
        self._emit_token(seq.request, seq.choice, len(seq.generated), sampled)
        seq.generated.append(sampled.token_id)

    def _emit_token(self, request: Request, choice: int, index: int, sampled: Sampled) -> None:
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        self._outbox.append(TokensOut(request.key, choice, index, (sampled.token_id,), logprobs))

    # -- ends ------------------------------------------------------------------------------

    def _end_of(self, seq: Sequence) -> EndReason | None:
        return self._reason(seq.request, seq.generated[-1], num_generated=len(seq.generated))

    def _reason(self, request: Request, token_id: int, *, num_generated: int) -> EndReason | None:
        sampling = request.source.sampling
        is_eos = token_id in self.config.eos_token_ids and not sampling.ignore_eos
        if num_generated >= sampling.min_tokens and (is_eos or token_id in sampling.stop_token_ids):
            return EndReason.STOP
        return EndReason.LENGTH if num_generated >= sampling.max_tokens else None

    def _end_choice(self, seq: Sequence, reason: EndReason, now: float) -> None:
        request = seq.request
        self.stats.ended(len(seq.generated))
        self._queue.discard(seq)
        self._running.pop(seq, None)
        self._blocks.release(seq)
        seq.status = SequenceStatus.DONE
        live = request.live
        self._outbox.append(self._done(request, seq.choice, reason, not live, now))
        if not live:
            self._forget(request)
        elif request.state is RequestState.RUNNING and not any(map(self._is_running, live)):
            request.move(RequestState.QUEUED)

    def _end(
        self, request: Request, reason: EndReason, code: str, message: str, now: float
    ) -> None:
        """End a whole work item: one ChoiceDone for all choices that are left."""
        state = request.state
        if state is RequestState.RELEASING:
            return
        is_receiving = state in (RequestState.OPENING, RequestState.RECEIVING)
        if request.is_lent:
            self._outbox.append(CancelSource(request.key, message))
        if is_receiving:
            self._outbox.append(CancelReceive(request.key, message))
        if state is not RequestState.HANDING_OFF:  # it has ended for the client already
            choice = request.live[0].choice
            done = self._done(request, choice, reason, True, now, error=(code, message))
            self._outbox.append(done)
        if not request.is_lent and not is_receiving:
            self._forget(request)
            return
        self._stop_running(request, SequenceStatus.HELD)
        self._receiving.pop(request, None)
        if state is RequestState.OPENING:
            self._blocks.release(request.trunk)  # shared blocks only: the receiver has none
        request.move(RequestState.RELEASING)

    def _done(
        self,
        request: Request,
        choice: int,
        reason: EndReason,
        is_last: bool,
        now: float,
        *,
        error: tuple[str, str] | None = None,
        handed_off: bool = False,
    ) -> ChoiceDone:
        is_error = reason is EndReason.ERROR and error is not None
        return ChoiceDone(
            key=request.key,
            choice=choice,
            reason=reason,
            all_choices=is_last,
            error_code=error[0] if error and is_error else None,
            error_message=error[1] if error else "",
            handed_off=handed_off,
            cached_tokens=request.cached_tokens or 0,
            computed_tokens=request.computed_tokens,
            times=request.clock.times(now),
        )

    def _stop_running(self, request: Request, status: SequenceStatus) -> None:
        for seq in request.live:
            self._queue.discard(seq)
            self._running.pop(seq, None)
            seq.status = status

    def _forget(self, request: Request) -> None:
        """Give everything back: nothing of this work item is lent."""
        self._stop_running(request, SequenceStatus.DONE)
        for seq in request.sequences:
            self._blocks.release(seq)
        request.move(RequestState.FINISHED)
        del self._requests[request.key]

    def _watch_deadline(self, request: Request) -> None:
        entry = (request.source.deadline, request.arrival, request.key)
        heapq.heappush(self._deadlines, entry)
        if len(self._deadlines) > 2 * len(self._requests) + 64:
            # Most work ends long before its deadline; do not keep its entries until then.
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._requests]
            heapq.heapify(self._deadlines)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, key = heapq.heappop(self._deadlines)
            request = self._requests.get(key)
            if request is not None and request.source.deadline <= now:
                message = "the deadline passed before the work was done"
                self._end(request, EndReason.ERROR, "deadline_exceeded", message, now)

    # -- counting --------------------------------------------------------------------------

    def _resident_tokens(self) -> int:
        return sum(seq.num_computed for seq in self._running)

    def check_integrity(self) -> None:
        """Raise AssertionError when requests, queue and pool do not agree."""
        self.pool.check_integrity()
        refs: dict[BlockId, int] = {}
        for request in self._requests.values():
            assert request.state is not RequestState.FINISHED
            is_any_running = any(map(self._is_running, request.live))
            assert is_any_running == (request.state is RequestState.RUNNING)
            for seq in request.sequences:
                self._check_sequence(seq)
                for block_id in seq.table.own_ids:
                    refs[block_id] = refs.get(block_id, 0) + 1
        for idx in range(self.pool.num_blocks):
            assert self.pool.num_refs(BlockId(idx)) == refs.get(BlockId(idx), 0)
        assert {entry[2] for entry in self._deadlines} >= {
            key for key, request in self._requests.items() if not request.is_ending
        }
        assert {r.key for r in self._receiving} == {
            key for key, r in self._requests.items() if r.state is RequestState.RECEIVING
        }

    def _check_sequence(self, seq: Sequence) -> None:
        state = seq.request.state
        assert (seq.status is SequenceStatus.RUNNING) == (seq in self._running)
        assert (seq.status is SequenceStatus.WAITING) == (seq in self._queue)
        if seq.status is SequenceStatus.RUNNING:
            assert state is RequestState.RUNNING
            assert seq.num_computed <= seq.num_tokens
            is_all_sealed = seq.num_sealed == seq.num_computed // self.config.block_size
            assert is_all_sealed or seq.attached is not None
        if seq.status is SequenceStatus.WAITING and state is not RequestState.OPENING:
            assert not len(seq.table)
        for idx in range(seq.num_sealed):
            assert self.pool.is_sealed(seq.table[idx])
        self._check_attached(seq)

    def _check_attached(self, seq: Sequence) -> None:
        assert (seq.attached is not None) == (seq in self._attached)
        foreign = [idx for idx, entry in enumerate(seq.table.block_ids) if not is_own(entry)]
        left = () if seq.attached is None else seq.attached.kv.indexes[seq.attached.num_moved :]
        assert tuple(foreign) == tuple(left), "the table names a peer's blocks that are not held"


def _why_it_stays(request: Request | None) -> str:
    """Say why a work item cannot migrate now; empty when it can."""
    if request is None:
        return "no such work item is open"
    if request.source.sampling.n != 1:
        return "it has several choices"
    if request.kind is WorkKind.PREFILL:
        return "it is handed off after its prefill anyway"
    trunk = request.trunk
    if trunk.status is not SequenceStatus.RUNNING or not trunk.is_decoding:
        return "it does not decode now"
    return ""


def _why_unusable(
    request: Request, first: tuple[FirstToken, ...], kv_form: str, vocab_size: int
) -> str:
    """Say why what was received is not this work item's; empty when it is."""
    choices = [token.choice for token in first]
    num_choices = request.source.sampling.n
    if not choices or len(set(choices)) != len(choices) or max(choices) >= num_choices:
        return "FINAL names wrong choices"
    if not all(0 <= token.token_id < vocab_size for token in first):
        return "FINAL names a token outside the vocabulary"  # no step could read its row
    if request.source.generated and first[0].token_id != request.source.generated[-1]:
        return "FINAL does not go on where the work item does"
    if request.trunk.num_sealed and kv_form != request.trunk.kv_form:
        return "the blocks that were had are of another form"
    return ""


def _standing(seq: Sequence) -> tuple[int, int, int]:
    """Sort key: who keeps its place when memory is short, best first."""
    return (-seq.request.source.priority, seq.request.arrival, seq.choice)


def _num_shared(hashes: Seq[BlockHash], others: Seq[BlockHash]) -> int:
    """Return how many leading blocks are equal; a hash names all blocks before it."""
    both = range(min(len(hashes), len(others)))
    return bisect_left(both, 1, key=lambda i: hashes[i] != others[i])
