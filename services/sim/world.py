"""A cluster in virtual time: requests on their way, by the router's and registry's real decisions.

Requests are placed by one of the policies, computed in order, decoded where the store's script or
the first decision says, and published with a lag. Pools may change size and workers may fail.
Nothing but the seed decides what happens.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeAlias

from services.common.ids import BlockHash
from services.kv.layout import HINT_STRIDE_BLOCKS
from services.registry.base import HintChange
from services.registry.schema import HASH_FIELD_BYTES, pack_fields, unpack_fields
from services.registry.scripts import RouteAsk
from services.router.admission import REFUSE, Admission, AdmissionConfig
from services.router.hint_check import check_hints
from services.router.output_lengths import OutputLengths
from services.router.policy import REMOTE, STAY, PolicyConfig, RequestFacts, ask_to_take_over
from services.router.route_desk import HOLD_EVERY_S
from services.router.view import DRAINING, LIVE
from services.sim.cluster import AGGREGATED, POOLS, PREFILL, ClusterSpec
from services.sim.controller import Controller, Failure, Observation, Orders
from services.sim.fleet import DEAD, GONE, STARTING, Fleet, Member
from services.sim.gate import SimGate
from services.sim.network import Handoff, Lines
from services.sim.outcome import pool_use, served_of
from services.sim.placement import HINTED, OURS, LocalPlacement, Placement, SharedPlacement
from services.sim.report import LOST, OK, REFUSED, SimReport
from services.sim.request import Request, Stage
from services.sim.timeline import Timeline
from services.sim.workers import Worker
from services.sim.workload import Arrival, Workload

MAX_LOSSES = 5  # workers one request may lose and go on elsewhere, as a router's default
TOO_LARGE, NO_WORKERS = (Admission(REFUSE, why, 0.0, 0.0) for why in ("too_large", "no_workers"))

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
    controller: Controller | None = None
    failures: Sequence[Failure] = ()
    requests: list[Request] = field(default_factory=list)
    fleet: Fleet = field(init=False)
    time: Timeline = field(default_factory=Timeline)
    _lengths: list[OutputLengths] = field(default_factory=list)  # by router
    _open: dict[int, Request] = field(default_factory=dict)
    _to_come: int = 0  # requests that are not sent yet
    _unsent: deque[tuple[int, tuple[int, Arrival]]] = field(default_factory=deque)  # with routers
    _num_arrivals: int = 0
    _rng: random.Random = field(default_factory=random.Random)  # which router a request meets
    _lines: Lines = field(default_factory=Lines)
    _num_seen: int = 0  # arrivals, at the last tick
    _ended: list[Request] = field(default_factory=list)  # since then
    _ttfts_s: list[float] = field(default_factory=list)  # of first tokens since then
    _held: dict[int, Request] = field(default_factory=dict)  # nobody can take them now
    _gates: list[SimGate] = field(default_factory=list)  # by router; none = all are let in

    def __post_init__(self) -> None:
        lost, is_hinted = random.Random(f"{self.seed}/lost"), self.rule in HINTED
        self.fleet = Fleet(self.spec, self.config, self.time, lost, is_hinted)

    def run(self) -> None:
        """Simulate until every answer is complete."""
        self._build()
        self._rng = random.Random(self.seed)
        for at, group in groupby(self.workload.arrivals, key=lambda a: a.at_s):
            self._arrive_at(at, list(group))
        self.time.at(HOLD_EVERY_S, self._keep)
        for failure in self.failures:
            self.time.at(failure.at_s, lambda f=failure: self._fail(f))  # type: ignore[misc]
        if self.controller is not None:
            self.time.at(0.0, self._tick)
        self.time.run()

    def report(self) -> SimReport:
        """Say what became of everything; the run is over."""
        served = tuple(map(served_of, sorted(self.requests, key=lambda r: r.number)))
        ended_at = max((r.ended_at for r in self.requests if r.ended_at is not None), default=0.0)
        members = self.fleet.members
        pools = {pool: [m for m in members if m.pool == pool] for pool in POOLS}
        return SimReport(
            served, {pool: pool_use(here, ended_at) for pool, here in pools.items() if here},
            ended_at, self.time.num_events, self.time.num_reports, self.fleet.num_resyncs,
            self._lines.num_bytes, self._lines.wait_s,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Raise AssertionError unless everything begun has ended and been released."""
        assert not self._open
        assert not self._to_come
        assert not self._held
        for gate in self._gates:
            gate.check_integrity()
        assert len(self.fleet.twin.reservations) == 0
        for member in self.fleet.at.values():
            member.worker.check_integrity()
            assert member.worker.is_idle
            assert member.state == LIVE
        assert all(r.ended_at is not None for r in self.requests)

    # -- the cluster -------------------------------------------------------------------------

    def _build(self) -> None:
        fleet = self.fleet
        for pool, model in self.spec.members():
            fleet.join(fleet.add(pool, Worker(self.workload, model)), None)
        fleet.lay_out()
        for i in range(self.spec.num_routers):
            self._lengths.append(OutputLengths(self.config.expected_output_tokens))
            fleet.placements.append(self._placement(i))
            if self.spec.admission is not None:
                self._gates.append(self._gate(self.spec.admission))
        for slot, view in fleet.views.items():
            fleet.tell(slot, view.load)

    def _gate(self, config: AdmissionConfig) -> SimGate:
        if self.rule != OURS:
            raise ValueError(f"admission goes with the policy {OURS}, not with {self.rule}")

        def send(request: Request) -> None:
            self._send(request.router, [request])

        return SimGate(config, self.config, self.fleet, send, self._refuse)

    def _placement(self, idx: int) -> Placement:
        fleet = self.fleet
        if self.rule == OURS:
            return SharedPlacement(fleet.twin, fleet.index, fleet.arena, self.config)
        rng = random.Random(f"{self.seed}/{idx}")
        return LocalPlacement(self.rule, fleet.twin, fleet.arena, self.config, rng)

    def _keep(self) -> None:
        for request in self._open.values():
            for rid in (request.rid, request.rid + "d"):
                self.fleet.twin.reservations.hold(rid, self.time.now_ms)
        if self._to_come or self._open:
            self.time.at(self.time.now + HOLD_EVERY_S, self._keep)

    def _tick(self) -> None:
        """Let the controller look, and give pools the sizes it wants."""
        assert self.controller is not None, "ticks are planned for a controller"
        if not self._to_come and not self._open:
            return  # all is over: nothing more depends on the sizes
        num_queued = sum(gate.num_queued for gate in self._gates)
        states = {pool: self.fleet.state_of(pool) for pool in POOLS}
        begins = AGGREGATED if self.spec.sizes()[AGGREGATED] else PREFILL
        states[begins] = replace(
            states[begins],
            queued_tokens=states[begins].queued_tokens + sum(g.queued_tokens for g in self._gates),
            num_waiting=states[begins].num_waiting + num_queued,
        )
        arrived = self.requests[self._num_seen :]
        seen = Observation(
            self.time.now,
            states,
            len(arrived),
            tuple(map(served_of, self._ended)),
            sum(r.uncached_hint or r.prompt_tokens for r in arrived),  # 0 = nobody took it
            tuple(self._ttfts_s),
            len(self._held),
            num_queued,
        )
        self._num_seen += len(arrived)
        self._ended.clear()
        self._ttfts_s.clear()
        self._obey(self.controller.orders(seen))
        self.time.at(self.time.now + self.controller.tick_s, self._tick)

    def _obey(self, orders: Orders) -> None:
        for name, pool in orders.moves.items():
            self._check_pool(pool)
            member = next((m for m in self.fleet.at.values() if m.worker_id == name), None)
            if member is not None and member.state == LIVE and member.pool != pool:
                self._drain(member, pool)
        leaving = set(orders.leaving)
        for member in [m for m in self.fleet.members if m.worker_id in leaving]:
            self._let_leave(member)
        for pool, size in orders.sizes.items():
            self._check_pool(pool)
            self._resize(pool, size - self.fleet.size_of(pool))

    def _check_pool(self, pool: str) -> None:
        if not self.spec.sizes()[pool]:
            raise ValueError(f"this cluster has no {pool} pool")

    def _resize(self, pool: str, difference: int) -> None:
        startup = self.spec.startup
        for _ in range(difference):
            member = self.fleet.add(pool, Worker(self.workload, self.spec.model))
            start_s = self.spec.model.startup_s if startup is None else startup(member.worker_id)
            if start_s < math.inf:
                ready_at = self.time.now + start_s
                self.time.at(ready_at, lambda m=member: self._ready(m))  # type: ignore[misc]
        for member in self.fleet.victims(pool, max(0, -difference)):
            self._let_leave(member)

    def _let_leave(self, member: Member) -> None:
        if member.state == STARTING:
            self.fleet.remove(member)
        elif member.state == LIVE:
            self._drain(member, None)
        else:
            member.next_pool = None  # it drains, and now to leave

    def _drain(self, member: Member, next_pool: str | None) -> None:
        self.fleet.drain(member, next_pool)
        since = member.since
        self.time.at(self.time.now + self.spec.drain_s, lambda: self._end_drain(member, since))
        self._leave_if_done(member)

    def _ready(self, member: Member) -> None:
        if member.state == STARTING:
            self.fleet.ready(member)
            self._send_held()

    def _send_held(self) -> None:
        """Somebody serves who did not: let requests that nobody could take try again."""
        held = sorted(self._held.values(), key=lambda r: r.router)
        self._held.clear()
        for router, requests in groupby(held, key=lambda r: r.router):
            self._send(router, list(requests))

    def _leave_if_done(self, member: Member) -> None:
        if member.state != DRAINING or not member.worker.is_idle:
            return
        if member.next_pool is None:
            self._remove(member)
        else:
            self.fleet.move(member, member.next_pool)
            self._send_held()

    def _end_drain(self, member: Member, since: float) -> None:
        """What a drain has not seen to its end goes on elsewhere; who was to move stays instead."""
        if member.state != DRAINING or member.since != since:
            return
        if member.next_pool is None:
            member.worker.break_off(self.time.now)
            self._abandon(member, is_loss=False)
        else:
            self.fleet.undrain(member)
            self._send_held()

    def _fail(self, failure: Failure) -> None:
        member = next((m for m in self.fleet.members if m.worker_id == failure.worker), None)
        if member is None or member.state in (GONE, DEAD):
            return
        if member.state == STARTING:
            self.fleet.remove(member)
            return
        member.worker.break_off(self.time.now)
        member.state = DEAD
        self.time.cancel(member.slot)
        noticed_at = self.time.now + failure.notice_s
        self.time.at(noticed_at, lambda: self._abandon(member, is_loss=True))

    def _remove(self, member: Member) -> None:
        self.time.cancel(member.slot)
        self._lines.forget(member.slot)
        self.fleet.remove(member)

    def _abandon(self, member: Member, *, is_loss: bool) -> None:
        """Routers see that a worker is gone: whatever it had goes on elsewhere."""
        slot = member.slot
        self._remove(member)
        affected = [r for r in self._open.values() if slot in r.depends_on]
        half_way = [r for r in affected if r.stage in (Stage.ROOM, Stage.FETCH)]
        self._leave_sinks([r for r in half_way if r.prefill_slot == slot])
        for request in affected:
            request.num_losses += is_loss
            if request in half_way and request.prefill_slot != slot:
                self._pass_on(request)
            elif request.num_losses > MAX_LOSSES:
                self._end(request, LOST)
            else:
                self._send_again(request)

    def _leave_sinks(self, requests: Sequence[Request]) -> None:
        """The worker that has their KV is gone: those that wait for it need not."""
        left = []
        for request in requests:
            sink = self.fleet.at.get(self._slot_of_sink(request))
            if sink is None:
                continue  # it was the same worker
            if request.stage is Stage.ROOM:
                sink.worker.arriving.remove(request)
            else:
                sink.worker.turn_away(request, self.time.now)
            left.append(sink)
        for sink in left:
            self._plan(sink)

    def _pass_on(self, request: Request) -> None:
        """The worker that was to fetch a request's KV is gone: the same ticket, to another."""
        if request.num_losses > MAX_LOSSES:
            source = self._source_of(request)
            source.worker.handed_off(request, self.time.now)
            self._end(request, LOST)
            self._plan(source)
        else:
            self._hand_off(request)
            self._plan(self._source_of(request))

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
            self.time.at(at, lambda r=router, b=batch: self._arrive(r, b))  # type: ignore[misc]

    def _arrive(self, router: int, batch: Sequence[tuple[int, Arrival]]) -> None:
        if self.workload.client is None:
            self._enter(router, batch)
        else:
            self._unsent.extend((router, numbered) for numbered in batch)
            self._let_client_send()

    def _let_client_send(self) -> None:
        """Send what the client has room for."""
        client = self.workload.client
        assert client is not None, "only a client that has bounds waits for room"
        if self.time.now >= client.until_s:
            self._to_come -= len(self._unsent)
            self._unsent.clear()
        room = client.max_in_flight - len(self._open)
        sent = [self._unsent.popleft() for _ in range(min(room, len(self._unsent)))]
        for router, group in groupby(sent, key=lambda unsent: unsent[0]):
            self._enter(router, [numbered for _, numbered in group])

    def _enter(self, router: int, batch: Sequence[tuple[int, Arrival]]) -> None:
        requests = [self._request(router, number, arrival) for number, arrival in batch]
        self._to_come -= len(batch)
        for request in requests:
            self.requests.append(request)
            self._open[request.number] = request
        if not self._gates:
            self._send(router, requests)
            return
        for request in requests:
            self._gates[router].enter(request)

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
        mode = STAY if self.spec.sizes()[AGGREGATED] else REMOTE
        return Request(number, router, arrival, facts, names, mode, self.time.now)

    def _send(self, router: int, requests: Sequence[Request]) -> None:
        """Have prompts placed, and let them wait there."""
        slots = self.fleet.placements[router].place(requests, self.time.now)
        for request, slot in zip(requests, slots, strict=True):
            request.leg += 1
            request.stage = Stage.PREFILL
            if slot is None:
                self._hold(request)
                continue
            member = self.fleet.at[slot]
            request.prefill_slot, request.prefill_worker = slot, member.worker_id
            if not member.worker.can_hold(request):
                self._refuse(request)
                continue
            member.worker.submit(request, self.time.now)
            self.fleet.beat_later(slot)
            self._plan(member)

    def _hold(self, request: Request) -> None:
        """Keep what nobody can take, as long as routers do."""
        if not self.spec.hold_s or len(self._held) >= self.spec.max_held:
            self._refuse(request, NO_WORKERS)
            return
        self._held[request.number] = request
        request.prefill_slot = None
        leg = request.leg
        self.time.at(self.time.now + self.spec.hold_s, lambda: self._give_up(request, leg))

    def _give_up(self, request: Request, leg: int) -> None:
        if request.leg == leg and self._held.pop(request.number, None) is not None:
            self._refuse(request, NO_WORKERS)

    def _refuse(self, request: Request, why: Admission = TOO_LARGE) -> None:
        request.reason = why.reason
        request.retry_after_s = why.retry_after_s or None
        self._end(request, REFUSED)

    def _send_again(self, request: Request) -> None:
        """Begin anew elsewhere; what the client has is part of the prompt now."""
        self._let_go(request, b"")
        request.decision, request.decode_slot = None, None
        request.facts = replace(request.facts, num_tokens=request.prompt_tokens)
        self._send(request.router, [request])

    def _plan(self, member: Member) -> None:
        """Look at a worker again when it completes something; what was planned before is void."""
        if member.state == DEAD:
            return
        self._admit(member)
        when = member.worker.next_at()
        if when < math.inf:
            self.time.replan(member.slot, when, lambda: self._complete(member))
        else:
            self.time.cancel(member.slot)
        self._leave_if_done(member)

    def _complete(self, member: Member) -> None:
        request, change = member.worker.complete(self.time.now)
        if change is None:
            self._end(request, OK)
        else:
            self._computed(request, member, change)
        self._plan(member)

    def _computed(self, request: Request, member: Member, change: HintChange) -> None:
        """A prompt is over here: its answer goes on where that was decided, or is now."""
        now = request.prefill_ended_at = self.time.now
        if request.first_token_at is None:
            request.first_token_at = now
            if self.controller is not None:
                self._ttfts_s.append(request.ttft_s)
            if self._gates:
                self._gates[request.router].first_token(request)
        self.fleet.publish_later(member.slot, change)
        if not request.left_tokens:
            self._end(request, OK)
        elif request.mode == REMOTE:
            self.fleet.twin.release(request.rid, self._lies(request))
            self.fleet.placements[request.router].handed_off(request)
            self._hand_off(request)
        else:
            request.decode_slot, request.decode_worker = member.slot, member.worker_id
            request.stage = Stage.DECODE
            member.worker.join(request, now)

    def _hand_off(self, request: Request) -> None:
        """Have somebody take over; where nobody can, its own worker goes on."""
        source = self._source_of(request)
        slot = self._take_over(request, source)
        sink = source if slot is None else self.fleet.at[slot]
        request.leg += 1
        if not sink.worker.can_hold(request):
            source.worker.handed_off(request, self.time.now)
            self._refuse(request)
            self._plan(source)
            return
        if sink is source:  # its KV stays where it is, and is not held twice
            source.worker.handed_off(request, self.time.now)
            request.source_tokens = 0
        request.stage = Stage.ROOM
        request.decode_slot, request.decode_worker = sink.slot, sink.worker_id
        sink.worker.arriving.append(request)
        self._admit(sink)

    def _take_over(self, request: Request, source: Member) -> int | None:
        fleet = self.fleet
        view = fleet.views[source.slot]
        ask = ask_to_take_over(request.facts, view, self.config, fleet.arena, frozenset())
        (verdict,) = fleet.twin.route_indexed(
            fleet.arena.weights, fleet.index, fleet.arena.pairs,
            [RouteAsk(ask, rid=request.rid + "d")], self.time.now_ms,
        )  # fmt: skip
        return None if verdict is None else verdict.chosen.slot

    def _admit(self, sink: Member) -> None:
        """Let a worker fetch what it has room for."""
        for request in sink.worker.admit(self.time.now):
            request.stage = Stage.FETCH
            when, leg = self._fetched_at(request, sink), request.leg
            self.time.at(when, lambda r=request, n=leg: self._decode(r, n))  # type: ignore[misc]

    def _fetched_at(self, request: Request, sink: Member) -> float:
        source = self._source_of(request)
        if source is sink:
            return self.time.now
        held = sink.worker.cache.match(request.arrival.units) * self.workload.unit_tokens
        is_now = self.time.now == request.prefill_ended_at
        handoff = Handoff(
            source.slot, sink.slot, max(0, request.source_tokens - held),
            source.worker.model.chunk_tokens,
            request.prefill_began_at if is_now else self.time.now,
        )  # fmt: skip
        return self._lines.fetch(handoff, source.worker.model, sink.worker.model, self.time.now)

    def _decode(self, request: Request, leg: int) -> None:
        if request.leg != leg or request.stage is not Stage.FETCH:
            return  # one of the two is gone, and it went another way
        source, sink = self._source_of(request), self._sink_of(request)
        if DEAD in (source.state, sink.state):
            return  # it will be noticed
        request.stage = Stage.DECODE
        source.worker.handed_off(request, self.time.now)
        change = sink.worker.join(request, self.time.now)
        self.fleet.publish_later(sink.slot, change)
        self.fleet.beat_later(sink.slot)
        self._plan(source)
        self._plan(sink)

    def _source_of(self, request: Request) -> Member:
        assert request.prefill_slot is not None, "a request that is handed off was prefilled"
        return self.fleet.at[request.prefill_slot]

    def _sink_of(self, request: Request) -> Member:
        return self.fleet.at[self._slot_of_sink(request)]

    def _slot_of_sink(self, request: Request) -> int:
        assert request.decode_slot is not None, "a request whose KV crosses goes somewhere"
        return request.decode_slot

    def _end(self, request: Request, status: str) -> None:
        request.ended_at, request.status = self.time.now, status
        del self._open[request.number]
        self._let_go(request, self._lies(request) if status == OK else b"")
        if self.controller is not None:
            self._ended.append(request)
        if self._gates:
            self._gates[request.router].ended(request)
        if status == OK:
            self._lengths[request.router].note(
                request.facts.max_tokens, request.arrival.output_tokens, self.time.now
            )
        for arrival in self.follow(request.number, self.time.now):
            self._arrive_at(arrival.at_s, [arrival])
        if self._unsent:
            self.time.at(self.time.now, self._let_client_send)

    def _let_go(self, request: Request, lies: bytes) -> None:
        self.fleet.twin.release(request.rid, lies)
        self.fleet.twin.release(request.rid + "d")
        self.fleet.placements[request.router].handed_off(request)

    def _lies(self, request: Request) -> bytes:
        """Hints that the worker did not honour, as the router finds them."""
        decision = request.decision
        if decision is None or decision.is_local or request.num_losses:
            return b""
        if decision.terms[0].hint_tokens <= request.cached_tokens:
            return b""  # the chain below is long
        names = unpack_fields(request.names)
        chain = [BlockHash(name) for name in names for _ in range(HINT_STRIDE_BLOCKS)]
        num_tokens = request.facts.num_tokens
        check = check_hints(decision, request.cached_tokens, num_tokens, chain)
        return pack_fields(check.lies)
