"""The life of a work item: an explicit table of states, its sequences and its stage times."""

from __future__ import annotations

from enum import Enum

import numpy as np

from services.common.ids import BlockHash
from services.engine.api import EngineRequest, StageTimes, TokenArray, WorkKind
from services.engine.attachment import Attachment
from services.kv.block_table import BlockTable
from services.kv.form import EXACT, cache_key
from services.kv.hashing import HashScope, next_hash, pack_token_ids


class RequestState(Enum):
    """Where a work item is."""

    QUEUED = "queued"  # waits for blocks and a place in the batch; holds nothing
    OPENING = "opening"  # CONTINUE: the ticket is being opened; may hold cached blocks
    RECEIVING = "receiving"  # CONTINUE: blocks are lent to the receiver
    RUNNING = "running"  # at least one sequence is computed, or was and is preempted
    HANDING_OFF = "handing_off"  # prefill is done, blocks are lent to the sender
    RELEASING = "releasing"  # ended; the transfer layer has yet to let go
    FINISHED = "finished"


# Every state can reach an end, so abort is legal everywhere. RELEASING is left only when the
# transfer layer says so: there is no "timed out, release anyway".
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.OPENING: frozenset(
        {RequestState.RECEIVING, RequestState.QUEUED, RequestState.RELEASING, RequestState.FINISHED}
    ),
    RequestState.RECEIVING: frozenset(
        {RequestState.RUNNING, RequestState.QUEUED, RequestState.RELEASING, RequestState.FINISHED}
    ),
    RequestState.RUNNING: frozenset(
        {
            RequestState.QUEUED,
            RequestState.HANDING_OFF,
            RequestState.RELEASING,
            RequestState.FINISHED,
        }
    ),
    RequestState.HANDING_OFF: frozenset({RequestState.RELEASING, RequestState.FINISHED}),
    RequestState.RELEASING: frozenset({RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


class SequenceStatus(Enum):
    """Whether a sequence takes part in steps."""

    WAITING = "waiting"  # in the admission queue
    RUNNING = "running"  # has its blocks
    HELD = "held"  # has blocks that are lent; not computed
    DONE = "done"


MAX_TIMED_CHUNKS = 256  # of one request; later ones are counted, not timed


class StageClock:
    """Sums microseconds per stage; every microsecond since the start is in exactly one."""

    def __init__(self, stage: str, now: float) -> None:
        self._stage = stage
        self._since_us = self._start_us = _micros(now)
        self._num_chunks = 0
        self._chunks: list[tuple[int, int]] = []
        self._spent_us = {"queue": 0, "prefill": 0, "handoff": 0, "decode": 0}

    @property
    def stage(self) -> str:
        """The current stage."""
        return self._stage

    def enter(self, stage: str, now: float) -> None:
        """Close the current stage and begin the next."""
        now_us = _micros(now)
        self._spent_us[self._stage] += now_us - self._since_us
        self._stage, self._since_us = stage, now_us

    def chunk(self, num_tokens: int, now: float) -> None:
        """A chunk of the prompt was computed."""
        self._num_chunks += 1
        if len(self._chunks) < MAX_TIMED_CHUNKS:
            self._chunks.append((num_tokens, _micros(now) - self._start_us))

    def times(self, now: float) -> StageTimes:
        """Stage times up to `now`; they sum to now minus the start."""
        self.enter(self._stage, now)
        spent = self._spent_us
        return StageTimes(
            queue_us=spent["queue"],
            prefill_us=spent["prefill"],
            handoff_us=spent["handoff"],
            decode_us=spent["decode"],
            prefill_chunks=self._num_chunks,
            chunks=tuple(self._chunks),
        )


def _micros(now: float) -> int:
    return int(now * 1e6)


class Sequence:
    """One choice of a request: its tokens, its blocks and how far they are computed.

    Before the first token all choices share the first sequence (the trunk).
    Invariant while RUNNING: the first `num_sealed` blocks are sealed, tokens
    [0, num_computed) have their KV in the table's blocks.
    """

    def __init__(self, request: Request, choice: int) -> None:
        self.request = request
        self.choice = choice
        self.prompt = request.prompt
        self.generated: list[int] = []
        self.table = BlockTable(request.block_size)
        self.num_computed = 0
        self.num_sealed = 0
        self.kv_form = EXACT  # of the received blocks in the table
        self.status = SequenceStatus.WAITING
        self.waiting_since = 0.0
        self.num_uncached_hint = 0  # tokens to compute as of submission, for the queue's order
        self.was_preempted = False
        self.last_step = -1  # last step this sequence was part of
        self.attached: Attachment | None = None  # blocks read in a peer's pool
        self._more_hashes: list[BlockHash] = []  # of full blocks past the prompt's

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.prompt) + len(self.generated)

    @property
    def num_pending(self) -> int:
        """Known tokens whose KV is not computed."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Say whether only the newest token is left to compute."""
        return self.num_pending == 1 and bool(self.generated)

    def token_ids(self, lo: int, hi: int) -> TokenArray:
        """Return tokens [lo, hi)."""
        split = len(self.prompt)
        if hi <= split:
            return self.prompt[lo:hi]
        tail = np.array(self.generated[max(lo - split, 0) : hi - split], dtype=np.uint32)
        return tail if lo >= split else np.concatenate((self.prompt[lo:], tail))

    def known_hashes(self) -> tuple[BlockHash, ...]:
        """Hashes of the full blocks hashed so far."""
        prompt = self.request.prompt_hashes
        return (*prompt, *self._more_hashes) if self._more_hashes else prompt

    def block_hash(self, idx: int) -> BlockHash:
        """Return the hash of full block `idx`; the chain goes on past the prompt."""
        num_prompt = len(self.request.prompt_hashes)
        while idx >= num_prompt + len(self._more_hashes):
            at = num_prompt + len(self._more_hashes)
            size = self.table.block_size
            tokens = pack_token_ids(self.token_ids(at * size, (at + 1) * size))
            self._more_hashes.append(next_hash(self.parent_hash(at) or self.request.root, tokens))
        if idx < num_prompt:
            return self.request.prompt_hashes[idx]
        return self._more_hashes[idx - num_prompt]

    def cache_key(self, idx: int) -> BlockHash:
        """Return what full block `idx` is called in the prefix cache."""
        return cache_key(self.block_hash(idx), self.kv_form)

    def parent_hash(self, idx: int) -> BlockHash | None:
        """Return the hash of the block before block `idx`, None for the first."""
        return self.block_hash(idx - 1) if idx else None


class Request:
    """One work item in the engine."""

    def __init__(
        self, source: EngineRequest, scope: HashScope, arrival: int, now: float, block_size: int
    ) -> None:
        self.source = source
        self.key = source.key
        self.kind = source.kind  # a CONTINUE whose receive failed goes on as WHOLE
        self.prompt = source.token_ids
        self.prompt_hashes = source.block_hashes
        self.root = scope.root
        self.block_size = block_size
        self.arrival = arrival
        is_continue = source.kind is WorkKind.CONTINUE
        self.state = RequestState.OPENING if is_continue else RequestState.QUEUED
        self.clock = StageClock("handoff" if is_continue else "queue", now)
        # Choices under way share nothing but what the prefix cache holds: they begin forked.
        self.is_forked = bool(source.resumed)
        self.sequences = [Sequence(self, one.choice) for one in source.resumed]
        for seq, one in zip(self.sequences, source.resumed, strict=True):
            seq.generated.extend(one.generated)
        if not self.is_forked:
            self.sequences = [Sequence(self, 0)]
            # Until a receive brings the last one back, a CONTINUE knows what its ticket covers.
            known = source.generated[:-1] if is_continue else source.generated
            self.trunk.generated.extend(known)
        self.is_offered = False
        self.is_lent = False  # offered, and the sender may still read
        self.is_paused = False  # gets no decode steps: its router lags
        self.is_unpinning = False  # asked to give pulled blocks back as it goes
        self.num_announced = 0  # blocks named in BlocksSealed so far
        self.cached_tokens: int | None = None  # None until first admitted
        self.computed_tokens = 0

    @property
    def trunk(self) -> Sequence:
        """The sequence all choices share until the first token."""
        return self.sequences[0]

    @property
    def live(self) -> list[Sequence]:
        """Sequences that have not ended."""
        return [seq for seq in self.sequences if seq.status is not SequenceStatus.DONE]

    @property
    def is_ending(self) -> bool:
        """Say whether it has ended for everyone but the transfer layer."""
        return self.state is RequestState.RELEASING

    @property
    def num_slots(self) -> int:
        """Places in the batch a sequence of this request takes when admitted."""
        if self.is_forked or self.kind is WorkKind.PREFILL:
            return 1
        return self.source.sampling.n

    def move(self, state: RequestState) -> None:
        """Change state; RuntimeError when the table does not allow it."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a request cannot go from {self.state.value} to {state.value}")
        self.state = state
