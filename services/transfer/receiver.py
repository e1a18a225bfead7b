r"""Decode side of one transfer, pure: events and `now` go in, actions come out.

    CONNECTING --connected--> OPENING --OPENED--> WAITING_BLOCKS --reserve--> PULLING
    PULLING --every block verified and FINAL--> DONE (blocks delivered, waits for CLOSED)
                                           \--> ATTACHED --detach--> DONE (plane attach)
        any --reject, refused too often, peer lost, deadline, cancel--> ABORTING --> RELEASED

On the attach plane full blocks are verified where they are and read there until `detach`: the lease
goes on being renewed, and whatever ends it asks by MoveIn that they be moved. Exactly one of
Deliver and Fail comes out. After it no slot is handed out for writing any more;
the thread that drives this object is the one that writes, so nothing is written after it either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

import numpy as np

from services.common.ids import BlockId
from services.transfer.planes import MAPPED_PLANES, POOL_FD_PLANES, SENT_PLANES
from services.transfer.values import FinalArgs, ReadyArgs, RejectCode, U64Array


class ReceiverState(Enum):
    """Where a transfer stands at the decode side."""

    CONNECTING = "connecting"
    OPENING = "opening"
    WAITING_BLOCKS = "waiting_blocks"
    PULLING = "pulling"
    ATTACHED = "attached"
    DONE = "done"
    ABORTING = "aborting"
    RELEASED = "released"


_LIVE = (
    ReceiverState.CONNECTING,
    ReceiverState.OPENING,
    ReceiverState.WAITING_BLOCKS,
    ReceiverState.PULLING,
)
_OPENED = (ReceiverState.WAITING_BLOCKS, ReceiverState.PULLING)


class Slot(IntEnum):
    """What is known of one block; the tail is the slot after the last full block."""

    UNKNOWN = 0
    ANNOUNCED = 1
    VERIFIED = 2
    HAD = 3


@dataclass(frozen=True, slots=True)
class ReceiverPolicy:
    """Times and sizes a receiver obeys."""

    block_bytes: int
    block_size: int
    connect_timeout_s: float
    open_timeout_s: float
    max_wait_s: float
    max_transfer_s: float
    stall_timeout_s: float
    max_nacks: int
    window_s: float  # time a full window of other transfers' data may take before ours
    open_retry_s: float = 0.5
    attach_max_s: float = 60.0
    close_retry_s: float = 0.25
    close_tries: int = 4
    max_reconnects: int = 1
    max_plane_losses: int = 2


# ---- actions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Ask for a (new) connection; answered by on_connected or on_connect_failed."""


@dataclass(frozen=True, slots=True)
class SendOpen:
    """Send OPEN with the blocks that need not come."""

    have: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class SendCredit:
    """Send CREDIT, a cumulative total."""

    total_bytes: int


@dataclass(frozen=True, slots=True)
class SendNack:
    """Ask for blocks again."""

    indexes: tuple[int, ...]
    tail: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SendDone:
    """Tell the peer that it may release."""

    digest_of_digests: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Tell the peer that the transfer is over."""

    reason: str


@dataclass(frozen=True, slots=True)
class SendAborted:
    """Answer the ABORT of the peer."""


@dataclass(frozen=True, slots=True)
class WorkReady:
    """There may be something for `take_pulls` or `credit_wanted` now."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Every block is written and verified."""

    final: FinalArgs


@dataclass(frozen=True, slots=True)
class MoveIn:
    """Attached blocks must be moved into our pool soon."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The receive is over without KV; nothing is written after this."""

    code: str
    message: str
    can_recompute: bool


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the transfer from the tables."""


ReceiverAction = (
    Connect
    | SendOpen
    | SendCredit
    | SendNack
    | SendDone
    | SendAbort
    | SendAborted
    | WorkReady
    | Deliver
    | MoveIn
    | Fail
    | Forget
)


@dataclass(slots=True)  # not frozen: one is made for every block, and freezing triples its cost
class Pull:
    """One block to copy out of the peer's pool, or to verify where it is (`in_place`)."""

    index: int
    source_block: int
    gen: int
    dest: BlockId
    in_place: bool = False


