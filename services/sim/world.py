"""A cluster in virtual time: one heap of events, the router's and the registry's real decisions.

Requests are placed by one of the policies, computed in order, decoded where the store's script or
the first decision says, and published with a lag. Nothing but the seed decides what happens.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeAlias

from services.common.ids import BlockHash, WorkerId
from services.kv.layout import HINT_STRIDE_BLOCKS
from services.registry.base import HintChange, LoadReport
from services.registry.candidate_index import CandidateIndex
from services.registry.cost import Booked
from services.registry.schema import HASH_FIELD_BYTES, MAX_SLOTS, pack_fields, unpack_fields
from services.registry.scripts import RouteAsk
from services.registry.twin import RegistryTwin
from services.router.hint_check import check_hints
from services.router.output_lengths import OutputLengths
from services.router.policy import (
    NO_LINKS,
    REMOTE,
    STAY,
    Field,
    PolicyConfig,
    RequestFacts,
    ask_to_take_over,
    lay_out,
)
from services.router.route_desk import HOLD_EVERY_S
from services.router.view import ClusterView, WorkerView
from services.sim.cluster import AGGREGATED, DECODE, POOLS, PREFILL, ClusterSpec
from services.sim.network import Handoff, Lines
from services.sim.placement import (
    HINTED,
    OURS,
    LocalPlacement,
    Placement,
    SharedPlacement,
    worker_info,
    worker_view,
)
from services.sim.report import OK, REFUSED, PoolUse, Served, SimReport
from services.sim.request import Request
from services.sim.workers import Worker
from services.sim.workload import Arrival, Workload

MAX_EVENTS = 50_000_000
LEASE_MS = 1 << 40  # nobody dies here, so idle workers need not renew
_NOTHING = HintChange((), ())

Follow: TypeAlias = Callable[[int, float], Sequence[Arrival]]
"""Says what comes after the end of a request: its number and now in, later arrivals out.

