"""Ways to choose a prefill worker: ours by the real code, and simpler ones to compare with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from services.common.ids import Incarnation, WorkerId
from services.kv.layout import BLOCK_TOKENS
from services.registry.base import LoadReport, WorkerInfo
from services.registry.candidate_index import CandidateIndex
from services.registry.cost import Booked, mix32
from services.registry.depth import Depths
from services.registry.schema import unpack_fields
from services.registry.scripts import RouteAsk
from services.registry.speculation import Speculation
from services.registry.twin import RegistryTwin
from services.router.booking import Booking, Bookings
from services.router.policy import (
    STRIDE_TOKENS,
    Decision,
    Field,
    PolicyConfig,
    ask_for,
    choose,
    decision_of,
    worker_seed,
)
from services.router.route_desk import LOCAL_FIELDS, LOCAL_TTL_S, MAX_BATCH
from services.router.view import LIVE, ClusterView, WorkerView
from services.sim.request import Request

OURS, AFFINITY, TWO_CHOICES, PLAIN_COST, RANDOM, ROUND_ROBIN = (
    "ours", "affinity", "two_choices", "plain_cost", "random", "round_robin",
)  # fmt: skip
UNDISPLACED = "ours_undisplaced"  # shared state, but what new blocks push out is not priced
HINTED = frozenset({OURS, PLAIN_COST})  # that look at hints
POLICIES = (OURS, AFFINITY, TWO_CHOICES, PLAIN_COST, RANDOM, ROUND_ROBIN)


class Placement(Protocol):
    """How one router replica chooses prefill workers."""

    def place(self, requests: Sequence[Request], now: float) -> Sequence[int | None]:
        """Return a slot for each request of one instant; None where nobody can take it."""
        ...

    def reported(self, slot: int, load: LoadReport, now: float) -> None:
        """Learn a worker's load."""
        ...

    def handed_off(self, request: Request) -> None:
        """Learn, once or more often, that a request is done where it was placed."""
        ...

    def laid_out(self, arena: Field) -> None:
        """Learn that a worker has a new generation."""
        ...


@dataclass(slots=True)
class SharedPlacement:
    """Ours: the store decides and reserves, with what all replicas did before."""

    twin: RegistryTwin
    index: CandidateIndex  # of all replicas: they see the same workers
    arena: Field
    config: PolicyConfig

    def place(self, requests: Sequence[Request], now: float) -> Sequence[int | None]:
        """Decide in batches, as the desk does."""
        slots: list[int | None] = []
        for lo in range(0, len(requests), MAX_BATCH):
            slots += self._decide(requests[lo : lo + MAX_BATCH], round(now * 1000))
        return slots

    def reported(self, slot: int, load: LoadReport, now: float) -> None:
        """Nothing: the store has the report."""

    def handed_off(self, request: Request) -> None:
        """Nothing: the store is told of every end."""

    def laid_out(self, arena: Field) -> None:
        """Ask for the workers as they are now."""
        self.arena = arena

    def _decide(self, batch: Sequence[Request], now_ms: int) -> list[int | None]:
        asks = [
            RouteAsk(ask_for(r.facts, self.config, self.arena, frozenset()), r.names, r.rid)
            for r in batch
        ]
        arena = self.arena
        verdicts = self.twin.route_indexed(arena.weights, self.index, arena.pairs, asks, now_ms)
        slots: list[int | None] = []
        for request, verdict in zip(batch, verdicts, strict=True):
            if verdict is None:
                slots.append(None)
                continue
            request.decision = decision_of(verdict, arena, request.facts, is_local=False)
            slots.append(verdict.chosen.slot)
        return slots


