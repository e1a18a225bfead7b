"""What the worker shell says to an engine and what an engine says back (torch-free values).

The engine runs on a thread of its own. Commands may be sent from any thread; events are
delivered on the engine thread, one batch a step. Blocks belong to the engine thread: the
transfer layer touches a block only between the events that lend it and the commands that
give it back.

Handing off (prefill side), in this order for one request:
  OfferReady -> BlocksSealed* -> PrefillFinished -> command `source_released`
  (CancelSource may come at any point; `source_released` ends it in every case.
  Between PrefillFinished and that, UnpinWanted asks for blocks the reader has already pulled;
  they come back with `source_unpinned`, as often as there are some)
Receiving (decode side):
  ReceiveWanted -> BlocksReserved -> command `received` | `receive_failed`
  (CancelReceive may come at any point; `receive_failed` then ends it)
  Where `received` names attached blocks, they are read in the peer's pool until AttachReleased,
  which comes exactly once; `move_attached` asks for it soon.
Migrating (decode side, command `migrate`): MigrateRefused, or all of a hand-off at once, with
  the tokens so far in OfferReady; the other worker gets them in `EngineRequest.generated`.
  A PREFILL with `generated` does the same by itself after its first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

from services.common.ids import BlockHash, BlockId
from services.common.sampling import SamplingParams
from services.kv.attached import AttachedKv
from services.kv.form import EXACT

RequestKey = NewType("RequestKey", str)  # unique in this worker: router incarnation/request/attempt
TokenArray = npt.NDArray[np.uint32]


class WorkKind(Enum):
    """What part of a request a work item asks for."""

    WHOLE = "whole"  # prefill and decode here (LOCAL, STAY, single worker)
    PREFILL = "prefill"  # prefill here, then hand off
    CONTINUE = "continue"  # receive KV by ticket, then decode


class EndReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """One choice of a request under way and the tokens other workers made of it, maybe none."""

    choice: int
    generated: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One work item. `sampling.max_tokens` counts from token 0 of each choice."""

    key: RequestKey
    request_id: str
    kind: WorkKind
    token_ids: TokenArray  # the prompt
    block_hashes: tuple[BlockHash, ...]  # one per full prompt block
    sampling: SamplingParams
    deadline: float  # monotonic seconds
    priority: int = 0
    tenant: str = ""
    # Tokens of choice 0 that another worker made. A CONTINUE's ticket then holds the KV of the
    # prompt and all of these but the last, whose KV is not computed yet.
    generated: tuple[int, ...] = ()
    # WHOLE of several choices that other workers had under way: those that go on.
    resumed: tuple[ResumedChoice, ...] = ()
    # CONTINUE: form of the KV its ticket will probably bring (kv.form). Only blocks of that form
    # count as had; none do where it is unknown.
    kv_form: str = EXACT


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one generated token: itself, then the top alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token prefill sampled for one choice that goes on elsewhere."""

    choice: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Microseconds a work item spent in this worker, by stage; they telescope."""

    queue_us: int = 0  # submitted to first scheduled (CONTINUE: from KV received to first step)
    prefill_us: int = 0  # first scheduled to first token
    handoff_us: int = 0  # CONTINUE: submitted to KV received and verified
    decode_us: int = 0  # first token (CONTINUE: first step) to end
    prefill_chunks: int = 0
    chunks: tuple[tuple[int, int], ...] = ()  # (tokens, end in us since submitted), the first ones


# ---- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokensOut:
    """New tokens of one choice; first_index counts from the request's first generated token."""

    key: RequestKey
    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """The work item was not taken; nothing is held for it. `code` is of ERROR_TABLE."""

    key: RequestKey
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ChoiceDone:
    """One choice ended; with `all_choices` the whole work item did.

    A PREFILL item that goes on elsewhere ends with `handed_off` at PrefillFinished time;
    its blocks stay pinned until `source_released`.
    """

    key: RequestKey
    choice: int
    reason: EndReason
    all_choices: bool
    error_code: str | None = None
    error_message: str = ""
    handed_off: bool = False
    cached_tokens: int = 0
    computed_tokens: int = 0
    times: StageTimes = field(default_factory=StageTimes)


@dataclass(frozen=True, slots=True)
class OfferReady:
    """The first chunk is computed: this request's KV may be offered to decode workers.

    When a running request migrates, `num_tokens` counts what is computed of prompt and output,
    and `generated` holds every token so far.
    """

    key: RequestKey
    request_id: str
    num_tokens: int
    block_hashes: tuple[BlockHash, ...]
    tenant: str
    generated: tuple[int, ...] = ()
    is_exact: bool = True  # all of it was computed here or came unrounded


@dataclass(frozen=True, slots=True)
class BlocksSealed:
    """Full prompt blocks [lo, lo + len(block_ids)) are sealed and lent to the sender."""

    key: RequestKey
    lo: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """Prompt done, first tokens sampled; the partial last block, if any, is frozen."""

    key: RequestKey
    first: tuple[FirstToken, ...]  # choices that go on
    num_tokens: int
    tail_block: BlockId | None
    tail_valid_tokens: int
    prefill_us: int


@dataclass(frozen=True, slots=True)
class CancelSource:
    """Stop offering; the blocks come back with `source_released`."""

    key: RequestKey
    reason: str


