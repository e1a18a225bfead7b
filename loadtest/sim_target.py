"""A simulated cluster as a target: the same schedule in virtual time, by the real policies.

Open loops only: what users in a closed loop do next is decided while a run goes on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.records import Chunk, Piece, PlannedRequest, RequestRecord, Sample, Status
from loadtest.scenario import Phases
from loadtest.target import TargetFacts, TargetUnusable
from services.common.errors import ConfigError
from services.sim.cluster import AGGREGATED, DECODE, PREFILL, ClusterSpec
from services.sim.performance import default_model, read_model
from services.sim.placement import OURS, POLICIES
from services.sim.report import OK, Served, SimReport
from services.sim.simulate import simulate
from services.sim.workload import Arrival, Workload

_UNIT_TOKENS = 64
_MAX_POOL, _MAX_ROUTERS = 4096, 64  # as of `isthmus sim`
_POOLS = (PREFILL, DECODE, AGGREGATED)
_NUM_SAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class SimSpec:
    """What `sim:KEY=VALUE,...` names: sizes of pools, a file of the workers' pace, a policy."""

    cluster: ClusterSpec
    policy: str = OURS


def read_spec(text: str) -> SimSpec:
    """Read what follows `sim:`; TargetUnusable says what it may be."""
    values = dict(part.partition("=")[::2] for part in text.split(",") if part)
    try:
        unknown = set(values) - {*_POOLS, "routers", "model", "policy"}
        if unknown:
            raise ValueError(f"{min(unknown)!r} is not known")
        if AGGREGATED in values and {PREFILL, DECODE} & set(values):
            raise ValueError("give prefill and decode workers, or aggregated ones")
        policy = values.get("policy", OURS)
        if policy not in POLICIES:
            raise ValueError(f"there is no policy {policy!r}")
        sizes = {pool: _count(values, pool, 0, _MAX_POOL) for pool in _POOLS}
        if not any(sizes.values()):
            sizes |= {PREFILL: 1, DECODE: 1}
        cluster = ClusterSpec(
            num_prefill=sizes[PREFILL],
            num_decode=sizes[DECODE],
            num_aggregated=sizes[AGGREGATED],
            num_routers=_count(values, "routers", 1, _MAX_ROUTERS),
            model=read_model(Path(values["model"])) if "model" in values else default_model(),
        )
    except (ValueError, ConfigError) as error:
        raise TargetUnusable(
            f"sim:{text}: {error}; give sim:prefill=N,decode=N or sim:aggregated=N, and if "
            f"wanted routers=N, model=FILE, policy={'|'.join(POLICIES)}"
        ) from None
    return SimSpec(cluster, policy)


def _count(values: dict[str, str], key: str, default: int, highest: int) -> int:
    text = values.get(key, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= highest):
        raise ValueError(f"{key}={text} is no number up to {highest}")
    return int(text)