@dataclass(slots=True)
class LocalPlacement:
    """What routers do that share nothing: last reports, own bookings, and one of four rules."""

    rule: str
    twin: RegistryTwin  # asked for confirmed hints only
    arena: Field
    config: PolicyConfig
    rng: random.Random
    _loads: dict[int, LoadReport] = field(default_factory=dict)
    _bookings: Bookings = field(default_factory=Bookings)
    _open: dict[int, Booking] = field(default_factory=dict)
    _index: Speculation[WorkerId] = field(default_factory=lambda: Speculation(LOCAL_FIELDS))
    _turn: int = 0

    def place(self, requests: Sequence[Request], now: float) -> Sequence[int | None]:
        """Choose one by one, each booked before the next."""
        return [self._place_one(request, now) for request in requests]

    def reported(self, slot: int, load: LoadReport, now: float) -> None:
        """Settle what the report shows."""
        self._loads[slot] = load
        worker = self.arena.workers.get(slot)  # one that drains is none of them
        if worker is not None:
            self._bookings.load_reported(worker.worker_id, now)

    def handed_off(self, request: Request) -> None:
        """Release its booking."""
        booking = self._open.pop(request.number, None)
        if booking is not None:
            self._bookings.release(booking)

    def laid_out(self, arena: Field) -> None:
        """Ask for the workers as they are now."""
        self.arena = arena

    def _place_one(self, request: Request, now: float) -> int | None:
        prefill = [c.slot for c in self.arena.candidates if c.is_prefill]
        if not prefill:
            return None
        uncached = request.facts.num_tokens
        if self.rule == PLAIN_COST:
            decision = request.decision = self._cheapest(request, now)
            slot = self.arena.places[decision.worker.worker_id]
            uncached = decision.terms[0].uncached_tokens
        elif self.rule == AFFINITY:
            root = int.from_bytes(request.facts.prefix_root[:4], "little")
            slot = max(
                prefill, key=lambda s: mix32(root ^ worker_seed(self.arena.workers[s].worker_id))
            )
        elif self.rule == TWO_CHOICES:
            slot = min(self.rng.sample(prefill, min(2, len(prefill))), key=self._queued)
        elif self.rule == RANDOM:
            slot = self.rng.choice(prefill)
        else:
            slot, self._turn = prefill[self._turn % len(prefill)], self._turn + 1
        worker_id = self.arena.workers[slot].worker_id
        self._open[request.number] = self._bookings.book(worker_id, uncached, 0, now)
        return slot

    def _queued(self, slot: int) -> int:
        booked = self._bookings.booked().get(self.arena.workers[slot].worker_id, Booked())
        return self._loads[slot].queued_uncached_tokens + booked.prefill_tokens

    def _cheapest(self, request: Request, now: float) -> Decision:
        """Least queue and uncached work by what this replica knows."""
        now_ms, names = round(now * 1000), unpack_fields(request.names)
        depth = self._confirmed(request, now_ms)
        known = {w.worker_id for w in self.arena.workers.values()}
        own = self._index.strides(names, known, Depths(), now_ms)
        for worker_id, strides in own.by_owner().items():
            depth[worker_id] = max(strides, depth.get(worker_id, 0))
        decision = choose(request.facts, self._view(now), depth, self.config)
        self._index.note(names, decision.worker.worker_id, 0, int(now) + LOCAL_TTL_S, now_ms)
        return decision

    def _confirmed(self, request: Request, now_ms: int) -> dict[WorkerId, int]:
        """Ask for what workers have published of a prompt, in strides; reserves nothing."""
        arena = self.arena
        ask = RouteAsk(ask_for(request.facts, self.config, arena, frozenset()), request.names)
        (verdict,) = self.twin.route(arena.weights, arena.candidates, arena.pairs, [ask], now_ms)
        assert verdict is not None, "no worker of a simulation ever leaves"
        return {
            arena.workers[option.slot].worker_id: int(option.hint_tokens) // STRIDE_TOKENS
            for option in verdict.options
        }

    def _view(self, now: float) -> ClusterView:
        booked = self._bookings.booked()
        workers = tuple(
            replace(w, load=self._loads[slot], booked=booked.get(w.worker_id, Booked()))
            for slot, w in self.arena.workers.items()
        )
        return ClusterView(workers, now)


def worker_info(worker_id: WorkerId, role: str) -> WorkerInfo:
    """Describe a worker whose KV all others can use."""
    return WorkerInfo(
        worker_id, Incarnation(1), "127.0.0.1:1", role, "simulated", "simulated", {}, "0" * 64,
        BLOCK_TOKENS, 1 << 24, 0,
    )  # fmt: skip


def worker_view(
    slot: int, slot_gen: int, info: WorkerInfo, load: LoadReport, booked: Booked
) -> WorkerView:
    """Show a live worker as a router sees it."""
    return WorkerView(
        worker_id=info.worker_id, role=info.role, state=LIVE, reason="", info=info,
        incarnation=info.incarnation, slot=slot, slot_gen=slot_gen, lease_left_ms=None, load=load,
        booked=booked, up_since=None,
    )  # fmt: skip
