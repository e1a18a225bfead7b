"""The parts of a request that run at workers: what was sent where, and what came back. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from services.common.ids import BlockHash, Incarnation, WorkerId
from services.kv.layout import HINT_STRIDE_BLOCKS
from services.router.api import GenerateCall, RequestTiming
from services.router.booking import Booking
from services.router.policy import LOCAL, REMOTE, Decision, RequestFacts
from services.router.request import LogicalRequest
from services.router.timing import NO_STAGES, Marks, StageTimes, Whereabouts, attribute

PREFILL, CONTINUE, WHOLE = "prefill", "continue", "whole"  # kinds of a work item
MAX_CHOICES = 8  # of workers, remembered for a request


@dataclass(slots=True, eq=False)
class Leg:
    """One work item at one life of one worker."""

    kind: str  # PREFILL | CONTINUE | WHOLE
    worker_id: WorkerId
    incarnation: Incarnation
    attempt: int
    booking: Booking
    next_index: list[int]  # per choice: the first index this worker still owes
    sent_at: float
    is_open: bool = True
    is_handed_off: bool = False
    has_failed: bool = False
    is_lost: bool = False  # that life of the worker is over, or out of reach
    is_given_up: bool = False  # its worker stopped it to migrate it, and could not offer it
    has_tokens: bool = False
    has_report: bool = False
    ticket: bytes = b""
    generated: bytes = b""  # tokens so far, once this worker offers the request for migration
    source: Leg | None = None  # of CONTINUE: whose ticket it was given
    first_index: int = 0  # of the first token it was asked for
    predicted_s: float = 0.0  # until its first message, where it was chosen for a prefill
    goes_on: bool = False  # the client had tokens of another worker when this was sent
    migrate_asked_at: float = float("-inf")
    stages: StageTimes = NO_STAGES
    cached_tokens: int = 0

    @property
    def was_heard(self) -> bool:
        """Whether its worker has shown progress of any kind."""
        return self.has_tokens or self.has_report or bool(self.ticket)

    def note_tokens(self, choice: int, end_index: int) -> None:
        """Note that this worker delivered one choice's tokens up to `end_index` (exclusive)."""
        self.has_tokens = True
        if choice < len(self.next_index) and end_index > self.next_index[choice]:
            self.next_index[choice] = end_index

    @property
    def own_stages(self) -> StageTimes:
        """Its stage times as the request counts them.

        KV of tokens the client has came by a migration, not by a handoff; and a prefill done
        again for a request under way is none to the client.
        """
        if self.kind == CONTINUE:
            is_migration = self.source is not None and bool(self.source.generated)
            return self.stages.of_migration() if is_migration else self.stages
        return StageTimes(decode_us=self.stages.decode_us) if self.goes_on else self.stages

    def note_report(self, stages: StageTimes, cached_tokens: int) -> None:
        """Note what the worker says at the end of a choice."""
        self.has_report = True
        self.stages = self.stages.merged(stages)
        self.cached_tokens = max(self.cached_tokens, cached_tokens)


