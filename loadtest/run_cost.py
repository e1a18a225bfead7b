"""What a run cost: its workers for its time, priced per token and per good token. Pure.

How busy a worker was is told by the stages of the requests it served: it had work while at least
one of them was in prefill or decode there. That is more than its processor was busy, never less.
Where no stages are told, all workers count as at work while any request is open: only the energy of
owned ones comes from that, which is then the most it can have been.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from loadtest.records import RequestRecord, Status
from loadtest.run_log import RunLog
from loadtest.slo import Slo
from services.common.errors import ConfigError
from services.sim.cost import CostReport, PoolUsage, RunUsage, TenantUsage, cost_of
from services.sim.prices import Prices, Role

_STAY = "STAY"  # the mode in which a worker of the prefill pool writes, too
_ROLES: tuple[Role, ...] = ("prefill", "decode", "aggregated")
# What cannot be told where the server tells no stages.
_OF_BUSY_TIME = {"used_usd", "idle_usd", "per_m_used", "opportunity_usd"}
# And where one pool did both, which nothing but its busy time splits.
_OF_SPLIT = {
    "prefill_usd", "decode_usd", "per_m_input_uncached", "per_m_input_billed", "per_m_output",
    "cache_saving_usd",
}  # fmt: skip
_Spans = list[tuple[float, float]]
_VIOLATED = (Status.OK, Status.ERROR, Status.TIMEOUT)  # if not good

Workers = Mapping[Role, int]


@dataclass(frozen=True, slots=True)
class Pricing:
    """What things cost, and how many workers there were; None = those that a request ran on."""

    prices: Prices
    workers: Workers | None = None


def parse_workers(text: str) -> Workers:
    """Read `prefill=2,decode=4` or `aggregated=3`."""
    workers: dict[Role, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        role = next((role for role in _ROLES if role == name), None)
        if role is None or not number.isdecimal() or int(number) == 0:
            raise ConfigError(f"--workers {text}: say it like prefill=2,decode=4 or aggregated=3")
        workers[role] = int(number)
    return workers


# Any: as JSON has it.
def run_cost(log: RunLog, slo: Slo, pricing: Pricing) -> dict[str, Any]:
    """Price a run.

    Raises:
        ConfigError: nothing was sent, more workers served than there are said to be, or nothing
            tells of any.
    """
    if not log.records or not log.duration_s:
        raise ConfigError("nothing was sent")
    workers = pricing.workers
    spans = _spans_by_worker(log.records)
    served = _served(log, workers)
    pools = [_pool(role, names, spans, workers, log) for role, names in served.items()]
    if not pools:
        raise ConfigError("the target does not tell which workers served: give --workers")
    refused = sum(record.status is Status.REJECTED for record in log.records)
    bad = [r for r in log.records if r.status in _VIOLATED and not slo.is_met(r)]
    usage = RunUsage(
        duration_s=log.duration_s,
        pools=tuple(pools),
        tenants=tuple(_tenants(log.records, slo)),
        num_violated=len(bad),
        num_refused=refused,
    )
    facts = _as_facts(cost_of(usage, pricing.prices))
    if not any(spans.values()):
        unknown = _OF_BUSY_TIME | (_OF_SPLIT if "aggregated" in served else set())
        for part in (facts, *facts["pools"]):
            part.update(dict.fromkeys(unknown & part.keys()))
    return facts


def _served(log: RunLog, workers: Workers | None) -> dict[Role, set[str]]:
    """Put workers into pools: by what they did, and in one pool where none handed over.

    What was said of the pools comes first, then what the target told of them.
    """
    prefill, everything = set[str](), set[str]()
    for record in log.records:
        reader = record.prefill_worker or record.decode_worker
        writer = record.decode_worker or record.prefill_worker
        everything |= {reader, writer} - {""}
        if record.mode == _STAY or reader != writer:
            prefill.add(reader)
    told = workers or {role for sample in log.samples for role in sample.replicas}
    if workers is None and not everything:
        return {}
    is_split = "aggregated" not in told if told else bool(prefill)
    if not is_split:
        return {"aggregated": everything}
    return {"prefill": prefill, "decode": everything - prefill}


def _pool(
    role: Role,
    names: set[str],
    spans: Mapping[tuple[str, str], _Spans],
    workers: Workers | None,
    log: RunLog,
) -> PoolUsage:
    if workers is not None and (number := workers.get(role, 0)) < len(names):
        raise ConfigError(f"--workers says {number} {role}, but {len(names)} served")
    prefill = {name: spans.get((name, "prefill"), []) for name in names}
    decode = {name: spans.get((name, "decode"), []) for name in names}
    provisioned = _provisioned(role, names, workers, log)
    busy_s = sum(_covered_s(prefill[n] + decode[n], log.duration_s) for n in names)
    if not any(spans.values()):  # no stages are told: at work while any request is open
        busy_s = provisioned * _covered_s(_open_spans(log), log.duration_s)
    return PoolUsage(
        role=role,
        provisioned_s=provisioned * log.duration_s,
        busy_s=busy_s,
        prefill_busy_s=sum(_covered_s(found, log.duration_s) for found in prefill.values()),
        decode_busy_s=sum(_covered_s(found, log.duration_s) for found in decode.values()),
    )


def _provisioned(role: Role, names: set[str], workers: Workers | None, log: RunLog) -> float:
    """Return how many workers a pool had: as said, else as the target told on the way."""
    if workers is not None:
        return workers.get(role, 0)
    told = [sample.replicas[role] for sample in log.samples if role in sample.replicas]
    return max(fmean(told) if told else 0.0, len(names))


def _spans_by_worker(records: Iterable[RequestRecord]) -> Mapping[tuple[str, str], _Spans]:
    """When each worker had a request in prefill and in decode, on the client's clock."""
    spans: defaultdict[tuple[str, str], _Spans] = defaultdict(list)
    for record in records:
        if record.chunks and (took_s := record.stages_ms.get("prefill", 0.0) / 1e3):
            first_s = record.chunks[0].at_s
            reader = record.prefill_worker or record.decode_worker
            spans[reader, "prefill"].append((first_s - took_s, first_s))
        took_s = record.stages_ms.get("decode", 0.0) / 1e3
        if record.done_s is not None and took_s:
            writer = record.decode_worker or record.prefill_worker
            spans[writer, "decode"].append((record.done_s - took_s, record.done_s))
    return spans


