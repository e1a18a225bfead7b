"""What single scenarios ask beyond latencies: interference, reuse, makespans, bursts. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import pairwise

from loadtest.percentiles import SHARES, distribution, is_too_few, share_of
from loadtest.records import Phase, PlannedRequest, RequestRecord, Sample, Status
from loadtest.result import FaultOutcome
from loadtest.slo import Slo
from services.common.quantile import rank_of

Figures = dict[str, float | str | None]

_TAIL = 0.99
_ATTAINED = 0.95
_RECOVERY_STEP_S = 5.0


def ideal_hits(
    requests: Iterable[PlannedRequest], counted: Container[int] | None = None
) -> float | None:
    """Return the part of prompt tokens that a cache without end would hold.

    Args:
        counted: numbers of requests whose tokens count; the others only fill the cache.
    """
    # What was read so far as a tree of pieces: a node is named by all pieces above it, and knows
    # how much of each key was read there.
    read: dict[tuple[int, int], int] = {}  # by (node, key)
    found = total = 0
    for request in requests:
        node = hits = 0
        is_found = True
        for piece in request.prompt.pieces:
            known = read.get((node, piece.key), 0)
            if is_found:
                hits += min(known, piece.num_tokens)
                is_found = known >= piece.num_tokens
            read[node, piece.key] = max(known, piece.num_tokens)
            node = hash((node, piece.key, piece.num_tokens))
        if counted is None or request.number in counted:
            found += hits
            total += request.prompt.num_tokens
    return found / total if total else None


def reuse(records: Sequence[RequestRecord], ideal: float | None) -> Figures:
    """Return the part of prompt tokens that were cached, and what was possible."""
    known = [r for r in records if r.cached_tokens is not None and r.status is Status.OK]
    prompt_tokens = sum(record.isl for record in known)
    if not prompt_tokens:
        return {}
    ratio = sum(record.cached_tokens or 0 for record in known) / prompt_tokens
    figures: Figures = {"hit_ratio": ratio}
    if ideal is not None:
        figures["ideal_hit_ratio"] = ideal
        figures["hit_of_ideal"] = ratio / ideal if ideal else None
    return figures


def interference(records: Sequence[RequestRecord], confidence: float) -> Figures:
    """Compare short requests that ran beside the prefill of a long one with those that did not.

    Beside are those that wrote while any long one had been sent and waited for its first token.
    """
    longs = [r for r in records if r.kind == "long" and r.sent_s is not None and r.chunks]
    shorts = [r for r in records if r.kind == "short" and r.status is Status.OK]
    if not longs or not shorts:
        return {}
    busy = _union((r.sent_s or 0.0, r.chunks[0].at_s) for r in longs)
    starts, ends = [start for start, _ in busy], [end for _, end in busy]
    beside: list[float] = []
    alone: list[float] = []
    for record in shorts:
        tpot_s = record.tpot_s
        if tpot_s is None:
            continue
        first, last = record.chunks[0].at_s, record.chunks[-1].at_s
        overlaps = bisect_left(starts, last) > bisect_right(ends, first)
        (beside if overlaps else alone).append(tpot_s * 1000)
    name, with_long, without = _tails(beside, alone, confidence)
    return {
        "short_beside_long": float(len(beside)),
        "short_alone": float(len(alone)),
        f"{name}_beside_long": with_long,
        f"{name}_alone": without,
        "interference": None if with_long is None or not without else with_long / without,
    }


def between_arms(
    beside: Sequence[RequestRecord], alone: Sequence[RequestRecord], confidence: float
) -> Figures:
    """Compare requests of a run with long ones to the same requests of one without."""
    tpots_ms = [
        [tpot_s * 1000 for record in arm if (tpot_s := record.tpot_s) is not None]
        for arm in (beside, alone)
    ]
    name, with_long, without = _tails(tpots_ms[0], tpots_ms[1], confidence)
    return {
        f"{name}_with_long": with_long,
        f"{name}_without_long": without,
        "interference": None if with_long is None or not without else with_long / without,
    }


def interference_told(figures: Figures, part: str) -> str:
    """Tell them in a sentence."""
    (name, with_long), (_, without), (_, factor) = figures.items()
    share = name.removeprefix("tpot_").removesuffix("_ms_with_long")
    if not (isinstance(with_long, float) and isinstance(without, float)):
        return "too few other requests to tell interference"
    assert isinstance(factor, float)
    return (
        f"TPOT {share} of the others is {with_long:.1f} ms with {part} and {without:.1f} ms "
        f"without: {factor:.2f} times"
    )


def _tails(
    beside: Sequence[float], alone: Sequence[float], confidence: float
) -> tuple[str, float | None, float | None]:
    """Return the highest percentile that both can bear; a p99 needs a thousand requests of each."""
    fewest = min(len(beside), len(alone))
    share = next((share for share in reversed(SHARES) if not is_too_few(fewest, share)), _TAIL)
    with_long, without = (
        share_of(distribution(part, confidence=confidence), share) if part else None
        for part in (beside, alone)
    )
    return f"tpot_p{round(share * 100)}_ms", with_long, without


def makespans(records: Sequence[RequestRecord]) -> Figures:
    """Return how long whole sessions took, from when their first turn was due.

    `records` are those of all phases: of a session that began in the measured one, every turn.
    """
    sessions: defaultdict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.session:
            sessions[record.session].append(record)
    turns = [
        session
        for session in sessions.values()
        if len(session) > 1 and min(session, key=_due).phase is Phase.MEASURE
    ]
    if not turns:
        return {}
    # A session that was cut short has no end: its time so far would look fast.
    whole = [s for s in turns if all(r.status is Status.OK and r.done_s is not None for r in s)]
    times = sorted(
        max(r.done_s or 0.0 for r in session) - min(r.scheduled_s for r in session)
        for session in whole
    )
    figures: Figures = {"sessions": float(len(turns)), "sessions_whole": float(len(whole))}
    for share in (0.5, 0.95):
        value = None if is_too_few(len(times), share) else times[rank_of(len(times), share) - 1]
        figures[f"makespan_p{round(share * 100)}_s"] = value
    return figures


def _due(record: RequestRecord) -> float:
    return record.scheduled_s


def burst(
    records: Sequence[RequestRecord],
    samples: Sequence[Sample],
    slo: Slo,
    start_s: float,
    ended_s: float,
) -> Figures:
    """Return what a burst cost from its start on: until when, how much, and in machines."""
    after = [record for record in records if record.scheduled_s >= start_s]
    later = [sample for sample in samples if sample.at_s >= start_s]
    recovered_s = recovery_s(after, slo, start_s, ended_s)
    figures: Figures = {
        "slo_recovery_s": recovered_s,
        "slo_debt_req_s": sum(_late_s(record, slo, ended_s) for record in after),
        "peak_in_flight": float(max((s.in_flight for s in later), default=0)),
        "lost_in_burst": float(sum(r.status in (Status.ERROR, Status.TIMEOUT) for r in after)),
    }
    queued = [sample.queued for sample in later if sample.queued is not None]
    if queued:
        figures["peak_queue"] = float(max(queued))
    sized = [(s.at_s, sum(s.replicas.values())) for s in samples if s.replicas]
    if sized:
        figures |= _machines(sized, start_s, recovered_s)
    return figures


def recovery_s(
    after: Sequence[RequestRecord], slo: Slo, start_s: float, ended_s: float
) -> float | None:
    """Return when the last slice of time that misses the target ends; None = it never did.

    In seconds since `start_s`, when the first of the requests `after` may be due.
    """
    slices: defaultdict[int, list[bool]] = defaultdict(list)
    for record in after:
        is_good = slo.judge(record, ended_s)
        if is_good is not None:
            slices[int((record.scheduled_s - start_s) / _RECOVERY_STEP_S)].append(is_good)
    missed = [number for number, goods in slices.items() if sum(goods) / len(goods) < _ATTAINED]
    if not missed:
        return 0.0
    return None if max(missed) == max(slices) else (max(missed) + 1) * _RECOVERY_STEP_S


def hurt(records: Sequence[RequestRecord], faults: Sequence[FaultOutcome]) -> Figures:
    """Return what a cluster that was hurt owed its clients; of all phases."""
    failed = sum(r.status in (Status.ERROR, Status.TIMEOUT, Status.REJECTED) for r in records)
    recoveries_s = [fault.recovery_s for fault in faults if not fault.failure]
    known_s = [recovery_s for recovery_s in recoveries_s if recovery_s is not None]
    return {
        "error_share": failed / len(records) if records else None,
        "fault_recovery_s": max(known_s) if known_s and len(known_s) == len(recoveries_s) else None,
        "tokens_lost": float(sum(record.num_lost for record in records)),
        "tokens_repeated": float(sum(record.num_repeated for record in records)),
    }


def _late_s(record: RequestRecord, slo: Slo, ended_s: float) -> float:
    """Return how long a request waited for its first token beyond the limit."""
    if slo.ttft_s is None:
        return 0.0
    until = record.done_s if record.done_s is not None else ended_s
    waited_s = record.ttft_s if record.ttft_s is not None else until - record.scheduled_s
    return max(0.0, waited_s - slo.ttft_s)


def _machines(
    sized: Sequence[tuple[float, int]], start_s: float, recovered_s: float | None
) -> Mapping[str, float | str | None]:
    before = [size for at, size in sized if at <= start_s]
    base = before[-1] if before else sized[0][1]
    grown = next((at - start_s for at, size in sized if at > start_s and size > base), None)
    if recovered_s is None:
        return {"first_new_worker_s": grown, "overshoot_gpu_s": None}
    healed_s = start_s + recovered_s
    # What stood there when the target was met again was enough; what came on top was not needed.
    enough = [size for at, size in sized if at <= healed_s]
    needed = enough[-1] if enough else base
    overshoot = sum(
        max(0, size - needed) * (next_at - at)
        for (at, size), (next_at, _) in pairwise(sized)
        if at >= healed_s
    )
    return {"first_new_worker_s": grown, "overshoot_gpu_s": overshoot}


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge spans that touch."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
