"""Prefill side of one transfer, pure: events and `now` go in, actions come out.

    OFFERED --OPEN--> STREAMING --FINAL sent--> DRAINING --DONE--> CLOSED (tombstone)
        any --cancel, ttl, lease, peer's ABORT--> ABORTING --quiet--> CLOSED

(QUEUED and COMPUTING are the engine's: an offer is made when the first chunk is sealed.)
Blocks are given back by exactly one Release, and only when nothing reads them any more: no DATA
message holds them, and a memfd reader has said ABORTED or its lease is over (after which the
generation check of its seqlock refuses what it reads).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from services.common.ids import BlockId
from services.kv.layout import KvLayout
from services.transfer.announce import ASKED_AGAIN, NOTHING_LEFT, OFF, AnnouncePlan, Pending
from services.transfer.planes import MAPPED_PLANES, SENT_PLANES
from services.transfer.values import (
    FinalBlocks,
    OpenArgs,
    Peer,
    RejectCode,
)
from services.transfer.wire import MAX_PAYLOAD_FRAMES


class SenderState(Enum):
    """Where a transfer stands at the prefill side."""

    OFFERED = "offered"
    STREAMING = "streaming"
    DRAINING = "draining"
    ABORTING = "aborting"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class SenderPolicy:
    """Times and sizes a sender obeys."""

    block_bytes: int
    ticket_ttl_s: float
    lease_s: float
    tombstone_s: float
    data_message_bytes: int
    max_nacks: int
    abort_retry_s: float = 0.25


# ---- actions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendOpened:
    """Answer OPEN: the lease runs."""

    peer: Peer
    attempt: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class SendReject:
    """Answer OPEN: no, and why."""

    peer: Peer
    attempt: int
    code: RejectCode
    retry_after_s: float
    detail: str


@dataclass(frozen=True, slots=True)
class SendReady:
    """Announce sealed blocks [lo, hi)."""

    peer: Peer
    attempt: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class SendFinal:
    """Send first tokens and tail."""

    peer: Peer
    attempt: int


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Tell the owner that the transfer is over."""

    peer: Peer
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendAborted:
    """Answer the ABORT of the peer."""

    peer: Peer
    attempt: int


@dataclass(frozen=True, slots=True)
class SendClosed:
    """Answer DONE."""

    peer: Peer
    attempt: int


@dataclass(frozen=True, slots=True)
class SendDrain:
    """Ask the owner to move home what it reads in place."""

    peer: Peer
    attempt: int


