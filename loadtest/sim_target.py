"""A simulated cluster as a target: the same schedule in virtual time, by the real policies."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from loadtest.records import Chunk, Piece, PlannedRequest, RequestRecord, Sample, Status
from loadtest.scenario import Phases
from loadtest.schedule import MAX_REQUESTS, Schedule
from loadtest.target import TargetFacts, TargetUnusable
from services.common.errors import ConfigError
from services.sim.cluster import AGGREGATED, DECODE, PREFILL, ClusterSpec
from services.sim.performance import default_model, read_model
from services.sim.placement import OURS, POLICIES
from services.sim.report import OK, Served, SimReport
from services.sim.simulate import simulate
from services.sim.workload import Arrival, Client, Workload

_UNIT_TOKENS = 64
_MAX_POOL, _MAX_ROUTERS = 4096, 64  # as of `isthmus sim`
_POOLS = (PREFILL, DECODE, AGGREGATED)
_NUM_SAMPLES = 2_000
_TURN_S = 0.001  # from one session of a user to the next, at least


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
    max_in_flight: int | None = None  # what is due beyond waits; None = nothing does
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

    def run(self, requests: Sequence[PlannedRequest]) -> list[RequestRecord]:
        """Simulate requests; those that wait for others come `wait_s` after their end.

        As with a server, nothing is sent that becomes due after the last phase.
        """
        sending = _Sending(self._end_s)
        sending.know(requests)
        heads = sorted((r for r in requests if r.after is None), key=lambda r: r.at_s or 0.0)
        return self._run(sending, [sending.send(r, r.at_s or 0.0) for r in heads])

    def run_users(self, schedule: Schedule) -> list[RequestRecord]:
        """Simulate a closed loop: who has got all answers of a session begins the next one."""
        sending = _Sending(self._end_s, schedule)
        heads = [sending.begin(lane, 0.0) for lane in range(schedule.num_lanes)]
        return self._run(sending, sorted(chain(*heads), key=lambda arrival: arrival.at_s))

    @property
    def _end_s(self) -> float:
        return math.inf if self.phases.end_s is None else self.phases.end_s

    def _run(self, sending: _Sending, arrivals: Sequence[Arrival]) -> list[RequestRecord]:
        sending.order.sort(key=lambda sent: sent.due_s)  # as the arrivals: they are numbered so
        room = self.max_in_flight
        client = None if room is None else Client(room, self._end_s)
        self.report = report = simulate(
            Workload("schedule", _UNIT_TOKENS, tuple(arrivals), client),
            self.spec.cluster,
            policy=self.spec.policy,
            seed=self.seed,
            follow=sending.follow,
        )
        served = {s.number: s for s in report.requests}
        records = [_record(sent, served.get(number)) for number, sent in enumerate(sending.order)]
        for record in records:
            record.phase = self.phases.at(record.scheduled_s)
        return sorted(records, key=lambda record: record.scheduled_s)

    def samples(self, records: Sequence[RequestRecord]) -> list[Sample]:
        """Tell how many requests were open at equal steps of the time."""
        began = sorted(record.sent_s for record in records if record.sent_s is not None)
        ended = sorted(record.done_s for record in records if record.done_s is not None)
        step_s = ended[-1] / _NUM_SAMPLES if ended else 0.0
        replicas = {pool: n for pool, n in self.spec.cluster.sizes().items() if n}
        times = [(n + 1) * step_s for n in range(_NUM_SAMPLES if step_s else 0)]
        return [
            Sample(at, bisect_right(began, at) - bisect_right(ended, at), None, replicas)
            for at in times
        ]


@dataclass(frozen=True, slots=True)
class _Sent:
    request: PlannedRequest
    due_s: float
    lane: int | None  # of a closed loop: the user


class _Sending:
    """What is sent when, as answers end. Requests are numbered in the order they become known."""

    def __init__(self, end_s: float, schedule: Schedule | None = None) -> None:
        """Begin with nothing sent.

        Args:
            schedule: of a closed loop.
        """
        self.order: list[_Sent] = []
        self._end_s = end_s
        self._schedule = schedule
        self._children: dict[int | None, list[PlannedRequest]] = defaultdict(list)
        self._units = _Units()
        self._turns: Counter[int] = Counter()  # of each user
        self._open: Counter[int] = Counter()  # requests of each user's session

    def know(self, requests: Sequence[PlannedRequest]) -> None:
        """Remember which of them wait for others."""
        for request in requests:
            if request.after is not None:
                self._children[request.after].append(request)

    def send(self, request: PlannedRequest, due_s: float, lane: int | None = None) -> Arrival:
        """Send a request."""
        self.order.append(_Sent(request, due_s, lane))
        return self._units.arrival(request, due_s)

    def begin(self, lane: int, now_s: float) -> list[Arrival]:
        """Let a user begin the next session, unless it would be due after the end."""
        assert self._schedule is not None, "open loops have no users"
        session = self._schedule.next_of_lane(lane, self._turns[lane], now_s)
        self._turns[lane] += 1
        due_s = now_s + session[0].wait_s
        if due_s >= self._end_s or len(self.order) >= MAX_REQUESTS:
            return []
        self.know(session)
        self._open[lane] += 1
        return [self.send(session[0], due_s, lane)]

    def follow(self, number: int, now_s: float) -> list[Arrival]:
        """Say what comes after the end of a request."""
        sent, arrivals = self.order[number], []
        for child in self._children.pop(sent.request.number, ()):
            at_s = max(child.at_s or 0.0, now_s + child.wait_s)
            if at_s < self._end_s:
                arrivals.append(self.send(child, at_s, sent.lane))
        lane = sent.lane
        if lane is None:
            return arrivals
        self._open[lane] += len(arrivals) - 1
        if not self._open[lane]:
            # What fails at once takes a client some time as well, or time would stand still.
            arrivals = self.begin(lane, max(now_s, sent.due_s + _TURN_S))
        return arrivals


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
        return Arrival(
            at_s,
            request.prompt.num_tokens,
            request.max_tokens,
            tuple(units),
            tenant=request.tenant,
            priority=request.priority,
        )


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


def _record(sent: _Sent, served: Served | None) -> RequestRecord:
    """Tell what became of a request.

    Args:
        served: None = there was no room for it before the end.
    """
    request, due_s = sent.request, sent.due_s
    record = RequestRecord(
        number=request.number,
        scheduled_s=due_s,
        session=request.session,
        kind=request.kind,
        tenant=request.tenant,
        priority=request.priority,
        isl=request.prompt.num_tokens,
    )
    if served is None:
        return record  # censored
    record.sent_s = due_s + served.unsent_s
    if served.status != OK or served.ttft_s is None or served.e2e_s is None:
        record.status, record.code, record.done_s = Status.ERROR, served.status, record.sent_s
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
