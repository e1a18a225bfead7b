"""Where a request's time went. Pure. The stages telescope: with `unattributed` they sum to e2e.

Boundaries are what the router itself saw (work sent, first token, last frame); what workers
report of their legs is fitted between them, never beyond them, so clocks need not agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.common.light_value import light_value
from services.router.api import RequestTiming


@light_value
class StageTimes:
    """What one worker measured of its leg, microseconds; zeros where it has nothing to say."""

    queue_prefill_us: int = 0
    prefill_us: int = 0
    handoff_us: int = 0
    queue_decode_us: int = 0
    decode_us: int = 0
    handoff_bytes: int = 0
    plane: str = ""
    prefill_chunks: int = 0
    recomputed: bool = False  # decode could not have the KV and computed the prompt itself
    handoff_blocks: int = 0
    handoff_blocks_deduped: int = 0
    handoff_blocks_attached: int = 0
    migration_us: int = 0  # workers do not tell handoff from migration: see `of_migration`
    migration_bytes: int = 0
    migration_blocks: int = 0
    migration_blocks_attached: int = 0
    migration_plane: str = ""

    def merged(self, other: StageTimes) -> StageTimes:
        """Join with a later report: of the same leg's next choice, or of another leg."""
        if self is NO_STAGES or other is NO_STAGES:
            return self if other is NO_STAGES else other
        return StageTimes(
            queue_prefill_us=max(self.queue_prefill_us, other.queue_prefill_us),
            prefill_us=max(self.prefill_us, other.prefill_us),
            handoff_us=max(self.handoff_us, other.handoff_us),
            queue_decode_us=max(self.queue_decode_us, other.queue_decode_us),
            decode_us=max(self.decode_us, other.decode_us),
            handoff_bytes=max(self.handoff_bytes, other.handoff_bytes),
            plane=other.plane or self.plane,
            prefill_chunks=max(self.prefill_chunks, other.prefill_chunks),
            recomputed=self.recomputed or other.recomputed,
            handoff_blocks=max(self.handoff_blocks, other.handoff_blocks),
            handoff_blocks_deduped=max(self.handoff_blocks_deduped, other.handoff_blocks_deduped),
            handoff_blocks_attached=max(
                self.handoff_blocks_attached, other.handoff_blocks_attached
            ),
            migration_us=self.migration_us + other.migration_us,
            migration_bytes=self.migration_bytes + other.migration_bytes,
            migration_blocks=self.migration_blocks + other.migration_blocks,
            migration_blocks_attached=(
                self.migration_blocks_attached + other.migration_blocks_attached
            ),
            migration_plane=other.migration_plane or self.migration_plane,
        )

    def of_migration(self) -> StageTimes:
        """Return them for a leg whose KV came from a decode worker: its transfer is no handoff."""
        return replace(
            self,
            handoff_us=0,
            handoff_bytes=0,
            plane="",
            handoff_blocks=0,
            handoff_blocks_deduped=0,
            handoff_blocks_attached=0,
            migration_us=self.handoff_us,
            migration_bytes=self.handoff_bytes,
            migration_blocks=self.handoff_blocks,
            migration_blocks_attached=self.handoff_blocks_attached,
            migration_plane=self.plane,
        )


NO_STAGES = StageTimes()  # nothing was reported


@light_value
class Whereabouts:
    """Where a request ran, and why there."""

    mode: str = ""
    reason: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    migrations: int = 0
    migration_gap_us: int = 0
    routed_locally: bool = False


@dataclass(slots=True)
class Marks:
    """Moments of one request on the router's clock, in seconds; None = did not happen."""

    received: float
    sent: float | None = None  # first work item
    first_token: float | None = None
    continued: float | None = None  # work item with the ticket sent
    decode_token: float | None = None  # first token of the decode leg
    newest_token: float | None = None
    first_frame: float | None = None  # given to the front door
    queued_s: float = 0.0  # of the time until `sent`: waited for room, or for a worker


# The stages of a request, in order; together they are its e2e time.
STAGES = (
    "router", "queue", "queue_prefill", "prefill", "handoff", "queue_decode", "migration", "decode",
    "unattributed",
)  # fmt: skip