@dataclass(frozen=True, slots=True)
class DataReady:
    """There may be something for `take_data` now."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Unpin:
    """These blocks go back early: their owner has them, and nobody else can get them any more."""

    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """The blocks go back to the engine; sent once."""

    outcome: str
    reason: str


SenderAction = (
    SendOpened
    | SendReject
    | SendReady
    | SendFinal
    | SendAbort
    | SendAborted
    | SendClosed
    | SendDrain
    | DataReady
    | Unpin
    | Release
)


@dataclass(frozen=True, slots=True)
class DataOut:
    """One DATA message: logical indexes and the pool blocks to read; the tail goes alone."""

    peer: Peer
    attempt: int
    indexes: tuple[int, ...]
    block_ids: tuple[BlockId, ...]
    is_tail: bool


Planner = Callable[[str, Pending], AnnouncePlan]  # plane and prompt to plan


class SenderTransfer:
    """One offered request. All methods are events; none of them waits or reads a clock."""

    def __init__(
        self,
        xfer_id: int,
        num_blocks: int,
        has_tail: bool,
        policy: SenderPolicy,
        now: float,
        planner: Planner | None = None,
    ) -> None:
        """Args:
        planner: decides about a prompt when its first announcement is due; None = stream.
        """
        self.xfer_id = xfer_id
        self.num_blocks = num_blocks
        self.state = SenderState.OFFERED
        self.attempt = 0
        self.owner: Peer | None = None
        self.plane = ""
        self.wire: KvLayout | None = None  # what its owner gets of a block; None = all of it
        self.block_ids: list[BlockId] = []
        self.final: FinalBlocks | None = None
        self.bytes_moved = 0
        self.blocks_moved = 0
        self.blocks_deduped = 0
        self.num_nacks = 0
        self.closed_reason = ""
        self.plan: AnnouncePlan | None = None  # of this owner, once something could be announced
        self.num_announcements = 0  # sent to this owner
        self._num_announced = 0  # blocks it knows of
        self._planner = planner
        self._policy = policy
        self._has_tail = has_tail
        self._deadline = now + policy.ticket_ttl_s
        self._next_abort = 0.0
        self._outcome = ""
        self._released = False
        self._peer_quiet = True
        self._peer_lost = False
        self._num_in_flight = 0
        self._pulled: set[int] = set()  # full blocks the owner says it has verified
        self._unpinned: set[int] = set()  # given back; nobody is told of them again
        self._is_unpinning = False
        self._is_asking_back = False
        self._nacks: dict[int, int] = {}
        self._reset_stream(())
        self._granted = 0

    # ---- from the engine ----------------------------------------------------------------------

    def on_sealed(self, lo: int, block_ids: Sequence[BlockId]) -> list[SenderAction]:
        """Take full blocks that follow the ones already sealed."""
        if self.state in (SenderState.ABORTING, SenderState.CLOSED):
            return []
        if lo != len(self.block_ids):
            raise ValueError(f"sealed from {lo}, expected {len(self.block_ids)}")
        if lo + len(block_ids) > self.num_blocks:
            raise ValueError("more blocks sealed than the prompt has")
        self.block_ids.extend(block_ids)
        if self.owner is None or not block_ids:
            return []
        ready = self._announce(self.owner)
        return [*ready, DataReady(self.owner)] if ready else []

    def on_prefill_finished(self, final: FinalBlocks) -> list[SenderAction]:
        """Take the first tokens and the frozen tail; every full block must be sealed by now."""
        if self.state in (SenderState.ABORTING, SenderState.CLOSED) or self.final is not None:
            return []
        if len(self.block_ids) != self.num_blocks:
            raise ValueError(f"{len(self.block_ids)} of {self.num_blocks} blocks sealed at FINAL")
        if (final.info.tail_block is not None) != self._has_tail:
            raise ValueError("tail block does not fit the prompt length")
        self.final = final
        if self.owner is None:
            return []
        self.state = SenderState.DRAINING
        last: list[SenderAction] = [SendFinal(self.owner, self.attempt), DataReady(self.owner)]
        return [*self._announce(self.owner), *last, *self._unpin_some()]

    def _announce(self, owner: Peer) -> list[SenderAction]:
        """Tell of what is sealed and was not told of, unless it is to go with the end."""
        lo, hi = self._num_announced, len(self.block_ids)
        if lo == hi or self._holds_back():
            return []
        self._num_announced = hi
        self.num_announcements += 1
        return [SendReady(owner, self.attempt, lo, hi)]

    def _holds_back(self) -> bool:
        if self.final is not None:
            self.plan = self.plan or NOTHING_LEFT
            return False
        if self.plan is None:
            pending = Pending(self.num_blocks, len(self.block_ids), self.frame_bytes)
            self.plan = OFF if self._planner is None else self._planner(self.plane, pending)
        return self.plan.is_single_shot

    def cancel(self, reason: str, now: float, outcome: str = "aborted") -> list[SenderAction]:
        """Stop; Release follows when nothing reads the blocks."""
        return self._abort(outcome, reason, now, tell_peer=True)

    # ---- from the peer ------------------------------------------------------------------------

    def on_open(self, peer: Peer, args: OpenArgs, now: float) -> list[SenderAction]:
        """Answer an OPEN: take it, replay it, fence the lower attempt, or say why not."""
        refusal = self._refusal(peer, args)
        if refusal is not None:
            code, detail = refusal
            wait = self._policy.lease_s if code is RejectCode.BUSY else 0.0
            return [SendReject(peer, args.attempt, code, wait, detail)]
        actions: list[SenderAction] = []
        if self.owner is not None and args.attempt > self.attempt:
            actions.append(SendAbort(self.owner, self.attempt, "fenced by a higher attempt"))
        opened = (self.owner, self.attempt, self.plane, self.wire)
        if opened != (peer, args.attempt, args.plane, args.wire):
            self._take(peer, args)
        elif self.plan is not None and self.plan.is_single_shot and self.final is None:
            self.plan = ASKED_AGAIN
        self._granted = max(self._granted, args.credit_bytes)
        self._touch(now)
        self.state = SenderState.STREAMING if self.final is None else SenderState.DRAINING
        actions.append(SendOpened(peer, self.attempt, self._policy.lease_s))
        self._num_announced = 0  # said again: OPEN also asks for what was lost on the way
        actions += self._announce(peer)
        if self.final is not None:
            actions.append(SendFinal(peer, self.attempt))
        if self._is_asking_back:
            actions += self.ask_back()
        return [*actions, DataReady(peer)]

    def ask_back(self) -> list[SenderAction]:
        """Have the owner move home what it reads in place, from now on."""
        self._is_asking_back = True
        is_open = self.state in (SenderState.STREAMING, SenderState.DRAINING)
        if self.plane != "attach" or self.owner is None or not is_open:
            return []
        return [SendDrain(self.owner, self.attempt)]

    @property
    def is_single_shot(self) -> bool:
        """Tell whether its owner was told of nothing before the prefill had ended."""
        is_ended = self.owner is not None and self.final is not None
        return is_ended and (self.plan is None or self.plan.is_single_shot)

    @property
    def num_attached(self) -> int:
        """Blocks its owner may be reading in place."""
        is_open = self.state in (SenderState.STREAMING, SenderState.DRAINING)
        return self.num_blocks if self.plane == "attach" and is_open else 0

    def _refusal(self, peer: Peer, args: OpenArgs) -> tuple[RejectCode, str] | None:
        if self.state in (SenderState.ABORTING, SenderState.CLOSED):
            return RejectCode.EXPIRED, self.closed_reason
        if len(args.have) != self.num_blocks:
            return RejectCode.LAYOUT, "have-bitmap does not fit the prompt"
        if not all(args.have[index] for index in self._unpinned):
            return RejectCode.EXPIRED, "blocks were given back after another worker had them"
        if self.owner is None:
            return None
        if args.attempt < self.attempt:
            return RejectCode.FENCED, "a higher attempt is open"
        if args.attempt == self.attempt and peer.base != self.owner.base:
            return RejectCode.BUSY, "another decode worker has this attempt open"
        return None

    def _take(self, peer: Peer, args: OpenArgs) -> None:
        """Start streaming to a new owner, or to the same one over a new connection."""
        self.owner = peer
        self.attempt = args.attempt
        self.plane = args.plane
        self.wire = args.wire
        self._peer_lost = False
        self._peer_quiet = args.plane not in MAPPED_PLANES
        self._granted = 0
        self._nacks.clear()
        self._pulled.clear()
        self.blocks_deduped = sum(args.have)
        self.plan = None
        self.num_announcements = 0
        self._reset_stream(i for i, had in enumerate(args.have) if had)

    def on_credit(self, peer: Peer, attempt: int, total_bytes: int) -> list[SenderAction]:
        """Raise the credit; totals are cumulative, so duplicates and reordering do no harm."""
        if not self._is_owner(peer, attempt):
            return []
        self._granted = max(self._granted, total_bytes)
        return [DataReady(peer)]

    def on_pulled(
        self, peer: Peer, attempt: int, lo: int, hi: int, now: float
    ) -> list[SenderAction]:
        """Note a reader's progress."""
        if not self._is_owner(peer, attempt) or not 0 <= lo < hi <= self.num_blocks + 1:
            return []
        self._touch(now)
        if self.plane in MAPPED_PLANES:  # what is sent was counted then
            self.blocks_moved += hi - lo
            self.bytes_moved += (hi - lo) * self.frame_bytes
        self._pulled.update(range(lo, min(hi, len(self.block_ids))))
        return self._unpin_some()

    def unpin(self) -> list[SenderAction]:
        """Give blocks back as soon as the owner has them, from now on."""
        self._is_unpinning = True
        return [*self.ask_back(), *self._unpin_some()]

    def _unpin_some(self) -> list[SenderAction]:
        """Give back what is safe: verified by the owner and in no message that ZMQ still reads.

        A fenced reader may still look at such a block; its generation changes before its content.
        """
        is_read = self.state is not SenderState.DRAINING or self._num_in_flight > 0
        if not self._is_unpinning or is_read:
            return []
        fresh = sorted(self._pulled - self._unpinned)
        if not fresh:
            return []
        self._unpinned.update(fresh)
        # Asked for again, or to be sent anew on another connection, when word came that it is
        # there: what is given back can be sent no more.
        self._sent.update(fresh)
        still_held = [index for index in self._resend if index not in self._unpinned]
        self._resend.clear()
        self._resend.extend(still_held)
        return [Unpin(tuple(self.block_ids[index] for index in fresh))]

    def on_nack(
        self, peer: Peer, attempt: int, indexes: Sequence[int], tail: bool, now: float
    ) -> list[SenderAction]:
        """Send blocks again, each at most `max_nacks` times."""
        if not self._is_owner(peer, attempt):
            return []
        wanted = [i for i in dict.fromkeys(indexes) if 0 <= i < len(self.block_ids)]
        if tail and self.final is not None and self._has_tail:
            wanted.append(self.num_blocks)
        self.num_nacks += 1
        if not self._unpinned.isdisjoint(wanted):
            return self._abort("aborted", "a block was refused that was given back", now, True)
        for index in wanted:
            self._nacks[index] = self._nacks.get(index, 0) + 1
            if self._nacks[index] > self._policy.max_nacks:
                return self._abort("aborted", f"block {index} refused too often", now, True)
        if self.plane in SENT_PLANES:
            waiting = set(self._resend)
            self._resend.extend(i for i in wanted if i in self._sent and i not in waiting)
            return [DataReady(peer)]
        return [SendReady(peer, attempt, i, i + 1) for i in wanted if i < self.num_blocks]

    def on_renew(self, base: bytes, now: float) -> bool:
        """Renew the lease; False tells the peer that it no longer has one."""
        if self.owner is None or self.owner.base != base:
            return False
        if self.state not in (SenderState.STREAMING, SenderState.DRAINING):
            return False
        self._touch(now)
        return True

    def on_done(self, peer: Peer, attempt: int, size_bytes: int, now: float) -> list[SenderAction]:
        """Close: the peer has everything and reads no more."""
        if self.state is SenderState.CLOSED or not self._is_owner(peer, attempt):
            return [SendClosed(peer, attempt)]
        self._peer_quiet = True
        if self.final is None or self.state is SenderState.ABORTING:
            early = self._abort("aborted", "DONE before FINAL", now, tell_peer=False)
            return [SendClosed(peer, attempt), *early]
        if self.plane in MAPPED_PLANES:
            # Only the reader knows; the last PULLED may be behind its DONE.
            self.blocks_moved = min(size_bytes // self.frame_bytes, self.num_blocks + 1)
            self.bytes_moved = self.blocks_moved * self.frame_bytes
        self._begin_abort("done", "", now)
        return [SendClosed(peer, attempt), *self._try_close(now)]

    def on_abort(self, peer: Peer, attempt: int, reason: str, now: float) -> list[SenderAction]:
        """Always answer; end the transfer only if the abort is its owner's."""
        answer: list[SenderAction] = [SendAborted(peer, attempt)]
        if self.state is SenderState.CLOSED or not self._is_owner(peer, attempt):
            return answer
        self._peer_quiet = True
        return answer + self._abort("aborted", f"decode: {reason}", now, tell_peer=False)

    def on_aborted(self, peer: Peer, attempt: int, now: float) -> list[SenderAction]:
        """Take the peer's word that it no longer reads."""
        if self.state is not SenderState.ABORTING or not self._is_owner(peer, attempt):
            return []
        self._peer_quiet = True
        return self._try_close(now)

    def on_plane_lost(self, base: bytes) -> None:
        """Note that what was sent to this owner may never arrive: its next OPEN starts anew."""
        if self.owner is not None and self.owner.base == base:
            self.plane = ""

    def on_peer_lost(self, base: bytes, now: float) -> list[SenderAction]:
        """Note a broken connection: the lease runs on, an abort need not wait for an answer."""
        if self.owner is None or self.owner.base != base:
            return []
        self._peer_lost = True
        if self.state is not SenderState.ABORTING:
            return []
        self._peer_quiet = True
        return self._try_close(now)

    # ---- data ---------------------------------------------------------------------------------

    def take_data(self) -> DataOut | None:
        """Return the next DATA message the credit allows, and count it as in flight."""
        if self.plane not in SENT_PLANES or self.owner is None:
            return None
        if self.state not in (SenderState.STREAMING, SenderState.DRAINING):
            return None
        budget = min(self._granted - self._sent_bytes, self._policy.data_message_bytes)
        # A block larger than a message still goes, alone, once the credit covers it.
        limit = min(max(1, budget // self.frame_bytes), MAX_PAYLOAD_FRAMES)
        if self._granted - self._sent_bytes < self.frame_bytes:
            return None
        indexes = self._next_indexes(limit)
        if not indexes:
            return None
        is_tail = indexes[0] == self.num_blocks
        size = len(indexes) * self.frame_bytes
        self._sent_bytes += size
        self.bytes_moved += size
        self.blocks_moved += len(indexes)
        self._num_in_flight += 1
        blocks = tuple(self.block_of(i) for i in indexes)
        return DataOut(self.owner, self.attempt, indexes, blocks, is_tail)

    def on_data_left(self, now: float) -> list[SenderAction]:
        """Note that one DATA message no longer reads the pool."""
        self._num_in_flight -= 1
        return [*self._unpin_some(), *self._try_close(now)]

    @property
    def frame_bytes(self) -> int:
        """Bytes of one block as the owner gets it."""
        return self._policy.block_bytes if self.wire is None else self.wire.block_bytes

    def block_of(self, index: int) -> BlockId:
        """Return the pool block of a logical index; `num_blocks` is the tail."""
        if index < self.num_blocks:
            return self.block_ids[index]
        if self.final is None or self.final.info.tail_block is None:
            raise ValueError("no tail yet")
        return self.final.info.tail_block

    def _next_indexes(self, limit: int) -> tuple[int, ...]:
        indexes: list[int] = []
        while self._resend and len(indexes) < limit:
            if self._resend[0] == self.num_blocks and indexes:
                break
            indexes.append(self._resend.popleft())
            if indexes[0] == self.num_blocks:
                return tuple(indexes)
        while len(indexes) < limit and self._cursor < len(self.block_ids):
            if self._cursor not in self._sent:
                indexes.append(self._cursor)
                self._sent.add(self._cursor)
            self._cursor += 1
        is_tail_next = self._cursor == self.num_blocks and self.final is not None
        if not indexes and is_tail_next and self._has_tail and self._cursor not in self._sent:
            self._sent.add(self._cursor)
            indexes.append(self._cursor)
        return tuple(indexes)

    def _reset_stream(self, had: Iterable[int]) -> None:
        self._sent = set(had)
        self._resend: deque[int] = deque()
        self._cursor = 0
        self._sent_bytes = 0

    # ---- time ---------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When `on_time` wants to be called next."""
        if self.state is SenderState.ABORTING and not self._peer_quiet:
            return min(self._deadline, self._next_abort)
        return self._deadline

    def on_time(self, now: float) -> list[SenderAction]:
        """Do what is due: expire the ticket or the lease, repeat ABORT."""
        if self.state is SenderState.OFFERED and now >= self._deadline:
            return self._abort("expired", "no decode worker opened the ticket", now, False)
        if self.state in (SenderState.STREAMING, SenderState.DRAINING) and now >= self._deadline:
            self._peer_quiet = True  # from here on the seqlock refuses whatever it still reads
            return self._abort("peer_lost", "lease ran out", now, tell_peer=True)
        if self.state is SenderState.ABORTING and not self._peer_quiet:
            if now >= self._deadline:
                self._peer_quiet = True
                return self._try_close(now)
            if now >= self._next_abort and self.owner is not None:
                self._next_abort = now + self._policy.abort_retry_s
                return [SendAbort(self.owner, self.attempt, self.closed_reason)]
        if self.state is SenderState.ABORTING and now >= self._deadline:
            # Only DATA inside ZMQ holds us; it leaves when the connection does. Look again then.
            self._deadline = now + self._policy.lease_s
        return []

    def is_forgotten(self, now: float) -> bool:
        """True once even the tombstone is over."""
        return self.state is SenderState.CLOSED and now >= self._deadline

    # ---- the end ------------------------------------------------------------------------------

    def _abort(self, outcome: str, reason: str, now: float, tell_peer: bool) -> list[SenderAction]:
        if self.state in (SenderState.ABORTING, SenderState.CLOSED):
            return self._try_close(now)  # it may have been this that was waited for
        if self.owner is None or self._peer_lost:
            self._peer_quiet = True
        self._begin_abort(outcome, reason, now)
        actions: list[SenderAction] = []
        if tell_peer and self.owner is not None:
            actions.append(SendAbort(self.owner, self.attempt, reason))
        return actions + self._try_close(now)

    def _begin_abort(self, outcome: str, reason: str, now: float) -> None:
        self.state = SenderState.ABORTING
        self._outcome = outcome
        self.closed_reason = reason or outcome
        self._deadline = max(now, min(self._deadline, now + self._policy.lease_s))
        self._next_abort = now + self._policy.abort_retry_s
        self._resend.clear()

    def _try_close(self, now: float) -> list[SenderAction]:
        if self.state is not SenderState.ABORTING or self._released:
            return []
        if self._num_in_flight or not self._peer_quiet:
            return []
        self.state = SenderState.CLOSED
        self._released = True
        self._deadline = now + self._policy.tombstone_s
        return [Release(self._outcome, self.closed_reason)]

    def _is_owner(self, peer: Peer, attempt: int) -> bool:
        return self.owner is not None and self.owner.base == peer.base and attempt == self.attempt

    def _touch(self, now: float) -> None:
        if self.state in (SenderState.OFFERED, SenderState.STREAMING, SenderState.DRAINING):
            self._deadline = now + self._policy.lease_s

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self._num_in_flight >= 0
        assert self._released == (self.state is SenderState.CLOSED)
        assert len(self.block_ids) <= self.num_blocks
        assert not self._unpinned or self.final is not None
        assert self._sent_bytes <= self._granted or self._sent_bytes == 0
