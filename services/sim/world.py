"""A cluster in virtual time: one heap of events, the router's and the registry's real decisions.

Prompts are placed by one of the policies, computed in order, handed to decode workers that the
store's script chooses, and published with a lag. Nothing but the seed decides what happens.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from services.common.ids import BlockHash, Incarnation, WorkerId
from services.kv.layout import BLOCK_TOKENS, HINT_STRIDE_BLOCKS
from services.registry.base import HintChange, LoadReport, WorkerInfo
from services.registry.cost import Booked
from services.registry.schema import HASH_FIELD_BYTES, pack_fields
from services.registry.scripts import RouteAsk
from services.registry.twin import RegistryTwin
from services.router.hint_check import check_hints
from services.router.policy import (
    NO_LINKS,
    REMOTE,
    Field,
    PolicyConfig,
    RequestFacts,
    ask_to_take_over,
    lay_out,
)
from services.router.route_desk import HOLD_EVERY_S
from services.router.view import ClusterView, WorkerView
from services.sim.block_cache import BlockCache
from services.sim.placement import OURS, LocalPlacement, Placement, SharedPlacement, worker_view
from services.sim.workers import DecodeWorker, PrefillWorker, Request
from services.sim.workload import Arrival, Workload

MAX_EVENTS = 50_000_000


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What is simulated."""

    num_prefill: int = 8
    num_decode: int = 8
    num_routers: int = 1
    cache_units: int = 4000  # of each prefill worker
    prefill_tok_s: float = 20_000.0
    decode_kv_tokens: int = 4_000_000
    tbt_a_us: float = 12_000.0
    tbt_b_us: float = 0.01
    publish_lag_s: float = 0.01
    heartbeat_s: float = 0.5


