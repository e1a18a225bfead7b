"""The workers of a simulation as their routers and the store know them: who is there, and hints.

Every worker joins the store's twin, beats, publishes with a lag, and may leave: drained or dead.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

from services.common.ids import WorkerId
from services.registry.base import HintChange, LoadReport
from services.registry.candidate_index import CandidateIndex
from services.registry.cost import Booked
from services.registry.schema import MAX_SLOTS
from services.registry.twin import RegistryTwin
from services.router.policy import NO_LINKS, Field, PolicyConfig, lay_out
from services.router.view import DRAINING, LIVE, ClusterView, WorkerView
from services.sim.cluster import DECODE, PREFILL, ClusterSpec
from services.sim.controller import PoolState, WorkerState
from services.sim.placement import Placement, worker_info, worker_view
from services.sim.timeline import Timeline
from services.sim.workers import Worker

STARTING, DEAD, GONE = "starting", "dead", "gone"  # dead: routers do not know it yet
LEASE_MS = 1 << 40  # the dead leave by an event of their own, so idle workers need not renew
_NOTHING = HintChange((), ())


@dataclass(slots=True, eq=False)
class Member:
    """One worker from the moment it was asked for."""

    worker_id: WorkerId
    pool: str
    worker: Worker
    asked_at: float
    state: str = STARTING
    slot: int = -1  # of the store, once it is there
    since: float = 0.0  # in its state
    gone_at: float | None = None
    next_pool: str | None = None  # it drains to go over to that one


@dataclass(slots=True)
class Fleet:
    """All workers of a run."""

    spec: ClusterSpec
    config: PolicyConfig
    time: Timeline
    lost: random.Random  # which publishes are
    is_hinted: bool  # some router looks at hints
    placements: list[Placement] = field(default_factory=list)  # by router
    members: list[Member] = field(default_factory=list)  # all there ever were
    at: dict[int, Member] = field(default_factory=dict)  # those in the store, by slot
    views: dict[int, WorkerView] = field(default_factory=dict)  # of the same
    num_resyncs: int = 0
    twin: RegistryTwin = field(init=False)
    index: CandidateIndex = field(init=False)
    arena: Field = field(init=False)
    _num_added: dict[str, int] = field(default_factory=dict)  # by pool
    _seqs: dict[int, int] = field(default_factory=dict)
    _beating: set[int] = field(default_factory=set)  # whose next heartbeat is planned
    _aging: bool = False  # whether a look at newcomers is planned

    def __post_init__(self) -> None:
        slots = max(MAX_SLOTS, 2 * sum(self.spec.sizes().values()))
        self.twin = RegistryTwin(lease_ms=LEASE_MS, sweep_buckets=0, max_slots=slots)
        self.arena = self._laid_out()
        self.index = self.twin.index(self.arena.candidates)

    # -- who is there ------------------------------------------------------------------------

    def add(self, pool: str, worker: Worker) -> Member:
        """Ask for a worker; it is not there yet."""
        number = self._num_added.get(pool, 0)
        self._num_added[pool] = number + 1
        now = self.time.now
        member = Member(WorkerId(f"{pool}-{number}"), pool, worker, now, since=now)
        self.members.append(member)
        return member

    def join(self, member: Member, up_since: float | None) -> None:
        """Let a worker join, or join again with all its hints void.

        Args:
            up_since: None = it has been there for long.
        """
        role = DECODE if member.pool == DECODE else PREFILL  # who does both begins with a prompt
        info, load = worker_info(member.worker_id, role), member.worker.load(self.time.now)
        member.state = DRAINING if member.state == DRAINING else LIVE
        answer = self.twin.join(
            info, member.state, load, proposed_gen=1, is_rejoin=False, now_ms=self.time.now_ms
        )
        if answer.outcome != "OK":
            raise ValueError(f"the store takes no worker more: {answer.outcome}")
        member.slot = answer.slot
        view = worker_view(answer.slot, answer.gen, info, load, Booked())
        self.at[answer.slot], self._seqs[answer.slot] = member, 0
        self.views[answer.slot] = replace(view, state=member.state, up_since=up_since)

    def lay_out(self) -> None:
        """Show routers the workers as they are now."""
        self.arena = self._laid_out()
        self.index.replace(self.arena.candidates)
        for placement in self.placements:
            placement.laid_out(self.arena)

    def ready(self, member: Member) -> None:
        """A worker has started."""
        member.since = self.time.now
        self.join(member, self.time.now)
        self.lay_out()
        self.tell(member.slot, self.views[member.slot].load)
        self._age_later()

    def drain(self, member: Member, next_pool: str | None = None) -> None:
        """Give a worker nothing new any more.

        Args:
            next_pool: where it goes over to once it is idle; None = it leaves.
        """
        member.next_pool = next_pool
        self._turn(member, DRAINING)

    def undrain(self, member: Member) -> None:
        """Give a worker that did not get idle work again, in its old pool."""
        member.next_pool = None
        self._turn(member, LIVE)
        self._renew(member)

    def _turn(self, member: Member, state: str) -> None:
        member.state, member.since = state, self.time.now
        self.views[member.slot] = replace(self.views[member.slot], state=state)
        self.lay_out()

    def remove(self, member: Member) -> None:
        """A worker is gone: drained, dead, or not wanted any more before it was there."""
        member.state, member.gone_at = GONE, self.time.now
        if self.at.get(member.slot) is not member:
            return
        view = self.views.pop(member.slot)
        self.twin.leave(member.slot, view.slot_gen)
        del self.at[member.slot]
        self.lay_out()

    def move(self, member: Member, pool: str) -> None:
        """Let an idle worker serve in another pool from now on."""
        up_since = self.views[member.slot].up_since
        member.pool, member.next_pool = pool, None
        member.state, member.since = LIVE, self.time.now
        self._begin_anew(member, up_since)

    def victims(self, pool: str, count: int) -> list[Member]:
        """Choose who goes: those that still start, newest first, then those with the least KV."""
        starting = [m for m in self.members if m.pool == pool and m.state == STARTING]
        live = [m for m in self.at.values() if m.pool == pool and m.state == LIVE]
        live.sort(key=lambda m: (m.worker.held_tokens, m.slot))
        return [*reversed(starting), *live][:count]

    def state_of(self, pool: str) -> PoolState:
        """Sum up one pool."""
        members = [m for m in self.members if m.pool == pool and m.state != GONE]
        live = [m.worker for m in members if m.state == LIVE]
        loads = [worker.load(self.time.now) for worker in live]
        return PoolState(
            num_live=len(live),
            num_starting=sum(m.state == STARTING for m in members),
            num_draining=sum(m.state == DRAINING for m in members),
            queued_tokens=sum(load.queued_uncached_tokens for load in loads),
            num_waiting=sum(load.waiting for load in loads),
            num_running=sum(load.running for load in loads),
            resident_tokens=sum(load.resident_tokens for load in loads),
            kv_tokens=sum(worker.model.kv_tokens for worker in live),
            workers=[_state_of(m) for m in members if m.state != DEAD],
        )

    def size_of(self, pool: str) -> int:
        """Return how many workers serve in a pool or are on their way to it."""
        here = sum(m.pool == pool and m.state in (LIVE, STARTING) for m in self.members)
        coming = sum(m.next_pool == pool and m.state == DRAINING for m in self.members)
        return here + coming

    def _laid_out(self) -> Field:
        view = ClusterView(tuple(self.views.values()), self.time.now)
        leaving = [view for view in self.views.values() if view.state == DRAINING]
        return lay_out(view, self.config, NO_LINKS, sources=leaving, by_slot=True)

    def _age_later(self) -> None:
        if not self._aging:
            self._aging = True
            self.time.at(self.time.now + self.spec.heartbeat_s, self._age)

    def _age(self) -> None:
        """Newcomers are less new; look again until none is."""
        self._aging = False
        self.lay_out()
        if any(candidate.newness > 0 for candidate in self.arena.candidates):
            self._age_later()

    # -- what they say -----------------------------------------------------------------------

    def beat_later(self, slot: int) -> None:
        """Plan the next heartbeat; each worker has instants of its own, however idle it was."""
        if slot not in self._beating:
            self._beating.add(slot)
            every, phase = self.spec.heartbeat_s, slot / len(self.at)
            when = (math.floor(self.time.now / every - phase) + 1 + phase) * every
            if when <= self.time.now:  # by rounding
                when += every
            self.time.report_at(when, lambda: self._beat(slot))

    def _beat(self, slot: int) -> None:
        """Report a load now and then, until it does not change any more."""
        self._beating.discard(slot)
        member = self.at.get(slot)
        if member is None or member.state == DEAD:
            return
        self._renew(member)
        if not member.worker.is_idle:
            self.beat_later(slot)

    def _renew(self, member: Member) -> None:
        slot, load = member.slot, member.worker.load(self.time.now)
        gen = self.views[slot].slot_gen
        self.twin.renew(slot, gen, member.state, load, self.time.now_ms)
        self.tell(slot, load)

    def publish_later(self, slot: int, change: HintChange) -> None:
        """Publish what has changed in a cache, after the lag."""
        is_wanted = self.is_hinted and (change.added or change.removed)
        told = change if is_wanted else _NOTHING  # the load is told with it in any case
        member = self.at[slot]
        told_at = self.time.now + self.spec.hint_lag_s
        self.time.report_at(told_at, lambda: self._publish(member, told))

    def _publish(self, member: Member, change: HintChange) -> None:
        slot = member.slot
        if self.at.get(slot) is not member or member.state == DEAD:
            return
        self._seqs[slot] += 1
        if self.spec.hint_loss and self.lost.random() < self.spec.hint_loss:
            return
        if not self._tell_store(member, change):
            # Something was lost before it. As a worker does: a new generation, and all again.
            self.num_resyncs += 1
            self._begin_anew(member, self.views[slot].up_since)

    def _begin_anew(self, member: Member, up_since: float | None) -> None:
        """Join again and publish all that is cached."""
        self.join(member, up_since)
        self.lay_out()
        self._seqs[member.slot] = 1
        is_taken = self._tell_store(member, member.worker.held())
        assert is_taken, "a worker that has just joined is in sequence"

    def _tell_store(self, member: Member, change: HintChange) -> bool:
        slot, load = member.slot, member.worker.load(self.time.now)
        said = self.twin.publish(
            (slot, self.views[slot].slot_gen), self._seqs[slot], change,
            load=load, now_ms=self.time.now_ms, state=member.state,
        )  # fmt: skip
        self.tell(slot, load)
        return said == "OK"

    def tell(self, slot: int, load: LoadReport) -> None:
        """Show a load to every router."""
        for placement in self.placements:
            placement.reported(slot, load, self.time.now)


def _state_of(member: Member) -> WorkerState:
    worker = member.worker
    return WorkerState(
        name=member.worker_id,
        state=member.state,
        since=member.since,
        kv_tokens=worker.model.kv_tokens,
        held_tokens=worker.held_tokens,
        coming_tokens=sum(request.final_tokens for request in worker.arriving),
        num_answers=worker.num_answers,
        step_s=worker.step_s,
        prompt_tokens=worker.work_tokens,
        output_tokens=worker.output_tokens,
        prefill_busy_s=worker.prefill_busy_s,
        decode_busy_s=worker.decode_busy_s,
    )
