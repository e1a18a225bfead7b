"""Simulated pools sized by the autoscaler's own decisions. Pure.

Sees what its signals would show: first tokens and gaps of the last seconds, work since the tick
before, queues and KV as workers report them; and does with a decision what a driver would do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.autoscaler.decide import decide
from services.autoscaler.decision import Decision
from services.autoscaler.observation import (
    Load,
    Observation,
    PoolSeen,
    Reading,
    Replica,
    ReplicaState,
    StepSeen,
)
from services.autoscaler.policy import LatencySlo, Pool, PoolAutoscalingPolicy, Role
from services.autoscaler.profile import Lengths, profiled_tokens_s
from services.autoscaler.state import State
from services.common.quantile import nearest_rank
from services.router.view import DRAINING, LIVE
from services.sim import controller
from services.sim.autoscaling.profile import Profile
from services.sim.cluster import DECODE, PREFILL
from services.sim.controller import Orders, PoolState, WorkerState

_NUM_LENGTHS = 1000  # of requests, that a profile is asked for
WINDOW_S = 15.0  # of first tokens and gaps, as the histograms of routers are read
_SIM_POOL = {Role.PREFILL: PREFILL, Role.DECODE: DECODE}
_STATES = {LIVE: ReplicaState.READY, DRAINING: ReplicaState.DRAINING}


@dataclass(slots=True)
class DecidedPools:
    """A controller: the autoscaler on a policy, one pool of each role at most."""

    policy: PoolAutoscalingPolicy
    profile: Profile  # what a policy that counts by a profile is told
    can_flip: bool = False
    state: State = field(default_factory=State)
    decisions: list[Decision] = field(default_factory=list)
    _ttfts: deque[tuple[float, float]] = field(default_factory=deque)  # when, seconds
    _gaps: deque[tuple[float, float]] = field(default_factory=deque)  # one for each answer
    _done: dict[str, tuple[float, float]] = field(default_factory=dict)  # tokens, busy seconds
    _at: float = 0.0  # of the last look
    _arrived_at: float = 0.0  # of the last request
    _lengths: deque[tuple[int, int]] = field(
        default_factory=lambda: deque(maxlen=_NUM_LENGTHS)
    )  # of ended requests: in, out

    @property
    def tick_s(self) -> float:
        """Seconds from one look to the next."""
        return float(self.policy.spec.tick_seconds)

    def orders(self, seen: controller.Observation) -> Orders:
        """Decide, and say what follows from it."""
        observed = self.observe(seen)
        decision, self.state = decide(self.policy.spec, observed, self.state, seen.now)
        self.decisions.append(decision)
        return self._orders_of(decision) if decision.is_acted_on else Orders()

    def observe(self, seen: controller.Observation) -> Observation:
        """Show a moment of the simulation as the autoscaler's signals would."""
        now, span_s = seen.now, seen.now - self._at
        if seen.num_arrived:
            self._arrived_at = now
        self._lengths.extend((r.num_tokens, r.output_tokens) for r in seen.ended)
        self._ttfts.extend((now, ttft_s) for ttft_s in seen.ttfts_s)
        for worker in seen.pools[DECODE].workers:
            self._gaps.extend([(now, worker.step_s)] * worker.num_answers)
        for window in (self._ttfts, self._gaps):
            while window and window[0][0] <= now - WINDOW_S:
                window.popleft()
        # Routers know what answers to expect; what is written lags behind what has come in.
        expected = round(seen.num_arrived * self._mean_length(1))
        load = Load(seen.num_arrived, seen.arrived_tokens, expected, now, span_s)
        pools = {
            pool.name: self._pool(pool, seen.pools[_SIM_POOL[pool.role]], now)
            for pool in self.policy.spec.pools
        }
        self._done = {
            worker.name: _work(worker, role)
            for role, name in _SIM_POOL.items()
            for worker in seen.pools[name].workers
        }
        self._at = now
        return Observation(
            pools,
            load if span_s > 0 else None,
            num_held=seen.num_held,
            idle_s=now - self._arrived_at,
            can_flip=self.can_flip,
        )

    def _pool(self, pool: Pool, state: PoolState, now: float) -> PoolSeen:
        live = [worker for worker in state.workers if worker.state == LIVE]
        readings = {"QueuedTokens": Reading(float(state.queued_tokens), now)}
        if state.kv_tokens:
            asked = sum(worker.held_tokens + worker.coming_tokens for worker in live)
            readings["KVUtilization"] = Reading(asked / state.kv_tokens, now)
        slo = self.policy.spec.slo
        name, window, limit = (
            ("TTFT", self._ttfts, slo.ttft)
            if pool.role is Role.PREFILL
            else ("ITL", self._gaps, slo.itl)
        )
        if window:
            readings[name] = Reading(_percentile((v for _, v in window), limit), window[-1][0])
        warm_s = pool.startup.warm_up_seconds
        # Those there from the beginning have been there for long.
        warm = [w for w in live if w.since <= 0 or now - w.since >= warm_s]
        done = [self._since(worker, pool.role) for worker in warm]
        writing = [w for w in warm if w.num_answers] if pool.role is Role.DECODE else []
        return PoolSeen(
            replicas=tuple(map(_replica, state.workers)),
            readings=readings,
            work_tokens=round(sum(tokens for tokens, _ in done)),
            busy_s=sum(busy_s for _, busy_s in done),
            profile_tokens_s=self._profiled(pool.role),
            steps=tuple(StepSeen(float(w.num_answers), w.step_s) for w in writing),
            most_answers=_most_answers(writing),
        )

    def _profiled(self, role: Role) -> float | None:
        """Return what the profile says of the requests of late, within the SLO."""
        if not self._lengths:
            return None
        isl = self._mean_length(0)
        lengths = Lengths(prompt=isl, computed=isl, answer=self._mean_length(1))
        return profiled_tokens_s(self.profile, lengths, self.policy.spec, role)

    def _mean_length(self, which: int) -> float:
        lengths = [length[which] for length in self._lengths]
        return sum(lengths) / len(lengths) if lengths else 0.0

    def _since(self, worker: WorkerState, role: Role) -> tuple[float, float]:
        """Return tokens and busy seconds since the tick before."""
        tokens, busy_s = _work(worker, role)
        tokens_before, busy_before_s = self._done.get(worker.name, (0.0, 0.0))
        # Who has just changed its pool is counted by other figures than before.
        return max(0.0, tokens - tokens_before), max(0.0, busy_s - busy_before_s)

    def _orders_of(self, decision: Decision) -> Orders:
        names = {pool.name: _SIM_POOL[pool.role] for pool in self.policy.spec.pools}
        moves = {flip.replica_id: names[flip.target] for flip in decision.flips}
        sizes: dict[str, int] = {}
        leaving: list[str] = []
        for made in decision.pools:
            gone = (*made.cancel, *made.drain)
            moved = sum(flip.target == made.pool for flip in decision.flips)
            moved -= sum(flip.source == made.pool for flip in decision.flips)
            sizes[names[made.pool]] = made.current - len(gone) + moved + made.start
            leaving += gone
        return Orders(sizes, tuple(leaving), moves)


def _most_answers(writing: Sequence[WorkerState]) -> float | None:
    held, answers = sum(w.held_tokens for w in writing), sum(w.num_answers for w in writing)
    if not held:
        return None
    return sum(w.kv_tokens for w in writing) / len(writing) / (held / answers)


def _work(worker: WorkerState, role: Role) -> tuple[float, float]:
    if role is Role.PREFILL:
        return float(worker.prompt_tokens), worker.prefill_busy_s
    return worker.output_tokens, worker.decode_busy_s


def _percentile(values: Iterable[float], limit: LatencySlo | None) -> float:
    share = int(limit.percentile[1:]) / 100 if limit is not None else 0.95
    return nearest_rank(list(values), share)


def _replica(worker: WorkerState) -> Replica:
    state = _STATES.get(worker.state, ReplicaState.STARTING)
    return Replica(worker.name, state, worker.since, worker.held_tokens)