@dataclass(slots=True)
class World:
    """One run."""

    workload: Workload
    spec: ClusterSpec
    rule: str
    config: PolicyConfig
    seed: int = 0
    requests: list[Request] = field(default_factory=list)
    prefill: dict[int, PrefillWorker] = field(default_factory=dict)
    decode: dict[int, DecodeWorker] = field(default_factory=dict)
    num_events: int = 0
    _twin: RegistryTwin = field(default_factory=lambda: RegistryTwin(sweep_buckets=0))
    _views: dict[int, WorkerView] = field(default_factory=dict)
    _seqs: dict[int, int] = field(default_factory=dict)
    _placements: list[Placement] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _now: float = 0.0
    _open: dict[int, Request] = field(default_factory=dict)
    _to_come: int = 0

    def run(self) -> None:
        """Simulate until every answer is complete."""
        self._build()
        rng = random.Random(self.seed)
        for at, group in groupby(self.workload.arrivals, key=lambda a: a.at_s):
            self._arrive_at(at, list(group), rng)
        for slot in self._views:
            self._at(0.0, lambda slot=slot: self._heartbeat(slot))  # type: ignore[misc]
        self._at(HOLD_EVERY_S, self._hold)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        self.num_events += 1
        if self.num_events > MAX_EVENTS:
            raise RuntimeError("the simulation does not end")
        heapq.heappush(self._events, (when, self.num_events, event))

    def check_integrity(self) -> None:
        """Raise AssertionError unless everything begun has ended and been released."""
        assert not self._open
        assert not self._to_come
        assert len(self._twin.reservations) == 0
        for prefill in self.prefill.values():
            assert prefill.running is None
            assert not prefill.waiting
            assert len(prefill.cache) <= prefill.capacity_units
        for decode in self.decode.values():
            assert (decode.running, decode.resident_tokens) == (0, 0)
        assert all(r.ended_at is not None for r in self.requests)

    # -- the cluster -------------------------------------------------------------------------

    def _build(self) -> None:
        spec = self.spec
        for i in range(spec.num_prefill):
            prefill = PrefillWorker(
                self.workload, BlockCache(spec.cache_units), spec.cache_units, spec.prefill_tok_s
            )
            self.prefill[self._join(f"prefill-{i}", "prefill", prefill.load(0.0))] = prefill
        for i in range(spec.num_decode):
            decode = DecodeWorker(
                spec.decode_kv_tokens, spec.prefill_tok_s, spec.tbt_a_us, spec.tbt_b_us
            )
            self.decode[self._join(f"decode-{i}", "decode", decode.load())] = decode
        arena = self._lay_out()
        for i in range(spec.num_routers):
            self._placements.append(self._placement(i, arena))
        for slot, view in self._views.items():
            for placement in self._placements:
                placement.reported(slot, view.load, 0.0)

    def _placement(self, idx: int, arena: Field) -> Placement:
        if self.rule == OURS:
            return SharedPlacement(self._twin, arena, self.config)
        rng = random.Random(f"{self.seed}/{idx}")
        return LocalPlacement(self.rule, self._views, self._twin, arena, self.config, rng)

    def _lay_out(self, *sources: WorkerView) -> Field:
        view = ClusterView(tuple(self._views.values()), self._now)
        return lay_out(view, self.config, NO_LINKS, sources=sources, by_slot=True)

    def _join(self, name: str, role: str, load: LoadReport) -> int:
        info = WorkerInfo(
            WorkerId(name), Incarnation(1), "127.0.0.1:1", role, "simulated", "simulated", {},
            "0" * 64, BLOCK_TOKENS, 1 << 24, 0,
        )  # fmt: skip
        answer = self._twin.join(info, "live", load, proposed_gen=1, is_rejoin=False, now_ms=0)
        self._views[answer.slot] = worker_view(answer.slot, answer.gen, info, load, Booked())
        self._seqs[answer.slot] = 0
        return answer.slot

    def _load(self, slot: int) -> LoadReport:
        worker = self.prefill.get(slot)
        return self.decode[slot].load() if worker is None else worker.load(self._now)

    def _now_ms(self) -> int:
        return round(self._now * 1000)

    def _heartbeat(self, slot: int) -> None:
        load = self._load(slot)
        self._twin.renew(slot, self._views[slot].slot_gen, "live", load, self._now_ms())
        self._tell(slot, load)
        if self._to_come or self._open:
            self._at(self._now + self.spec.heartbeat_s, lambda: self._heartbeat(slot))

    def _hold(self) -> None:
        for request in self._open.values():
            for rid in (request.rid, request.rid + "d"):
                self._twin.reservations.hold(rid, self._now_ms())
        if self._to_come or self._open:
            self._at(self._now + HOLD_EVERY_S, self._hold)

    def _publish(self, slot: int, change: HintChange) -> None:
        self._seqs[slot] += 1
        load, owner = self._load(slot), (slot, self._views[slot].slot_gen)
        self._twin.publish(owner, self._seqs[slot], change, load=load, now_ms=self._now_ms())
        self._tell(slot, load)

    def _tell(self, slot: int, load: LoadReport) -> None:
        for placement in self._placements:
            placement.reported(slot, load, self._now)

    # -- a request ---------------------------------------------------------------------------

    def _arrive_at(self, at: float, arrivals: Sequence[Arrival], rng: random.Random) -> None:
        """Give each prompt to a replica; those of one instant and replica are decided together."""
        batches: dict[int, list[tuple[int, Arrival]]] = {}
        for arrival in arrivals:
            router = rng.randrange(self.spec.num_routers)
            batches.setdefault(router, []).append((self._to_come, arrival))
            self._to_come += 1
        for router, batch in batches.items():
            self._at(at, lambda r=router, b=batch: self._arrive(r, b))  # type: ignore[misc]

    def _arrive(self, router: int, batch: Sequence[tuple[int, Arrival]]) -> None:
        requests = [self._request(router, number, arrival) for number, arrival in batch]
        self._to_come -= len(batch)
        for request, slot in zip(
            requests, self._placements[router].place(requests, self._now), strict=True
        ):
            self.requests.append(request)
            self._open[request.number] = request
            request.prefill_slot = slot
            self.prefill[slot].submit(request)
            self._start(slot)

    def _request(self, router: int, number: int, arrival: Arrival) -> Request:
        names = self.workload.names(arrival)
        facts = RequestFacts(
            request_id=f"{number}",
            num_tokens=arrival.num_tokens,
            max_tokens=arrival.output_tokens,
            prefix_root=names[:HASH_FIELD_BYTES],
            force_mode=REMOTE,
        )
        return Request(number, router, arrival, facts, names)

    def _start(self, slot: int) -> None:
        done_at = self.prefill[slot].start(self._now)
        if done_at is not None:
            self._at(done_at, lambda: self._prefill_done(slot))

    def _prefill_done(self, slot: int) -> None:
        request, change = self.prefill[slot].finish()
        request.first_token_at = self._now
        self._at(self._now + self.spec.publish_lag_s, lambda: self._publish(slot, change))
        self._start(slot)
        if request.arrival.output_tokens == 1:
            self._end(request)
            return
        self._twin.release(request.rid, self._lies(request))
        worker = self._take_over(request, slot)
        self._at(worker.join(request, self._now), lambda: self._decode_done(request, worker))

    def _take_over(self, request: Request, slot: int) -> DecodeWorker:
        source = self._views[slot]
        arena = self._lay_out(source)
        ask = ask_to_take_over(request.facts, source, self.config, arena, frozenset())
        (verdict,) = self._twin.route(
            arena.weights, arena.candidates, arena.pairs,
            [RouteAsk(ask, rid=request.rid + "d")], self._now_ms(),
        )  # fmt: skip
        assert verdict is not None, "no decode worker of a simulation ever leaves"
        return self.decode[verdict.chosen.slot]

    def _decode_done(self, request: Request, worker: DecodeWorker) -> None:
        worker.leave(request)
        self._end(request)

    def _end(self, request: Request) -> None:
        request.ended_at = self._now
        del self._open[request.number]
        self._twin.release(request.rid, self._lies(request))
        self._twin.release(request.rid + "d")
        self._placements[request.router].ended(request)

    def _lies(self, request: Request) -> bytes:
        """Hints that the worker did not honour, as the router finds them."""
        if request.decision is None:
            return b""
        size = HASH_FIELD_BYTES
        names = [request.names[i : i + size] for i in range(0, len(request.names), size)]
        chain = [BlockHash(name) for name in names for _ in range(HINT_STRIDE_BLOCKS)]
        num_tokens = request.facts.num_tokens
        check = check_hints(request.decision, request.cached_tokens, num_tokens, chain)
        return pack_fields(check.lies)
