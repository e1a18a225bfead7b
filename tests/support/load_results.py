"""Made-up load tests, by seed: records and the results of runs, searches and comparisons."""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from loadtest.analysis import Origin, analyse
from loadtest.intervals import wilson
from loadtest.percentiles import distribution
from loadtest.records import Chunk, PoolSize, RequestRecord, Sample, Status
from loadtest.result import (
    CompareResult,
    Distribution,
    MetricChange,
    Probe,
    RunResult,
    SearchResult,
)
from loadtest.run_log import RunLog
from loadtest.scenario import parse_scenario
from loadtest.slo import Slo
from loadtest.target import TargetFacts

CONFIDENCE = 0.95
SLO = Slo(ttft_s=0.45, tpot_s=0.04)
STARTED_AT = "2026-11-30T12:00:00+00:00"


def make_records(
    count: int, seed: int = 1, *, rate_rps: float = 20.0, slower: float = 1.0, max_chunks: int = 60
) -> list[RequestRecord]:
    """Make requests as a client would have seen them, on a clock of whole nanoseconds."""
    chance = random.Random(seed)
    at_s = 0.0
    records = []
    for number in range(count):
        at_s += chance.expovariate(rate_rps)
        records.append(_record(chance, number, round(at_s, 9), slower, max_chunks))
    return records


def _record(
    chance: random.Random, number: int, at_s: float, slower: float, max_chunks: int
) -> RequestRecord:
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
        record.done_s = round(at_s + 0.002, 9)
        return record
    in_server_ms = sum(list(stages_ms.values())[:4])
    now_s = at_s + (in_server_ms + chance.uniform(1, 4)) / 1e3
    for _ in range(chance.randint(5, max_chunks)):
        record.chunks.append(Chunk(round(now_s, 9), chance.choice([1, 1, 1, 2])))
        now_s += chance.gammavariate(20, 0.0011)
    record.done_s = round(now_s, 9)
    record.osl = record.num_heard = sum(chunk.num_tokens for chunk in record.chunks)
    return record


def make_run(
    records: Sequence[RequestRecord], *, name: str = "chat_rt", rate_rps: float = 20.0
) -> RunResult:
    """Analyse records as those of a run of their length; the cluster grows half way."""
    length_s = max((record.scheduled_s for record in records), default=1.0)
    values: dict[str, Any] = {
        "name": name,
        "description": "Chats of four turns, as people write them.",
        "arrivals": {"kind": "poisson", "rate_rps": rate_rps},
        "workload": {"kind": "fixed", "isl": 1000, "osl": 40},
        "slo": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s},
        "phases": {"measure_s": length_s},
        "seed": 1,
    }
    facts = TargetFacts("grpc", "127.0.0.1:50051", "smollm2", 8192, 49_152)
    duration_s = max([length_s, *(record.done_s or 0.0 for record in records)]) + 0.1
    log = RunLog(facts, STARTED_AT, list(records), duration_s=duration_s)
    log.samples = list(_samples(records, duration_s))
    log.notes = ["The client and the server share this machine."]
    machine = {"cpu": "a processor", "cores": 2, "memory_gib": 8}
    run = analyse(log, parse_scenario(values, name), Origin(machine, "abc1234"))
    figures = {
        "hit_ratio": 0.41,
        "hit_of_ideal": 0.93,
        "interference": None,
        "makespan_p50_s": 41.5,
    }
    return run.model_copy(update={"cost": make_cost(), "figures": figures})


def _samples(records: Sequence[RequestRecord], duration_s: float) -> Iterator[Sample]:
    begun = sorted(record.scheduled_s for record in records)
    ended = sorted(record.done_s for record in records if record.done_s is not None)
    for step in range(int(duration_s * 4)):
        at_s = step / 4
        in_flight = bisect_right(begun, at_s) - bisect_right(ended, at_s)
        num_prefill = 2 if at_s < duration_s / 2 else 3
        replicas = {"prefill": num_prefill, "decode": 2}
        desired = 2 if at_s < duration_s / 3 else 3
        pools = (
            PoolSize("prefill", desired, num_prefill, desired - num_prefill, 0),
            PoolSize("decode", 2, 2, 0, 0, "bounds"),
        )
        yield Sample(at_s, in_flight, 0.0004, replicas, queued=in_flight // 4, pools=pools)


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


@cache
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


def make_split_search() -> SearchResult:
    """Make a search over two splits of four workers."""
    probes = tuple(
        _probe(rate, capacity).model_copy(
            update={"prefill_workers": prefill, "decode_workers": 4 - prefill}
        )
        for prefill, capacity in ((2, 12.0), (3, 9.0))
        for rate in (4, 8, 16, 12, 10)
    )
    return make_search().model_copy(update={"probes": probes, "verified": probes[3:4]})


def _probe(rate_rps: float, capacity_rps: float) -> Probe:
    over = max(0.0, rate_rps / capacity_rps - 1)
    share = max(0.02, 0.99 - 1.6 * over)
    is_met = rate_rps <= capacity_rps
    ttft_ms = 60 / max(0.05, 1 - min(rate_rps / (capacity_rps * 1.4), 0.98))
    return Probe(
        offered_rps=rate_rps,
        achieved_rps=rate_rps,
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


@cache
def make_compare(seed: int = 1) -> CompareResult:
    """Make a comparison in which B is slower."""
    run_a = make_run(make_records(300, seed))
    run_b = make_run(make_records(300, seed, slower=1.35))
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


HOSTILE = (
    "\"'></title></style></svg></pre><script>alert(1)</script><img src=x onerror=alert(1)>&\x00"
)


def make_hostile(run: RunResult) -> RunResult:
    """Put a text that wants to be markup wherever a server or a person can put text."""
    told = run.model_dump(mode="json")
    free = ("scenario", "target", "machine", "counts", "errors", "figures", "cost", "rates")
    changes = {name: _hostile(told[name]) for name in free}
    texts = ("verdict_reason", "commit", "scenario_digest", "started_at", "raw_file", "notes")
    changes |= {name: _hostile(told[name]) for name in texts}
    for name in ("distributions", "stages_ms"):
        changes[name] = {f"{key}{HOSTILE}": item for key, item in told[name].items()}
    changes["groups"] = [{**group, "name": HOSTILE} for group in told["groups"]]
    changes["ttft_bands"] = [
        {**band, "name": HOSTILE, "stages_ms": _hostile(band["stages_ms"])}
        for band in told["ttft_bands"]
    ]
    changes["checks"] = [{**check, "message": HOSTILE} for check in told["checks"]]
    changes["timeline"] = [
        {**point, "replicas": _hostile(point["replicas"])} for point in told["timeline"]
    ]
    return RunResult.model_validate_json(json.dumps(told | changes))


def _hostile(value: Any) -> Any:
    """Put a hostile text in the place of every text and beside every key."""
    match value:
        case str():
            return value + HOSTILE
        case dict():
            return {f"{key}{HOSTILE}": _hostile(item) for key, item in value.items()}
        case list() | tuple():
            return [_hostile(item) for item in value]
    return value