def ttft_stages(marks: Marks, timing: RequestTiming) -> tuple[tuple[str, int], ...]:
    """Split the TTFT into stages that sum to it, in microseconds; () without a first frame.

    `link` is what the router waited between work sent and first token beyond what the worker
    accounts for: the way there and back, and attempts that were lost. `deliver` ends with the
    first frame.
    """
    if marks.first_frame is None or marks.first_token is None or marks.sent is None:
        return ()
    link = _us(marks.sent, marks.first_token) - timing.queue_prefill_us - timing.prefill_us
    return (
        ("router", timing.router_us),
        ("queue", timing.queue_us),
        ("queue_prefill", timing.queue_prefill_us),
        ("prefill", timing.prefill_us),
        ("link", link),
        ("deliver", _us(marks.first_token, marks.first_frame)),
    )


def attribute(
    marks: Marks,
    stages: StageTimes,
    ended: float,
    *,
    has_decode_report: bool,
    where: Whereabouts,
) -> RequestTiming:
    """Split the time from `received` to `ended` into stages.

    Args:
        marks: moments seen by the router.
        stages: reports of all legs, merged.
        ended: moment of the last frame.
        has_decode_report: False when the leg was cancelled at a stop string, so that nobody
            reported its decode time; the router's own view is used then.
        where: what else is told of it.
    """
    e2e = _us(marks.received, ended)
    # received <= sent <= first <= ended, whatever is missing.
    sent = min(max(_or(marks.sent, ended), marks.received), ended)
    first = min(max(_or(marks.first_token, ended), sent), ended)
    queue, router = _take(int(marks.queued_s * 1e6), _us(marks.received, sent))
    before = _us(sent, first)
    queue_prefill, before = _take(stages.queue_prefill_us, before)
    prefill, before = _take(stages.prefill_us, before)
    after = _us(first, ended) if marks.first_token is not None else 0
    handoff, after = _take(_handoff_after_first(marks, stages, has_decode_report), after)
    queue_decode, after = _take(stages.queue_decode_us, after)
    migration, after = _take(stages.migration_us, after)
    decode, after = _take(stages.decode_us if has_decode_report else after, after)
    at_router, at_prefill = router + queue, queue_prefill + prefill
    stages_us = at_router + at_prefill + handoff + queue_decode + migration + decode
    return RequestTiming(
        router_us=router,
        queue_us=queue,
        queue_prefill_us=queue_prefill,
        prefill_us=prefill,
        handoff_us=handoff,
        handoff_bytes=stages.handoff_bytes,
        queue_decode_us=queue_decode,
        decode_us=decode,
        unattributed_us=e2e - stages_us,
        ttft_us=_us(marks.received, marks.first_frame) if marks.first_frame is not None else 0,
        e2e_us=e2e,
        mode=where.mode,
        reason=where.reason,
        plane=stages.plane,
        prefill_worker=where.prefill_worker,
        decode_worker=where.decode_worker,
        migrations=where.migrations,
        migration_gap_us=where.migration_gap_us,
        prefill_chunks=stages.prefill_chunks,
        recomputed=stages.recomputed,
        handoff_blocks=stages.handoff_blocks,
        handoff_blocks_deduped=stages.handoff_blocks_deduped,
        handoff_blocks_attached=stages.handoff_blocks_attached,
        migration_us=migration,
        migration_bytes=stages.migration_bytes,
        migration_blocks=stages.migration_blocks,
        migration_blocks_attached=stages.migration_blocks_attached,
        migration_plane=stages.migration_plane,
        routed_locally=where.routed_locally,
    )


def _handoff_after_first(marks: Marks, stages: StageTimes, has_report: bool) -> int:
    """Handoff time that was not hidden behind prefill: the part after the first token."""
    if marks.continued is None or marks.first_token is None:
        return 0
    if has_report:
        hidden = _us(marks.continued, marks.first_token)
        return max(0, stages.handoff_us - hidden)
    if marks.decode_token is None:
        return 0
    return _us(marks.first_token, marks.decode_token)


def _or(moment: float | None, default: float) -> float:
    return default if moment is None else moment


def _take(wanted: int, left: int) -> tuple[int, int]:
    taken = max(0, min(wanted, left))
    return taken, left - taken


def _us(start: float, end: float) -> int:
    """Whole microseconds of a span; differences of floors telescope exactly."""
    return max(0, int(end * 1e6) - int(start * 1e6))