Arrivals are numbered as they become known: those of the workload, then what follows."""


def nothing_follows(_number: int, _now_s: float) -> Sequence[Arrival]:
    """Let every request be alone."""
    return ()


@dataclass(slots=True)
class World:
    """One run."""

    workload: Workload
    spec: ClusterSpec
    rule: str
    config: PolicyConfig
    seed: int = 0
    follow: Follow = nothing_follows
    requests: list[Request] = field(default_factory=list)
    workers: dict[int, Worker] = field(default_factory=dict)  # by slot
    pool_of: dict[int, str] = field(default_factory=dict)  # by slot
    num_events: int = 0
    num_resyncs: int = 0
    _twin: RegistryTwin = field(init=False)
    _index: CandidateIndex = field(init=False)
    _views: dict[int, WorkerView] = field(default_factory=dict)
    _seqs: dict[int, int] = field(default_factory=dict)
    _due: dict[int, float] = field(default_factory=dict)  # when a worker completes something
    _beating: set[int] = field(default_factory=set)  # workers whose next heartbeat is planned
    _placements: list[Placement] = field(default_factory=list)
    _lengths: list[OutputLengths] = field(default_factory=list)  # by router
    _lost: random.Random = field(default_factory=random.Random)  # which publishes are
    _arena: Field | None = None
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _now: float = 0.0
    _open: dict[int, Request] = field(default_factory=dict)
    _to_come: int = 0
    _num_arrivals: int = 0
    _rng: random.Random = field(default_factory=random.Random)  # which router a request meets
    _usual_mode: str = REMOTE
    _lines: Lines = field(default_factory=Lines)

    def run(self) -> None:
        """Simulate until every answer is complete."""
        self._build()
        self._rng = random.Random(self.seed)
        for at, group in groupby(self.workload.arrivals, key=lambda a: a.at_s):
            self._arrive_at(at, list(group))
        self._at(HOLD_EVERY_S, self._keep)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()

    def report(self) -> SimReport:
        """Say what became of everything; the run is over."""
        served = sorted((self._served(r) for r in self.requests), key=lambda r: r.number)
        pools = {pool: self._pool_use(pool) for pool in POOLS if pool in self.pool_of.values()}
        return SimReport(
            tuple(served), pools, self._ended_at(), self.num_events, self.num_resyncs,
            self._lines.num_bytes, self._lines.wait_s,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Raise AssertionError unless everything begun has ended and been released."""
        assert not self._open
        assert not self._to_come
        assert len(self._twin.reservations) == 0
        for worker in self.workers.values():
            worker.check_integrity()
            assert worker.is_idle
            assert not worker.waiting
            assert not worker.arriving
        assert all(r.ended_at is not None for r in self.requests)

    def _served(self, request: Request) -> Served:
        arrival, ended_at, first_at = request.arrival, request.ended_at, request.first_token_at
        later = arrival.output_tokens - 1
        is_answered = ended_at is not None and first_at is not None and not request.is_refused
        served = Served(
            request.number, arrival.at_s, arrival.num_tokens, arrival.output_tokens,
            OK if is_answered else REFUSED, num_units=len(arrival.units),
        )  # fmt: skip
        if ended_at is None or first_at is None or request.is_refused:
            return served
        return replace(
            served,
            ttft_s=request.ttft_s,
            tpot_s=(ended_at - first_at) / later if later else None,
            e2e_s=ended_at - arrival.at_s,
            cached_tokens=request.cached_tokens,
            cached_units=request.cached_units,
            mode=request.mode,
            prefill_worker=self._name(request.prefill_slot),
            decode_worker=self._name(request.decode_slot),
        )

    def _ended_at(self) -> float:
        return max((r.ended_at for r in self.requests if r.ended_at is not None), default=0.0)

    def _name(self, slot: int | None) -> str:
        return "" if slot is None else self._views[slot].worker_id

    def _pool_use(self, pool: str) -> PoolUse:
        workers = [worker for slot, worker in self.workers.items() if self.pool_of[slot] == pool]
        work = [worker.work_tokens for worker in workers]
        return PoolUse(
            len(workers),
            len(workers) * self._ended_at(),
            sum(worker.prefill_busy_s for worker in workers),
            sum(worker.decode_busy_s for worker in workers),
            sum(work),
            max(work) * len(work) / sum(work) if sum(work) else 1.0,
        )

    def _at(self, when: float, event: Callable[[], None]) -> None:
        self.num_events += 1
        if self.num_events > MAX_EVENTS:
            raise RuntimeError("the simulation does not end")
        heapq.heappush(self._events, (when, self.num_events, event))

    # -- the cluster -------------------------------------------------------------------------

    def _build(self) -> None:
        spec = self.spec
        self._lost = random.Random(f"{self.seed}/lost")
        max_slots = max(MAX_SLOTS, sum(spec.sizes().values()))
        self._twin = RegistryTwin(lease_ms=LEASE_MS, sweep_buckets=0, max_slots=max_slots)
        self._usual_mode = STAY if spec.sizes()[AGGREGATED] else REMOTE
        for i, (pool, model) in enumerate(spec.members()):
            slot = self._join(WorkerId(f"{pool}-{i}"), pool, Worker(self.workload, model))
            self.pool_of[slot] = pool
        self._arena = arena = self._lay_out()
        self._index = self._twin.index(arena.candidates)
        for i in range(spec.num_routers):
            self._lengths.append(OutputLengths(self.config.expected_output_tokens))
            self._placements.append(self._placement(i, arena))
        for slot, view in self._views.items():
            for placement in self._placements:
                placement.reported(slot, view.load, 0.0)

    def _placement(self, idx: int, arena: Field) -> Placement:
        if self.rule == OURS:
            return SharedPlacement(self._twin, self._index, arena, self.config)
        rng = random.Random(f"{self.seed}/{idx}")
        return LocalPlacement(self.rule, self._views, self._twin, arena, self.config, rng)

    def _lay_out(self) -> Field:
        view = ClusterView(tuple(self._views.values()), self._now)
        return lay_out(view, self.config, NO_LINKS, by_slot=True)

    def _join(self, worker_id: WorkerId, pool: str, worker: Worker) -> int:
        """Let a worker join, or join again with all its hints void."""
        role = DECODE if pool == DECODE else PREFILL  # whoever does both begins with a prompt
        info, load = worker_info(worker_id, role), worker.load(self._now)
        answer = self._twin.join(
            info, "live", load, proposed_gen=1, is_rejoin=False, now_ms=self._now_ms()
        )
        slot = answer.slot
        self._views[slot] = worker_view(slot, answer.gen, info, load, Booked())
        self.workers[slot], self._seqs[slot] = worker, 0
        return slot

    def _now_ms(self) -> int:
        return round(self._now * 1000)

    def _beat(self, slot: int) -> None:
        """Report a load now and then, until it does not change any more."""
        self._beating.discard(slot)
        load = self.workers[slot].load(self._now)
        self._twin.renew(slot, self._views[slot].slot_gen, "live", load, self._now_ms())
        self._tell(slot, load)
        if not self.workers[slot].is_idle:
            self._beat_later(slot)

    def _beat_later(self, slot: int) -> None:
        """Plan the next heartbeat; each worker has instants of its own, however idle it was."""
        if slot not in self._beating:
            self._beating.add(slot)
            every, phase = self.spec.heartbeat_s, slot / len(self.workers)
            when = (math.floor(self._now / every - phase) + 1 + phase) * every
            if when <= self._now:  # by rounding
                when += every
            self._at(when, lambda: self._beat(slot))

    def _keep(self) -> None:
        for request in self._open.values():
            for rid in (request.rid, request.rid + "d"):
                self._twin.reservations.hold(rid, self._now_ms())
        if self._to_come or self._open:
            self._at(self._now + HOLD_EVERY_S, self._keep)

    def _publish_later(self, slot: int, change: HintChange) -> None:
        is_wanted = self.rule in HINTED and (change.added or change.removed)
        told = change if is_wanted else _NOTHING  # the load is told with it in any case
        self._at(self._now + self.spec.hint_lag_s, lambda: self._publish(slot, told))

    def _publish(self, slot: int, change: HintChange) -> None:
        self._seqs[slot] += 1
        if self.spec.hint_loss and self._lost.random() < self.spec.hint_loss:
            return
        if not self._tell_store(slot, change):
            # Something was lost before it. As a worker does: a new generation, and all again.
            self.num_resyncs += 1
            worker, worker_id = self.workers[slot], self._views[slot].worker_id
            self._join(worker_id, self.pool_of[slot], worker)
            self._arena = arena = self._lay_out()
            self._index.replace(arena.candidates)
            for placement in self._placements:
                placement.laid_out(arena)
            self._seqs[slot] = 1
            is_taken = self._tell_store(slot, worker.held())
            assert is_taken, "a worker that has just joined is in sequence"

    def _tell_store(self, slot: int, change: HintChange) -> bool:
        load, owner = self.workers[slot].load(self._now), (slot, self._views[slot].slot_gen)
        now_ms = self._now_ms()
        said = self._twin.publish(owner, self._seqs[slot], change, load=load, now_ms=now_ms)
        self._tell(slot, load)
        return said == "OK"

    def _tell(self, slot: int, load: LoadReport) -> None:
        for placement in self._placements:
            placement.reported(slot, load, self._now)

    # -- a request ---------------------------------------------------------------------------

    def _arrive_at(self, at: float, arrivals: Sequence[Arrival]) -> None:
        """Give each prompt to a replica; those of one instant and replica are decided together."""
        batches: dict[int, list[tuple[int, Arrival]]] = {}
        for arrival in arrivals:
            router = self._rng.randrange(self.spec.num_routers)
            batches.setdefault(router, []).append((self._num_arrivals, arrival))
            self._num_arrivals += 1
            self._to_come += 1
        for router, batch in batches.items():
            self._at(at, lambda r=router, b=batch: self._arrive(r, b))  # type: ignore[misc]

    def _arrive(self, router: int, batch: Sequence[tuple[int, Arrival]]) -> None:
        requests = [self._request(router, number, arrival) for number, arrival in batch]
        self._to_come -= len(batch)
        slots = self._placements[router].place(requests, self._now)
        for request, slot in zip(requests, slots, strict=True):
            self.requests.append(request)
            request.prefill_slot = slot
            self._open[request.number] = request
            if not self.workers[slot].can_hold(request):
                self._end(request, is_refused=True)
                continue
            self.workers[slot].submit(request, self._now)
            self._beat_later(slot)
            self._plan(slot)

    def _request(self, router: int, number: int, arrival: Arrival) -> Request:
        names, allowed = self.workload.names(arrival), self.spec.max_output_tokens
        allowed = max(allowed, arrival.output_tokens)
        facts = RequestFacts(
            request_id=f"{number}",
            num_tokens=arrival.num_tokens,
            max_tokens=allowed,
            prefix_root=names[:HASH_FIELD_BYTES],
            expected_output=self._lengths[router].expected(allowed),
        )
        return Request(number, router, arrival, facts, names, self._usual_mode)

    def _plan(self, slot: int) -> None:
        """Look at a worker again when it completes something; what was planned before is void."""
        when = self.workers[slot].next_at()
        if self._due.get(slot) != when:
            self._due[slot] = when
            if when < math.inf:
                self._at(when, lambda: self._complete(slot, when))

    def _complete(self, slot: int, planned: float) -> None:
        if self._due.get(slot) != planned:
            return
        del self._due[slot]
        worker = self.workers[slot]
        request, change = worker.complete(self._now)
        if change is None:
            self._end(request)
            self._admit(slot)
        else:
            self._computed(request, slot, change)
        self._plan(slot)

    def _computed(self, request: Request, slot: int, change: HintChange) -> None:
        """A prompt is over here: its answer goes on where that was decided, or is now."""
        request.first_token_at = self._now
        self._publish_later(slot, change)
        if not request.left_tokens:
            self._end(request)
        elif request.mode == REMOTE:
            self._twin.release(request.rid, self._lies(request))
            self._placements[request.router].handed_off(request)
            to = request.decode_slot = self._take_over(request, slot)
            if not self.workers[to].can_hold(request):
                self.workers[slot].handed_off(request, self._now)
                self._end(request, is_refused=True)
                return
            self.workers[to].arriving.append(request)
            self._admit(to)
        else:
            request.decode_slot = slot
            self.workers[slot].join(request, self._now)

    def _admit(self, slot: int) -> None:
        """Let a worker fetch what it has room for."""
        for request in self.workers[slot].admit(self._now):
            self._at(self._fetched_at(request, slot), lambda r=request: self._decode(r))  # type: ignore[misc]

    def _take_over(self, request: Request, slot: int) -> int:
        source = self._views[slot]
        arena = self._arena
        assert arena is not None, "the cluster was built before its first request"
        ask = ask_to_take_over(request.facts, source, self.config, arena, frozenset())
        asks = [RouteAsk(ask, rid=request.rid + "d")]
        (verdict,) = self._twin.route_indexed(
            arena.weights, self._index, arena.pairs, asks, self._now_ms()
        )
        assert verdict is not None, "no decode worker of a simulation ever leaves"
        return verdict.chosen.slot

    def _fetched_at(self, request: Request, to: int) -> float:
        source, sink = request.prefill_slot, self.workers[to]
        assert source is not None, "a request that is handed off was prefilled"
        held = sink.cache.match(request.arrival.units) * self.workload.unit_tokens
        is_now = self._now == request.first_token_at
        handoff = Handoff(
            source, to, max(0, request.source_tokens - held),
            self.workers[source].model.chunk_tokens,
            request.prefill_began_at if is_now else self._now,
        )  # fmt: skip
        return self._lines.fetch(handoff, self.workers[source].model, sink.model, self._now)

    def _decode(self, request: Request) -> None:
        slot, source = request.decode_slot, request.prefill_slot
        assert slot is not None, "its KV has just crossed"
        assert source is not None, "from there"
        self.workers[source].handed_off(request, self._now)
        change = self.workers[slot].join(request, self._now)
        self._publish_later(slot, change)
        self._beat_later(slot)
        self._plan(source)
        self._plan(slot)

    def _end(self, request: Request, *, is_refused: bool = False) -> None:
        request.ended_at, request.is_refused = self._now, is_refused
        del self._open[request.number]
        self._twin.release(request.rid, b"" if is_refused else self._lies(request))
        self._twin.release(request.rid + "d")
        self._placements[request.router].handed_off(request)
        if not is_refused:
            self._lengths[request.router].note(
                request.facts.max_tokens, request.arrival.output_tokens, self._now
            )
        for arrival in self.follow(request.number, self._now):
            self._arrive_at(arrival.at_s, [arrival])

    def _lies(self, request: Request) -> bytes:
        """Hints that the worker did not honour, as the router finds them."""
        decision = request.decision
        if decision is None or decision.is_local:
            return b""
        if decision.terms[0].hint_tokens <= request.cached_tokens:
            return b""  # the chain below is long
        names = unpack_fields(request.names)
        chain = [BlockHash(name) for name in names for _ in range(HINT_STRIDE_BLOCKS)]
        num_tokens = request.facts.num_tokens
        check = check_hints(decision, request.cached_tokens, num_tokens, chain)
        return pack_fields(check.lies)