@dataclass(frozen=True, slots=True)
class UnpinWanted:
    """Memory is short: from now on give back blocks as soon as their reader has pulled them."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class MigrateRefused:
    """This work item cannot move now; it goes on as if nothing had been asked."""

    key: RequestKey
    reason: str


@dataclass(frozen=True, slots=True)
class ReceiveWanted:
    """Open the ticket of this request; `have[i]` = full block i is already here.

    `block_hashes` are those of the full blocks the ticket must name. What is here is of
    `kv_form`: if the ticket brings another one, the two must not be mixed.
    """

    key: RequestKey
    have: tuple[bool, ...]
    block_hashes: tuple[BlockHash, ...] = ()
    kv_form: str = EXACT


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """Blocks the receiver may write: one per full block (None where `have`), and the tail's."""

    key: RequestKey
    block_ids: tuple[BlockId | None, ...]
    tail_block: BlockId | None


@dataclass(frozen=True, slots=True)
class CancelReceive:
    """Stop receiving; the blocks come back with `receive_failed`."""

    key: RequestKey
    reason: str


@dataclass(frozen=True, slots=True)
class AttachReleased:
    """Nothing of this request reads the peer's pool any more.

    `is_intact` is False when a block there has changed: then nothing of it was used.
    """

    key: RequestKey
    is_intact: bool


EngineEvent = (
    TokensOut
    | Refused
    | ChoiceDone
    | OfferReady
    | BlocksSealed
    | PrefillFinished
    | CancelSource
    | UnpinWanted
    | MigrateRefused
    | ReceiveWanted
    | BlocksReserved
    | CancelReceive
    | AttachReleased
)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a router needs to know about this engine's load; block counts are exact."""

    queued_uncached_tokens: int = 0
    resident_tokens: int = 0
    blocks_total: int = 0
    blocks_in_use: int = 0  # referenced by a request or lent to a transfer
    blocks_cached: int = 0  # unreferenced, content kept, evictable
    blocks_free: int = 0
    rate_tok_s: float = 0.0  # prefill, EWMA without warm-up steps
    tbt_a_us: float = 0.0
    tbt_b_us: float = 0.0
    running: int = 0
    waiting: int = 0
    requests_open: int = 0  # incl. ones whose blocks are lent out
    steps: int = 0
    preemptions: int = 0
    blocks_attached: int = 0  # of peers' pools, read in place; in no other count
    attach_moved: int = 0  # attached blocks moved into our pool
    attach_changed: int = 0  # work items whose attached blocks changed under them
    prefill_tokens: int = 0  # computed since the start, as the next two without the first steps
    decode_tokens: int = 0
    busy_s: float = 0.0  # in steps


@dataclass(frozen=True, slots=True)
class CacheDelta:
    """Blocks that entered and left the prefix cache since the last delta, in order."""

    added: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


class Engine(Protocol):
    """An engine on its own thread: the real one, or a scripted one for simulated workers."""

    def start(
        self,
        on_events: Callable[[Sequence[EngineEvent]], None],
        on_cache_delta: Callable[[CacheDelta], None],
    ) -> None:
        """Start the thread; the callbacks run on it and must not block."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Queue a work item (any thread). The answer is an event: tokens, Refused, ..."""
        ...

    def cancel(self, key: RequestKey, reason: str) -> None:
        """End a work item in whatever state it is; idempotent, unknown keys are ignored."""
        ...

    def pause(self, key: RequestKey) -> None:
        """Make no more tokens for a work item until `resume`; what it holds stays its own."""
        ...

    def resume(self, key: RequestKey) -> None:
        """Go on with a paused work item; idempotent, unknown keys are ignored."""
        ...

    def migrate(self, key: RequestKey) -> None:
        """Stop a decoding work item and offer its KV; it ends handed off, or MigrateRefused."""
        ...

    def source_released(self, key: RequestKey) -> None:
        """The sender no longer reads this request's blocks."""
        ...

    def source_unpinned(self, key: RequestKey, block_ids: Sequence[BlockId]) -> None:
        """The sender no longer reads these blocks of a request whose prefill is done."""
        ...

    def received(
        self,
        key: RequestKey,
        first: tuple[FirstToken, ...],
        prefill_us: int,
        kv_form: str = EXACT,
        attached: AttachedKv | None = None,
    ) -> None:
        """All blocks of a CONTINUE item are written and verified, their digests stored.

        `kv_form` says what their numbers are (kv.form); blocks that were had are of it too. Those
        of `attached` are exact and not written: they are verified and read where they are.
        """
        ...

    def move_attached(self, key: RequestKey) -> None:
        """Move what a request reads in a peer's pool into ours, soon; unknown keys are ignored."""
        ...

    def receive_failed(self, key: RequestKey, code: str, message: str, *, recompute: bool) -> None:
        """The receiver has stopped writing; with `recompute` prefill here, else end the item."""
        ...

    def load(self) -> EngineLoad:
        """Latest load (any thread)."""
        ...

    def set_role(self, prefill_weight: float, decode_weight: float) -> None:
        """Change the shares of the step budget."""
        ...

    def drop_cache(self) -> Future[tuple[int, int]]:
        """Forget cached prefixes no request uses; gives blocks dropped and kept, between steps."""
        ...

    def cached_hashes(self) -> tuple[BlockHash, ...]:
        """Every hint of what is in the prefix cache, parents before children (for a resync)."""
        ...

    def is_alive(self) -> bool:
        """False once the thread has died or made no progress for its watchdog time."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Stop the thread; open work items end as cancelled."""
        ...
