"""Made-up load tests, by seed: records and the results of runs, searches and comparisons."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from loadtest.intervals import wilson
from loadtest.percentiles import CURVE_STEPS, distribution
from loadtest.records import Chunk, RequestRecord, Status
from loadtest.result import (
    Check,
    CompareResult,
    Distribution,
    Group,
    MetricChange,
    Probe,
    RunResult,
    SearchResult,
    TimelinePoint,
)
from loadtest.slo import Slo
from loadtest.ttft_bands import ttft_bands

CONFIDENCE = 0.95
SLO = Slo(ttft_s=0.45, tpot_s=0.04)
STARTED_AT = "2026-11-30T12:00:00+00:00"


def make_records(
    count: int, seed: int = 1, *, rate_rps: float = 20.0, slower: float = 1.0
) -> list[RequestRecord]:
    """Make requests as a client would have seen them, on a clock of whole nanoseconds."""
    chance = random.Random(seed)
    at_s = 0.0
    records = []
    for number in range(count):
        at_s += chance.expovariate(rate_rps)
        records.append(_record(chance, number, round(at_s, 9), slower))
    return records


def _record(chance: random.Random, number: int, at_s: float, slower: float) -> RequestRecord:
    is_hit = chance.random() < 0.4
    stages_ms = {
        "router": chance.uniform(0.5, 2.0),
        "queue": chance.expovariate(1 / 20.0) if chance.random() < 0.3 else 0.0,
        "queue_prefill": chance.expovariate(1 / 40.0),
        "prefill": chance.gammavariate(4, 6.0 if is_hit else 22.0) * slower,
        "handoff": chance.uniform(3, 9),
        "queue_decode": chance.uniform(0, 2),
        "decode": 0.0,
    }
    record = RequestRecord(
        number,
        at_s,
        sent_s=round(at_s + chance.expovariate(3000), 9),
        tenant=chance.choice(["acme", "globex"]),
        kind=chance.choice(["short", "long"]),
        isl=chance.randint(50, 2000),
        cached_tokens=512 if is_hit else 0,
        mode="REMOTE",
        prefill_worker=f"p{chance.randint(0, 1)}",
        decode_worker=f"d{chance.randint(0, 1)}",
        stages_ms=stages_ms,
        status=Status.OK,
    )
    if chance.random() < 0.01:
        record.status, record.code = Status.REJECTED, "overloaded"
        return record
    in_server_ms = sum(list(stages_ms.values())[:4])
    now_s = at_s + (in_server_ms + chance.uniform(1, 4)) / 1e3
    for _ in range(chance.randint(5, 60)):
        record.chunks.append(Chunk(round(now_s, 9), chance.choice([1, 1, 1, 2])))
        now_s += chance.gammavariate(20, 0.0011)
    record.done_s = round(now_s, 9)
    record.osl = record.num_heard = sum(chunk.num_tokens for chunk in record.chunks)
    return record


def make_run(
    records: Sequence[RequestRecord], *, name: str = "chat_rt", model: str = "smollm2"
) -> RunResult:
    """Make the result of a run from its records; times of the timeline are whole seconds."""
    ok = [record for record in records if record.status is Status.OK]
    good = sum(SLO.is_met(record) for record in records)
    duration_s = max(record.scheduled_s for record in records) + 1
    return RunResult(
        scenario={
            "name": name,
            "description": "Chats of four turns, as people write them.",
            "arrivals": {"kind": "poisson", "rate_rps": 20.0},
            "slo": SLO.model_dump(),
        },
        scenario_digest="0123456789abcdef",
        target={"kind": "grpc", "address": "127.0.0.1:50051", "model": model},
        machine={"cpu": "a processor", "cores": 2, "memory_gib": 8},
        commit="abc1234",
        seed=1,
        started_at=STARTED_AT,
        duration_s=duration_s,
        verdict="OK",
        verdict_reason="Every check of the run holds.",
        counts={"measured": len(records), "ok": len(ok), "rejected": len(records) - len(ok)},
        errors={"overloaded": len(records) - len(ok)},
        rates={
            "offered_rps": len(records) / duration_s,
            "achieved_rps": len(ok) / duration_s,
            "goodput_rps": good / duration_s,
            "output_tok_s": sum(record.osl for record in ok) / duration_s,
        },
        distributions=_distributions(ok),
        attainment=wilson(good, len(records), CONFIDENCE),
        stages_ms=_stages(ok),
        ttft_bands=ttft_bands(records),
        groups=_groups(ok),
        figures={"hit_share": 0.41, "ideal_hit_share": 0.44, "makespan_s": 41.5},
        checks=(
            Check(
                name="littles_law",
                is_ok=True,
                value=0.01,
                limit=0.05,
                message="Requests in flight agree with rate and latency within 1.0 %.",
            ),
            Check(
                name="dispatch",
                is_ok=True,
                value=1.4,
                limit=5.0,
                message="The client sent 99 % of requests at most 1.4 ms late.",
            ),
        ),
        timeline=_timeline(records, round(duration_s)),
        cost=make_cost(),
        raw_file="requests.jsonl.gz",
        raw_sha256="0" * 64,
    )


def _distributions(ok: Sequence[RequestRecord]) -> dict[str, Distribution]:
    return {
        "ttft_ms": _described([r.ttft_s for r in ok]),
        "ttft_sent_ms": _described([r.ttft_sent_s for r in ok]),
        "tpot_ms": _described([r.tpot_s for r in ok]),
        "itl_ms": _described([gap for r in ok for gap, _ in r.itls_s]),
        "e2e_ms": _described([r.e2e_s for r in ok]),
        "max_stall_ms": _described([r.max_stall_s for r in ok]),
        "handoff_gap_ms": _described([r.handoff_gap_s for r in ok]),
        "dispatch_delay_ms": _described([r.dispatch_delay_s for r in ok]),
    }


def _described(values_s: Sequence[float | None]) -> Distribution:
    known = [value * 1e3 for value in values_s if value is not None]
    return distribution(known, confidence=CONFIDENCE, curve_steps=CURVE_STEPS)


def _stages(ok: Sequence[RequestRecord]) -> dict[str, Distribution]:
    names = dict.fromkeys(name for record in ok for name in record.stages_ms)
    return {
        name: distribution([r.stages_ms[name] for r in ok], confidence=CONFIDENCE) for name in names
    }


def _groups(ok: Sequence[RequestRecord]) -> tuple[Group, ...]:
    parts = {
        "kind short": [r for r in ok if r.kind == "short"],
        "kind long": [r for r in ok if r.kind == "long"],
        "cached": [r for r in ok if r.cached_tokens],
        "not cached": [r for r in ok if not r.cached_tokens],
    }
    return tuple(
        Group(
            name=name,
            num_requests=len(part),
            distributions={
                "ttft_ms": _described([r.ttft_s for r in part]),
                "tpot_ms": _described([r.tpot_s for r in part]),
                "e2e_ms": _described([r.e2e_s for r in part]),
            },
            attainment=wilson(sum(map(SLO.is_met, part)), len(part), CONFIDENCE),
        )
        for name, part in parts.items()
    )


def _timeline(records: Sequence[RequestRecord], num_seconds: int) -> tuple[TimelinePoint, ...]:
    due: dict[int, list[RequestRecord]] = {}
    ended: dict[int, int] = {}
    for record in records:
        due.setdefault(int(record.scheduled_s), []).append(record)
        end_s = record.scheduled_s if record.done_s is None else record.done_s
        ended[int(end_s)] = ended.get(int(end_s), 0) + 1
    points: list[TimelinePoint] = []
    in_flight = 0
    for second in range(num_seconds):
        sent = due.get(second, [])
        failed = sum(r.status is Status.REJECTED for r in sent)
        in_flight += len(sent) - ended.get(second, 0)
        ttfts_ms = sorted(r.ttft_s * 1e3 for r in sent if r.ttft_s is not None)
        points.append(
            TimelinePoint(
                at_s=float(second),
                sent=len(sent),
                finished=ended.get(second, 0) - failed,
                failed=failed,
                in_flight=in_flight,
                tokens=sum(r.osl for r in sent),
                ttft_p50_ms=ttfts_ms[len(ttfts_ms) // 2] if ttfts_ms else None,
                replicas={"prefill": 2 if second < num_seconds / 2 else 3, "decode": 2},
                queued=in_flight // 4,
            )
        )
    return tuple(points)


def make_cost() -> dict[str, Any]:
    """Make what services.sim.cost tells of a run."""
    return {
        "duration_s": 60.0,
        "pools": [
            {"role": role, "gpu_h": 0.033, "gpus_usd": 0.083, "ops_usd": 0.0, "used_usd": used}
            for role, used in (("prefill", 0.041), ("decode", 0.062))
        ],
        "per_m_allocated": 0.099,
        "per_m_used": 0.061,
        "per_m_good": 0.104,
        "per_m_output": 1.78,
        "tenants": [{"tenant": "acme", "micro_usd": 91_000, "per_m_good": 0.102}],
        "break_even": {"api_usd": 0.31, "load_share": 0.54},
        "sensitivity": [{"name": "prices +20 %", "per_m_good": 0.125}],
    }


def make_search(seed: int = 1) -> SearchResult:
    """Make a search that found the rate from which requests become late."""
    run = make_run(make_records(200, seed))
    probes = [_probe(rate, 12.0) for rate in (1, 2, 4, 8, 16, 12, 14, 13)]
    return SearchResult(
        **{
            name: getattr(run, name)
            for name in ("scenario", "scenario_digest", "target", "machine", "commit", "seed")
        },
        started_at=STARTED_AT,
        duration_s=480.0,
        target_share=0.95,
        verdict="FOUND",
        verdict_reason="12 requests/s keep the SLO for 95 % of requests, in 3 of 3 more runs; 13 "
        "do not.",
        best_rps=12.0,
        knee_rps=12.5,
        probes=tuple(probes),
        verified=tuple(_probe(12.0, 12.0) for _ in range(3)),
        cost=make_cost(),
    )


def _probe(rate_rps: float, capacity_rps: float) -> Probe:
    over = max(0.0, rate_rps / capacity_rps - 1)
    share = max(0.02, 0.99 - 1.6 * over)
    is_met = rate_rps <= capacity_rps
    ttft_ms = 60 / max(0.05, 1 - min(rate_rps / (capacity_rps * 1.4), 0.98))
    return Probe(
        offered_rps=rate_rps,
        achieved_rps=min(rate_rps, capacity_rps * 1.05),
        attainment=wilson(round(share * 400), 400, CONFIDENCE),
        state="met" if is_met else "missed",
        reason=f"the interval is {'above' if is_met else 'below'} 95 %",
        duration_s=60.0,
        output_tok_s=min(rate_rps, capacity_rps * 1.05) * 240,
        user_tok_s=90 / (1 + rate_rps / 10),
        gpus=4,
        distributions={
            "ttft_ms": _spread(ttft_ms),
            "tpot_ms": _spread(11 + rate_rps),
        },
    )


def _spread(middle_ms: float) -> Distribution:
    values = [middle_ms * (0.5 + number / 1000) for number in range(1001)]
    return distribution(values, confidence=CONFIDENCE)


def make_compare(seed: int = 1) -> CompareResult:
    """Make a comparison in which B is slower."""
    run_a = make_run(make_records(600, seed))
    run_b = make_run(make_records(600, seed, slower=1.35))
    return CompareResult(
        name_a="main",
        name_b="slower prefill",
        a=run_a,
        b=run_b.model_copy(update={"commit": "def5678"}),
        confidence=0.99,
        metrics=(
            _change("ttft_p50_ms", 82.0, 103.0, (17.0, 26.0), "worse"),
            _change("ttft_p99_ms", 241.0, 290.0, (12.0, 88.0), "worse"),
            _change("tpot_p50_ms", 22.1, 22.0, (-0.4, 0.3), "inconclusive"),
            _change("goodput_rps", 19.8, 19.1, (-1.1, -0.3), "worse"),
        ),
        verdict="worse",
        verdict_reason="Three of four metrics are worse beyond their thresholds.",
        warnings=("The commits differ: abc1234 and def5678.",),
    )


def _change(name: str, a: float, b: float, ends: tuple[float, float], verdict: Any) -> MetricChange:
    return MetricChange(
        name=name,
        a=a,
        b=b,
        change=b - a,
        low=ends[0],
        high=ends[1],
        threshold=a * 0.02,
        p_value=0.7 if verdict == "inconclusive" else 0.0004,
        is_paired=name != "goodput_rps",
        is_better_lower=name != "goodput_rps",
        verdict=verdict,
        reason="the interval holds zero" if verdict == "inconclusive" else "beyond its threshold",
    )
