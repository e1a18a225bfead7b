"""The parts of a request that run at workers: what was sent where, and what came back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from services.common.ids import BlockHash, Incarnation, WorkerId
from services.router.api import GenerateCall, RequestTiming
from services.router.booking import Booking
from services.router.policy import LOCAL, REMOTE, Decision, RequestFacts
from services.router.request import LogicalRequest
from services.router.timing import Marks, StageTimes, attribute
from services.router.wire import CONTINUE, PREFILL, WHOLE


@dataclass(slots=True, eq=False)
class Leg:
    """One work item at one life of one worker."""

    kind: str  # PREFILL | CONTINUE | WHOLE
    worker_id: WorkerId
    incarnation: Incarnation
    attempt: int
    booking: Booking
    next_index: list[int]  # per choice: the first index this worker still owes
    is_open: bool = True
    is_handed_off: bool = False
    has_failed: bool = False
    is_given_up: bool = False  # its worker stopped it to migrate it, and could not offer it
    has_tokens: bool = False
    has_report: bool = False
    ticket: bytes = b""
    generated: bytes = b""  # tokens so far, once this worker offers the request for migration
    source: Leg | None = None  # of CONTINUE: whose ticket it was given
    first_index: int = 0  # of the first token it was asked for
    migrate_asked_at: float = float("-inf")
    stages: StageTimes = field(default_factory=StageTimes)
    cached_tokens: int = 0

    @property
    def is_migration(self) -> bool:
        """Whether it goes on where another worker had begun to answer."""
        return self.source is not None and bool(self.source.generated)

    def note_tokens(self, choice: int, end_index: int) -> None:
        """Note that this worker delivered one choice's tokens up to `end_index` (exclusive)."""
        self.has_tokens = True
        if choice < len(self.next_index):
            self.next_index[choice] = max(self.next_index[choice], end_index)

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
    mode: str = ""
    reason: str = ""  # why that mode
    attempt: int = 0
    num_retries: int = 0
    num_migrations: int = 0
    migration_gap_us: int = 0  # the longest
    failed: set[WorkerId] = field(default_factory=set)  # not to be tried again
    legs: list[Leg] = field(default_factory=list)

    def open_leg(self, worker_id: WorkerId, attempt: int) -> Leg | None:
        """Return the open leg a frame belongs to; None for one of a fenced or ended attempt."""
        for leg in self.legs:
            if leg.is_open and leg.attempt == attempt and leg.worker_id == worker_id:
                return leg
        return None

    def newest(self, kind: str) -> Leg | None:
        """Return the newest leg of a kind that has not failed."""
        return next((g for g in reversed(self.legs) if g.kind == kind and not g.has_failed), None)

    def legs_to_cancel(self) -> list[Leg]:
        """Return the legs whose workers may still hold something for this request.

        A prefill worker that handed off holds the KV until decode has it, and decode is known
        to have it only by its first token.
        """
        receiver = self.newest(CONTINUE)
        is_taken_over = receiver is not None and receiver.has_tokens
        return [
            leg
            for leg in self.legs
            if leg.is_open or (leg.is_handed_off and not leg.has_failed and not is_taken_over)
        ]

    @property
    def awaits_report(self) -> bool:
        """Say whether the prefill worker of a hand-off has still to say what it did."""
        prefill = self.newest(PREFILL)
        return prefill is not None and prefill.is_open and self.newest(CONTINUE) is not None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the cache of the worker that did the prefill."""
        for leg in reversed(self.legs):
            if leg.kind != CONTINUE and not leg.has_failed:
                return leg.cached_tokens
        return 0

    def timing(self, ended: float) -> RequestTiming:
        """Return the stage times and where the request ran."""
        stages = StageTimes()
        for leg in self.legs:
            if not leg.has_failed:
                own = leg.stages.of_migration() if leg.is_migration else leg.stages
                stages = stages.merged(own)
        last = self.legs[-1] if self.legs else None
        if self.num_migrations:
            decode_us = sum(leg.stages.decode_us for leg in self.legs if not leg.has_failed)
            stages = replace(stages, decode_us=decode_us)
        timing = attribute(
            self.marks, stages, ended, has_decode_report=last is not None and last.has_report
        )
        prefill, decode = self._workers()
        return replace(
            timing,
            mode=self.mode,
            reason=self.reason,
            prefill_worker=prefill,
            decode_worker=decode,
            migrations=self.num_migrations,
            migration_gap_us=self.migration_gap_us,
        )

    def _workers(self) -> tuple[str, str]:
        prefill, decode = self.newest(PREFILL), self.newest(CONTINUE)
        if self.mode == REMOTE:
            return (prefill.worker_id if prefill else ""), (decode.worker_id if decode else "")
        whole = self.newest(WHOLE)
        if self.num_migrations:
            whole = next((leg for leg in reversed(self.legs) if not leg.has_failed), whole)
        name = whole.worker_id if whole else ""
        return ("", name) if self.mode == LOCAL else (name, "")
