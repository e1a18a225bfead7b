"""Where the time to the first token goes, for quick and slow requests apart. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loadtest.records import Phase, RequestRecord, Status
from loadtest.result import StageBand

# The stages before the first token, in the order they happen.
TTFT_STAGES = ("router", "queue", "queue_prefill", "prefill")
_BANDS = (("fastest half", 0.0, 0.5), ("50 to 90 %", 0.5, 0.9), ("90 to 99 %", 0.9, 0.99))
_SLOWEST = ("slowest 1 %", 0.99, 1.0)


def ttft_bands(records: Iterable[RequestRecord]) -> tuple[StageBand, ...]:
    """Split measured requests by their rank in TTFT; () where the server tells no stages."""
    told = [
        (record.ttft_s, record)
        for record in records
        if record.phase is Phase.MEASURE
        and record.status is Status.OK
        and record.ttft_s is not None
        and record.stages_ms
    ]
    ranked = [record for _, record in sorted(told, key=lambda pair: (pair[0], pair[1].number))]
    bands = []
    for name, start, end in (*_BANDS, _SLOWEST):
        part = ranked[round(start * len(ranked)) : round(end * len(ranked))]
        if part:
            bands.append(_band(name, part))
    return tuple(bands)


def _band(name: str, records: Sequence[RequestRecord]) -> StageBand:
    ttft_ms = _mean([(record.ttft_s or 0.0) * 1e3 for record in records])
    told = [stage for stage in TTFT_STAGES if any(stage in r.stages_ms for r in records)]
    stages_ms = {stage: _mean([r.stages_ms.get(stage, 0.0) for r in records]) for stage in told}
    return StageBand(
        name=name,
        num_requests=len(records),
        ttft_ms=ttft_ms,
        stages_ms=stages_ms,
        outside_ms=ttft_ms - sum(stages_ms.values()),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