def _open_spans(log: RunLog) -> _Spans:
    return [
        (record.sent_s, log.duration_s if record.done_s is None else record.done_s)
        for record in log.records
        if record.sent_s is not None
    ]


def _covered_s(spans: _Spans, end_s: float) -> float:
    """Return how long at least one span lasted, between 0 and the end."""
    covered = until = 0.0
    for start_s, stop_s in sorted(spans):
        start_s, stop_s = max(start_s, until), min(stop_s, end_s)
        if stop_s > start_s:
            covered += stop_s - start_s
            until = stop_s
    return covered


def _tenants(records: Iterable[RequestRecord], slo: Slo) -> Iterable[TenantUsage]:
    by_tenant: defaultdict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        by_tenant[record.tenant].append(record)
    for tenant, sent in sorted(by_tenant.items()):
        # What was read and written for one that failed was paid for, and served nobody.
        served = [record for record in sent if record.status is Status.OK]
        yield TenantUsage(
            tenant=tenant,
            input_tokens=sum(record.isl for record in served),
            cached_tokens=sum(min(record.cached_tokens or 0, record.isl) for record in served),
            output_tokens=sum(record.osl for record in served),
            good_tokens=sum(record.isl + record.osl for record in served if slo.is_met(record)),
            prefill_busy_s=sum(record.stages_ms.get("prefill", 0.0) for record in sent) / 1e3,
            decode_busy_s=sum(record.stages_ms.get("decode", 0.0) for record in sent) / 1e3,
        )


def _as_facts(report: CostReport) -> dict[str, Any]:
    """Lay a report out with its sums, which are what people look for first."""
    totals = {
        "total_usd": report.total_usd,
        "used_usd": report.used_usd,
        "idle_usd": report.idle_usd,
        "usd_per_h": report.usd_per_h,
    }
    facts = asdict(report)
    for pool, entry in zip(report.pools, facts["pools"], strict=True):
        entry["total_usd"] = pool.total_usd
    return totals | facts