@dataclass(slots=True)
class SimTarget:
    """Runs a whole schedule at once."""

    spec: SimSpec
    phases: Phases
    seed: int = 0
    report: SimReport | None = field(default=None, init=False)  # of the last run

    def facts(self) -> TargetFacts:
        """Say what is simulated."""
        sizes = {pool: count for pool, count in self.spec.cluster.sizes().items() if count}
        told = ", ".join(f"{count} {pool}" for pool, count in sizes.items())
        return TargetFacts(
            kind="sim",
            address=f"{told}, policy {self.spec.policy}",
            model=self.spec.cluster.model.name,
            notes=(
                "simulated in virtual time; only the first token and the mean pace of an answer "
                "are known, so a stall within it shows nowhere",
            ),
        )

    def run(self, schedule: Sequence[PlannedRequest]) -> list[RequestRecord]:
        """Simulate requests; those that wait for others come `wait_s` after their end.

        As with a server, nothing is sent that becomes due after the last phase.
        """
        end_s = math.inf if self.phases.end_s is None else self.phases.end_s
        heads = sorted((r for r in schedule if r.after is None), key=lambda r: r.at_s or 0.0)
        children: dict[int | None, list[PlannedRequest]] = defaultdict(list)
        for request in schedule:
            if request.after is not None:
                children[request.after].append(request)
        order = list(heads)
        due_s = [request.at_s or 0.0 for request in heads]
        units = _Units()

        def follow(number: int, now_s: float) -> list[Arrival]:
            arrivals = []
            for child in children.get(order[number].number, ()):
                at_s = max(child.at_s or 0.0, now_s + child.wait_s)
                if at_s >= end_s:
                    continue
                order.append(child)
                due_s.append(at_s)
                arrivals.append(units.arrival(child, at_s))
            return arrivals

        arrivals = tuple(units.arrival(r, at) for r, at in zip(heads, due_s, strict=True))
        self.report = report = simulate(
            Workload("schedule", _UNIT_TOKENS, arrivals),
            self.spec.cluster,
            policy=self.spec.policy,
            seed=self.seed,
            follow=follow,
        )
        records = [_record(order[s.number], due_s[s.number], s) for s in report.requests]
        for record in records:
            record.phase = self.phases.at(record.scheduled_s)
        return sorted(records, key=lambda record: record.scheduled_s)

    def samples(self, records: Sequence[RequestRecord]) -> list[Sample]:
        """Tell how many requests were open at equal steps of the time."""
        began = sorted(record.scheduled_s for record in records)
        ended = sorted(record.done_s or record.scheduled_s for record in records)
        step_s = ended[-1] / _NUM_SAMPLES if ended else 0.0
        replicas = {pool: n for pool, n in self.spec.cluster.sizes().items() if n}
        times = [(n + 1) * step_s for n in range(_NUM_SAMPLES if step_s else 0)]
        return [
            Sample(at, bisect_right(began, at) - bisect_right(ended, at), None, replicas)
            for at in times
        ]


class _Units:
    """Numbers for runs of tokens: equal after equal beginnings, as the simulation wants them."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = {}

    def arrival(self, request: PlannedRequest, at_s: float) -> Arrival:
        """Describe one request."""
        units, before = [], -1
        for content in _cut(request.prompt.pieces):
            before = self._numbers.setdefault((before, content), len(self._numbers))
            units.append(before)
        return Arrival(at_s, request.prompt.num_tokens, request.max_tokens, tuple(units))


def _cut(pieces: Sequence[Piece]) -> list[tuple[tuple[int, int, int], ...]]:
    """Cut a prompt into units: of which pieces, from where, how many tokens."""
    units: list[tuple[tuple[int, int, int], ...]] = []
    current: list[tuple[int, int, int]] = []
    room = _UNIT_TOKENS
    for piece in pieces:
        start = 0
        while start < piece.num_tokens:
            taken = min(room, piece.num_tokens - start)
            current.append((piece.key, start, taken))
            start += taken
            room -= taken
            if not room:
                units.append(tuple(current))
                current, room = [], _UNIT_TOKENS
    if current:
        units.append(tuple(current))
    return units


def _record(request: PlannedRequest, due_s: float, served: Served) -> RequestRecord:
    record = RequestRecord(
        number=request.number,
        scheduled_s=due_s,
        session=request.session,
        kind=request.kind,
        tenant=request.tenant,
        priority=request.priority,
        sent_s=due_s,
        isl=served.num_tokens,
    )
    if served.status != OK or served.ttft_s is None or served.e2e_s is None:
        record.status, record.code, record.done_s = Status.ERROR, served.status, due_s
        return record
    record.status = Status.OK
    record.osl = record.num_heard = served.output_tokens
    record.cached_tokens = served.cached_tokens
    record.mode = served.mode
    record.prefill_worker, record.decode_worker = served.prefill_worker, served.decode_worker
    record.is_coarse = True
    record.chunks = [Chunk(due_s + served.ttft_s, 1)]
    if served.output_tokens > 1:
        record.chunks.append(Chunk(due_s + served.e2e_s, served.output_tokens - 1))
    record.done_s = due_s + served.e2e_s
    return record