@dataclass(slots=True)
class InPlace:
    """What a receive on the attach plane reads where it is, and who has asked for it."""

    indexes: list[int] = field(default_factory=list)  # full blocks, in the order of their verdicts
    must_copy: str = ""  # why nothing (more) may be read in place
    is_abort_asked: bool = False  # the peer waits for ABORTED


class ReceiverTransfer:
    """One receive. All methods are events; none of them waits or reads a clock."""

    def __init__(
        self, num_tokens: int, have: Sequence[bool], policy: ReceiverPolicy, now: float
    ) -> None:
        self.num_tokens = num_tokens
        self.num_blocks = num_tokens // policy.block_size
        self.tail_valid = num_tokens % policy.block_size
        if len(have) != self.num_blocks:
            raise ValueError("have-bitmap does not fit the prompt")
        self.state = ReceiverState.CONNECTING
        self.plane = ""
        self.frame_bytes = policy.block_bytes  # of one block as it comes
        self.final: FinalArgs | None = None
        self.num_nacks = 0
        self.blocks_moved = 0
        self.blocks_deduped = sum(have)
        self.in_place = InPlace()
        self.opened_at: float | None = None
        self.open_sent_at: float | None = None
        self.first_ready_at: float | None = None
        self.finished_at: float | None = None
        self._policy = policy
        self._have = tuple(have)
        slots = [Slot.HAD if had else Slot.UNKNOWN for had in have]
        slots.append(Slot.UNKNOWN if self.tail_valid else Slot.HAD)
        self._slots = slots
        self._num_missing = sum(slot is Slot.UNKNOWN for slot in slots)
        self._dest: list[BlockId | None] | None = None
        self._gens = [0] * (self.num_blocks + 1)
        self._sources = [0] * (self.num_blocks + 1)
        self._digests: list[U64Array | None] = [None] * (self.num_blocks + 1)
        self._folded = 0  # all of them by XOR
        self._nacks = [0] * (self.num_blocks + 1)
        self._pull_queue: OrderedDict[int, None] = OrderedDict()
        self._pending = 0  # announced, not verified
        self._granted = 0  # cumulative credit of this connection
        self._accounted = 0  # of it: arrived, or given up as lost
        self._num_stalls = self._num_reconnects = self._num_plane_losses = self._tries = 0
        self._peer_gone = self._has_gap = self._is_open_there = self._ended = False
        self._phase_deadline = now + policy.connect_timeout_s
        self._retry_at = now
        self._transfer_deadline = now + policy.max_transfer_s
        self._progress_at = self._stall_base = now
        self._gap_open_at = now

    # ---- from the shell -----------------------------------------------------------------------

    def start(self) -> list[ReceiverAction]:
        """Ask for the connection."""
        return [Connect()]

    def on_connected(
        self, plane: str, now: float, frame_bytes: int | None = None
    ) -> list[ReceiverAction]:
        """Send OPEN over the plane that was agreed; `frame_bytes` if blocks do not come whole."""
        if self.state is not ReceiverState.CONNECTING:
            return []
        self.plane = plane
        if plane != "attach":
            self._forget_in_place()
        self.frame_bytes = frame_bytes or self._policy.block_bytes
        self.state = ReceiverState.OPENING
        self._granted = self._accounted = 0
        self._phase_deadline = now + self._policy.open_timeout_s
        if self.open_sent_at is None:
            self.open_sent_at = now
        return [self._open(now)]

    def on_connect_failed(self, code: str, message: str) -> list[ReceiverAction]:
        """Give up; without a connection there is nothing to abort over."""
        if self.state is not ReceiverState.CONNECTING:
            return []
        self._peer_gone = not self._is_open_there
        return self._fail(code, message, True)

    def reserve(
        self, block_ids: Sequence[BlockId | None], tail_block: BlockId | None, now: float
    ) -> list[ReceiverAction]:
        """Take the blocks to write."""
        if self.state not in _LIVE or self._dest is not None:
            return []
        dest = [*block_ids, tail_block]
        wrong = len(dest) != self.num_blocks + 1 or any(
            block is None and slot is not Slot.HAD
            for block, slot in zip(dest, self._slots, strict=False)
        )
        if wrong:
            return self._fail("internal", "reserved blocks do not fit the prompt", True)
        self._dest = dest
        if self.state is ReceiverState.WAITING_BLOCKS:
            return self._begin_pulling(now)
        return []

    def cancel(self, reason: str, now: float) -> list[ReceiverAction]:
        """Stop at the worker's own wish."""
        return self._fail("cancelled", reason, False) if self.state in _LIVE else []

    # ---- from the peer ------------------------------------------------------------------------

    def on_opened(self, now: float) -> list[ReceiverAction]:
        """Note that the lease is ours."""
        if self.state is not ReceiverState.OPENING:
            return []
        if self.opened_at is None:
            self.opened_at = now
        if self._dest is not None:
            return self._begin_pulling(now)
        self.state = ReceiverState.WAITING_BLOCKS
        self._phase_deadline = now + self._policy.max_wait_s
        return []

    def on_ready(self, ready: ReadyArgs, now: float) -> list[ReceiverAction]:
        """Note sealed blocks; announcements may come twice."""
        if self.state not in _OPENED:
            return []
        if ready.lo < 0 or ready.hi > self.num_blocks:
            return self._fail("handoff_failed", "READY names blocks the prompt has not", True)
        if self.first_ready_at is None:
            self.first_ready_at = now
        if all(slot is Slot.UNKNOWN for slot in self._slots[ready.lo : ready.hi]):
            self._announce_new(ready)
            self._progress_at = now
            return [WorkReady(), *self._try_finish(now)]
        num_known = self._pending
        news = zip(ready.gens.tolist(), ready.source_blocks.tolist(), ready.digests, strict=True)
        for index, (gen, source_block, digests) in enumerate(news, start=ready.lo):
            if self._slots[index] in (Slot.VERIFIED, Slot.HAD):
                continue
            self._gens[index] = gen
            self._sources[index] = source_block
            self._note_digests(index, digests)
            self._announce(index)
        if self._pending > num_known:
            self._progress_at = now  # not for what was announced before: data may still be stuck
        return [WorkReady(), *self._try_finish(now)]

    def on_final(self, final: FinalArgs, now: float) -> list[ReceiverAction]:
        """Take the end of the prefill if it is about this prompt."""
        if self.state not in _OPENED or self.final is not None:
            return []
        expected = (self.num_tokens, self.num_blocks, self.tail_valid)
        if (final.num_tokens, final.num_blocks, final.tail_valid_tokens) != expected:
            return self._fail("handoff_failed", "FINAL does not fit the prompt", True)
        self.final = final
        self._progress_at = now
        if self.first_ready_at is None:
            self.first_ready_at = now
        if self.tail_valid:
            tail = self.num_blocks
            self._gens[tail] = final.tail_gen
            self._sources[tail] = final.tail_source_block
            self._note_digests(tail, np.array([final.tail_digest], np.uint64))
            self._announce(tail)
        return [WorkReady(), *self._try_finish(now)]

    def on_reject(
        self, code: RejectCode, retry_after_s: float, detail: str
    ) -> list[ReceiverAction]:
        """Fail with the peer's reason; nothing is open there for us."""
        if self.state not in _LIVE:
            return []
        self._peer_gone = True  # the peer holds nothing of ours: no ABORT needed
        name = "fenced" if code is RejectCode.FENCED else "handoff_failed"
        if code is RejectCode.LAYOUT:
            name = "incompatible"
        return self._fail(name, f"prefill refused the ticket ({code.name}): {detail}", True)

    def on_abort(self, reason: str) -> list[ReceiverAction]:
        """Stop at the peer's wish; always answered."""
        if self.state is ReceiverState.ATTACHED:
            self.in_place.is_abort_asked = True  # answered by `detach`: until then blocks are read
            return self._move_in(f"prefill aborted: {reason}")
        answer: list[ReceiverAction] = [SendAborted()]
        if self.state not in _LIVE:
            return answer
        self._peer_gone = True
        return answer + self._fail("handoff_failed", f"prefill aborted: {reason}", True)

    def on_closed(self) -> list[ReceiverAction]:
        """Take the answer to DONE or ABORT."""
        if self.state not in (ReceiverState.DONE, ReceiverState.ABORTING):
            return []
        return self._forget()

    def on_renewed(self, is_known: bool, now: float) -> list[ReceiverAction]:
        """Fail if the peer no longer has the transfer."""
        if not is_known and self.state is ReceiverState.ATTACHED:
            self._peer_gone = True
            return self._move_in("the prefill worker took the lease back")
        if is_known or self.state not in _OPENED:
            return []
        if self._can_finish_alone():
            return []
        self._peer_gone = True
        return self._fail("handoff_failed", "the prefill worker took the offer back", True)

    def on_peer_lost(
        self, is_dead: bool, now: float, *, is_planned: bool = False
    ) -> list[ReceiverAction]:
        """Reconnect once, or fail; a mapping outlives its owner, so a known end is finished."""
        if self.state in (ReceiverState.DONE, ReceiverState.ABORTING):
            return self._forget()
        if self.state is ReceiverState.ATTACHED:
            self._peer_gone = True
            return self._move_in("the prefill worker is gone")
        if self.state not in _LIVE:
            return []
        if self._can_finish_alone():
            self._peer_gone = True
            return [WorkReady()]
        if is_dead or (not is_planned and self._num_reconnects >= self._policy.max_reconnects):
            self._peer_gone = True
            return self._fail("handoff_failed", "the prefill worker is gone", True)
        self._num_reconnects += not is_planned  # a cut of our own says nothing about the peer
        self.state = ReceiverState.CONNECTING
        self._is_open_there = False
        self._phase_deadline = now + self._policy.connect_timeout_s
        return [Connect()]

    def on_plane_lost(self, why: str, now: float) -> list[ReceiverAction]:
        """Go on over whatever plane the connection has left, with the blocks that are verified."""
        if self.state not in _LIVE or self.state is ReceiverState.CONNECTING:
            return []
        self._num_plane_losses += 1
        if self._num_plane_losses > self._policy.max_plane_losses:
            return self._fail("handoff_failed", f"plane {self.plane} was lost again: {why}", True)
        self.state = ReceiverState.CONNECTING
        self._is_open_there = True  # unlike after a broken connection, an ABORT gets through
        self._phase_deadline = now + self._policy.connect_timeout_s
        return [Connect()]

    def on_drain(self) -> list[ReceiverAction]:
        """The peer wants its blocks back: read nothing in place that can be copied."""
        self.in_place.must_copy = "the prefill worker wants its blocks back"
        if self.state is not ReceiverState.ATTACHED:
            return []
        return self._move_in(self.in_place.must_copy)

    def detach(self, is_intact: bool, now: float) -> list[ReceiverAction]:
        """Nothing reads the attached blocks any more: let the peer have them back."""
        if self.state is not ReceiverState.ATTACHED:
            return []
        if self.in_place.is_abort_asked:
            return [SendAborted(), *self._forget()]
        if self._peer_gone:
            return self._forget()
        self._tries = 1
        self._retry_at = now + self._policy.close_retry_s
        if is_intact:
            self.state = ReceiverState.DONE
            return [self._done()]
        self.state = ReceiverState.ABORTING
        return [SendAbort("an attached block has changed")]

    def on_gap(self, now: float) -> list[ReceiverAction]:
        """A message of the peer was lost: have the announcements repeated, but not in a storm."""
        if self.state not in _OPENED:
            return []
        if now < self._gap_open_at:
            self._has_gap = True  # `on_time` repeats OPEN once for all the gaps until then
            return []
        return [self._reopen_after_gap(now)]

    # ---- blocks -------------------------------------------------------------------------------

    def dest_of(self, index: int) -> BlockId | None:
        """Return where block `index` is to be written, or None if it is not wanted now."""
        if self.state is not ReceiverState.PULLING or self._dest is None:
            return None
        if not 0 <= index <= self.num_blocks or self._slots[index] is not Slot.ANNOUNCED:
            return None
        return self._dest[index]

    def digests_of(self, index: int) -> U64Array:
        """Return the announced digests of a block; one of them for the tail."""
        digests = self._digests[index]
        assert digests is not None, "only announced blocks are verified"
        return digests

    def take_pulls(self, limit: int) -> list[Pull]:
        """Return up to `limit` blocks to copy, or to verify in place, now."""
        pulls: list[Pull] = []
        if self.plane not in MAPPED_PLANES or self.state is not ReceiverState.PULLING:
            return pulls
        may_attach = self.plane == "attach" and not self.in_place.must_copy
        queue, slots, dests = self._pull_queue, self._slots, self._dest
        assert dests is not None, "nothing is pulled before blocks are reserved"
        while queue and len(pulls) < limit:
            index, _ = queue.popitem(last=False)
            dest = dests[index]
            if dest is not None and slots[index] is Slot.ANNOUNCED:
                in_place = may_attach and index < self.num_blocks
                pulls.append(Pull(index, self._sources[index], self._gens[index], dest, in_place))
        return pulls

    def has_pulls(self) -> bool:
        """Tell whether `take_pulls` would return something."""
        is_pulling = self.plane in MAPPED_PLANES and self.state is ReceiverState.PULLING
        return is_pulling and bool(self._pull_queue)

    def on_block(
        self, index: int, is_good: bool, now: float, why: str = ""
    ) -> list[ReceiverAction]:
        """Take the verdict on a block that was written."""
        if is_good:
            return self.on_good_blocks((index,), now)
        if self.dest_of(index) is None:
            return []
        self._progress_at = now
        return self._nack([index], why)

    def on_good_blocks(self, indexes: Sequence[int], now: float) -> list[ReceiverAction]:
        """Take blocks that were written and are what was announced."""
        if self.state is not ReceiverState.PULLING:
            return []
        slots, num_good = self._slots, 0
        for index in indexes:
            if slots[index] is Slot.ANNOUNCED:
                slots[index] = Slot.VERIFIED
                num_good += 1
        if num_good:
            self._pending -= num_good
            self._num_missing -= num_good
            self._num_stalls = 0
            self.blocks_moved += num_good
            self._progress_at = now
        return self._try_finish(now)

    def on_attached(self, indexes: Sequence[int], now: float) -> list[ReceiverAction]:
        """Take blocks that were verified where they are."""
        self.in_place.indexes += [index for index in indexes if self.dest_of(index) is not None]
        self.blocks_moved -= len(indexes)
        return self.on_good_blocks(indexes, now)

    def sources_of(self, indexes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the peer's blocks and their generations."""
        return [self._sources[i] for i in indexes], [self._gens[i] for i in indexes]

    def account(self, num_blocks: int) -> None:
        """Note DATA frames that arrived, wanted or not: their credit is used up."""
        self._accounted += num_blocks * self.frame_bytes

    @property
    def outstanding_bytes(self) -> int:
        """Credit granted and not yet used."""
        return max(0, self._granted - self._accounted)

    def credit_wanted(self) -> int:
        """Bytes of announced blocks no credit covers yet."""
        if self.plane not in SENT_PLANES or self.state is not ReceiverState.PULLING:
            return 0
        return max(0, self._pending * self.frame_bytes - self.outstanding_bytes)

    def grant(self, size_bytes: int, now: float) -> list[ReceiverAction]:
        """Raise the credit by what the shell's windows allow."""
        self._granted = max(self._granted, self._accounted) + size_bytes
        self._progress_at = now
        return [SendCredit(self._granted)]

    # ---- time ---------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When `on_time` wants to be called next."""
        if self.state in (ReceiverState.DONE, ReceiverState.ABORTING):
            return self._retry_at
        if self.state is ReceiverState.ATTACHED:
            return self._phase_deadline
        times = [self._transfer_deadline]
        if self._has_gap and self.state in _OPENED:
            times.append(self._gap_open_at)
        if self.state is ReceiverState.PULLING:
            base = max(self._progress_at, self._stall_base)
            times.append(base + self._policy.stall_timeout_s)
            return min(times)
        times.append(self._phase_deadline)
        if self.state is ReceiverState.OPENING:
            times.append(self._retry_at)
        return min(times)

    def on_time(self, now: float, link_progress_at: float = 0.0) -> list[ReceiverAction]:
        """Do what is due; data of other transfers on the same link is a sign of progress too."""
        if self.state in (ReceiverState.DONE, ReceiverState.ABORTING):
            return self._repeat_close(now)
        if self.state is ReceiverState.ATTACHED and now >= self._phase_deadline:
            self._phase_deadline = now + self._policy.attach_max_s
            return self._move_in("blocks have been attached for long")
        if self.state not in _LIVE:
            return []
        if now >= self._transfer_deadline:
            return self._fail("handoff_failed", "the handoff took longer than its limit", True)
        if self._has_gap and self.state in _OPENED and now >= self._gap_open_at:
            return [self._reopen_after_gap(now)]
        if self.state is ReceiverState.PULLING:
            return self._on_stall_check(now, link_progress_at)
        return self._on_phase_check(now)

    def _on_phase_check(self, now: float) -> list[ReceiverAction]:
        if now >= self._phase_deadline:
            waits_for = {
                ReceiverState.CONNECTING: "no connection to the prefill worker",
                ReceiverState.OPENING: "the prefill worker did not answer OPEN",
                ReceiverState.WAITING_BLOCKS: "no memory for the blocks within the limit",
            }[self.state]
            return self._fail("handoff_failed", waits_for, True)
        if self.state is ReceiverState.OPENING and now >= self._retry_at:
            return [self._open(now)]
        return []

    def _on_stall_check(self, now: float, link_progress_at: float) -> list[ReceiverAction]:
        latest = max(self._progress_at, min(link_progress_at, self._window_end()))
        # Added as in next_deadline: a difference may round to less when that moment has come.
        if now < latest + self._policy.stall_timeout_s:
            self._stall_base = latest
            return []
        self._progress_at = self._stall_base = now
        if self.plane in SENT_PLANES and self.outstanding_bytes > 0:
            self._num_stalls += 1
            if self._num_stalls > self._policy.max_nacks:
                return self._fail("handoff_failed", "no progress on the KV link", True)
            lost = [i for i, slot in enumerate(self._slots) if slot is Slot.ANNOUNCED]
            self._accounted = self._granted
            return [*self._nack(lost, "no progress"), self._open(now)]
        is_mapped = self.plane in MAPPED_PLANES
        if self._pending == 0 or (is_mapped and not self._pull_queue):
            # Waiting for prefill to compute, or for a READY that was lost, be it the answer to a
            # NACK: OPEN has it repeated.
            return [self._open(now)]
        return [WorkReady()]

    def _reopen_after_gap(self, now: float) -> SendOpen:
        self._has_gap = False
        self._gap_open_at = now + self._policy.open_retry_s
        return self._open(now)

    def _window_end(self) -> float:
        return self._progress_at + self._policy.window_s

    def _repeat_close(self, now: float) -> list[ReceiverAction]:
        if now < self._retry_at:
            return []
        if self._tries >= self._policy.close_tries:
            return self._forget()  # the peer's lease ends it there
        self._tries += 1
        self._retry_at = now + self._policy.close_retry_s
        if self.state is ReceiverState.DONE:
            return [self._done()]
        return [SendAbort("repeated")]

    # ---- inside -------------------------------------------------------------------------------

    def _open(self, now: float) -> SendOpen:
        self._retry_at = now + self._policy.open_retry_s
        got = tuple(slot in (Slot.VERIFIED, Slot.HAD) for slot in self._slots[: self.num_blocks])
        return SendOpen(got)

    def _announce(self, index: int) -> None:
        if self._slots[index] is Slot.UNKNOWN:
            self._slots[index] = Slot.ANNOUNCED
            self._pending += 1
        self._queue_pull(index)

    def _announce_new(self, ready: ReadyArgs) -> None:
        """Note blocks announced for the first time, many at once."""
        part, count = slice(ready.lo, ready.hi), ready.hi - ready.lo
        self._gens[part] = ready.gens.tolist()
        self._sources[part] = ready.source_blocks.tolist()
        self._digests[part] = list(ready.digests)
        self._folded ^= _fold(ready.digests)
        self._slots[part] = [Slot.ANNOUNCED] * count
        self._pending += count
        if self.plane in MAPPED_PLANES:
            self._pull_queue.update(dict.fromkeys(range(ready.lo, ready.hi)))

    def _note_digests(self, index: int, digests: U64Array) -> None:
        before = self._digests[index]
        if before is not None:
            self._folded ^= _fold(before)
        self._digests[index] = digests
        self._folded ^= _fold(digests)

    def _forget_in_place(self) -> None:
        """What was to be read where it is has to come after all: this plane cannot reach it."""
        for index in self.in_place.indexes:
            self._slots[index] = Slot.UNKNOWN
            self._num_missing += 1
        self.in_place.indexes.clear()

    def _queue_pull(self, index: int) -> None:
        if self.plane in MAPPED_PLANES:
            self._pull_queue[index] = None

    def _nack(self, indexes: list[int], why: str) -> list[ReceiverAction]:
        self.num_nacks += 1
        for index in indexes:
            self._nacks[index] += 1
            if self._nacks[index] > self._policy.max_nacks:
                return self._fail("handoff_failed", f"block {index} was wrong too often", True)
        if self._peer_gone:
            return self._fail("handoff_failed", "a block is wrong and its owner is gone", True)
        if self.plane in MAPPED_PLANES and self.num_blocks in indexes:
            self._queue_pull(self.num_blocks)  # FINAL is not repeated: read the tail again
        blocks = tuple(i for i in indexes if i < self.num_blocks)
        return [SendNack(blocks, self.num_blocks in indexes, why), WorkReady()]

    def _begin_pulling(self, now: float) -> list[ReceiverAction]:
        self.state = ReceiverState.PULLING
        self._progress_at = now
        for index, slot in enumerate(self._slots):
            if slot is Slot.ANNOUNCED:
                self._queue_pull(index)
        return [WorkReady(), *self._try_finish(now)]

    def _try_finish(self, now: float) -> list[ReceiverAction]:
        if self.state is not ReceiverState.PULLING or self.final is None or self._num_missing:
            return []
        self.finished_at = now
        self._ended = True
        deliver: list[ReceiverAction] = [Deliver(self.final)]
        if self.in_place.indexes:
            self.state = ReceiverState.ATTACHED
            self._phase_deadline = now + self._policy.attach_max_s
            why = self.in_place.must_copy or (
                "the prefill worker is gone" if self._peer_gone else ""
            )
            return deliver + self._move_in(why) if why else deliver
        self.state = ReceiverState.DONE
        if self._peer_gone:
            return deliver + self._forget()
        self._tries = 1
        self._retry_at = now + self._policy.close_retry_s
        return [*deliver, self._done()]

    def _done(self) -> SendDone:
        return SendDone(self._folded, self.blocks_moved * self.frame_bytes)

    def _fail(self, code: str, message: str, can_recompute: bool) -> list[ReceiverAction]:
        is_open = self.state is not ReceiverState.CONNECTING or self._is_open_there
        was_open = is_open and not self._peer_gone
        self.state = ReceiverState.ABORTING
        self._ended = True
        self._pull_queue.clear()
        failed: list[ReceiverAction] = [Fail(code, message, can_recompute)]
        if not was_open:
            return failed + self._forget()
        self._tries = 1
        self._retry_at = self._progress_at  # due at once; every repeat is paced
        return [SendAbort(message), *failed]

    def _move_in(self, reason: str) -> list[ReceiverAction]:
        return [MoveIn(reason)]

    def _forget(self) -> list[ReceiverAction]:
        self.state = ReceiverState.RELEASED
        return [Forget()]

    def _can_finish_alone(self) -> bool:
        # A refused block waits for its owner's word and is not queued: that word will not come.
        is_known = self.final is not None and len(self._pull_queue) == self._num_missing
        return self.plane in POOL_FD_PLANES and is_known and self.state in _OPENED

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self._ended == (self.state not in _LIVE)
        num_announced = self._slots.count(Slot.ANNOUNCED)
        assert self._pending == num_announced
        assert self._num_missing == num_announced + self._slots.count(Slot.UNKNOWN)


def _fold(digests: U64Array) -> int:
    return int(np.bitwise_xor.reduce(digests, axis=None))