@dataclass(slots=True, eq=False)
class Progress:
    """A request's way through the cluster."""

    number: int  # the router's own; workers name the request by it
    call: GenerateCall
    facts: RequestFacts
    hashes: tuple[BlockHash, ...]
    logical: LogicalRequest
    marks: Marks
    depth: Mapping[WorkerId, int] = field(default_factory=dict)
    decision: Decision | None = None
    decided: Decision | None = None  # by the store, and not acted upon yet
    route_began: float = 0.0
    # Every choice of a worker, the newest last; a request that is moved often keeps its last ones.
    choices: deque[Decision] = field(default_factory=lambda: deque(maxlen=MAX_CHOICES))
    mode: str = ""
    reason: str = ""  # why that mode
    attempt: int = 0
    num_retries: int = 0  # after a refusal or a failure
    num_losses: int = 0  # after a worker was lost
    num_migrations: int = 0
    migration_gap_us: int = 0  # the longest
    failed: set[WorkerId] = field(default_factory=set)  # not to be tried again
    num_deaths: int = 0  # of workers it was new at
    keep_apart_until: float = float("-inf")  # of a suspect: from other suspects
    lost_at: set[WorkerId] = field(default_factory=set)  # to be tried again if nobody else can
    legs: list[Leg] = field(default_factory=list)

    def open_leg(self, worker_id: WorkerId, attempt: int) -> Leg | None:
        """Return the open leg a frame belongs to; None for one of a fenced or ended attempt."""
        for leg in self.legs:
            if leg.is_open and leg.attempt == attempt and leg.worker_id == worker_id:
                return leg
        return None

    def newest(self, kind: str) -> Leg | None:
        """Return the newest leg of a kind that has not failed."""
        for leg in reversed(self.legs):
            if leg.kind == kind and not leg.has_failed:
                return leg
        return None

    def note_failure(self, leg: Leg, *, is_loss: bool) -> None:
        """Count a failure; who would not is not asked again, who was lost only at a pinch."""
        if is_loss:
            self.num_losses += 1
            self.lost_at.add(leg.worker_id)
        else:
            self.num_retries += 1
            self.failed.add(leg.worker_id)

    def offer(self) -> Leg | None:
        """Return the newest leg that stopped and offers what it has, if its worker is there."""
        return next((g for g in reversed(self.legs) if g.generated and not g.is_lost), None)

    def note_prefix(self, worker_id: WorkerId) -> None:
        """Note that a worker has computed the whole prompt: nobody has a longer prefix of it."""
        self.depth = {**self.depth, worker_id: len(self.hashes) // HINT_STRIDE_BLOCKS}

    def legs_to_cancel(self) -> list[Leg]:
        """Return the legs whose workers may still hold something for this request.

        A worker that handed off holds the KV until another has it, and that one is known to have
        it only by its first token.
        """
        taken = [leg.source for leg in self.legs if leg.source is not None and leg.has_tokens]
        return [
            leg
            for leg in self.legs
            if leg.is_open
            or (leg.is_handed_off and not leg.has_failed and not any(t is leg for t in taken))
        ]

    @property
    def awaits_report(self) -> bool:
        """Say whether the prefill worker of a hand-off has still to say what it did."""
        prefill = self.newest(PREFILL)
        return prefill is not None and prefill.is_open and self.newest(CONTINUE) is not None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens from the cache of the first worker that did the prefill.

        What later ones found is the work of this very request.
        """
        first = next((g for g in self.legs if g.kind != CONTINUE and g.has_report), None)
        return min(first.cached_tokens, self.facts.num_tokens) if first is not None else 0

    @property
    def first_worker(self) -> str:
        """The worker that made, or is to make, the first token."""
        return next((g.worker_id for g in reversed(self.legs) if g.kind != CONTINUE), "")

    def timing(self, ended: float) -> RequestTiming:
        """Return the stage times and where the request ran."""
        stages = NO_STAGES
        for leg in self.legs:
            if not leg.has_failed:
                stages = stages.merged(leg.own_stages)
        last = self.legs[-1] if self.legs else None
        if self.num_migrations:
            decode_us = sum(leg.stages.decode_us for leg in self.legs if not leg.has_failed)
            stages = replace(stages, decode_us=decode_us)
        prefill, decode = self._workers()
        where = Whereabouts(
            mode=self.mode,
            reason=self.reason,
            prefill_worker=prefill,
            decode_worker=decode,
            migrations=self.num_migrations,
            migration_gap_us=self.migration_gap_us,
            routed_locally=self.decision is not None and self.decision.is_local,
        )
        has_report = last is not None and last.has_report
        return attribute(self.marks, stages, ended, has_decode_report=has_report, where=where)

    def _workers(self) -> tuple[str, str]:
        prefill, decode = self.newest(PREFILL), self.newest(CONTINUE)
        if self.mode == REMOTE:
            return (prefill.worker_id if prefill else ""), (decode.worker_id if decode else "")
        whole = self.newest(WHOLE)
        if self.num_migrations:
            whole = next((leg for leg in reversed(self.legs) if not leg.has_failed), whole)
        name = whole.worker_id if whole else ""
        return ("", name) if self.mode == LOCAL else (name, "")
