"""Makers for the autoscaler's values, and two pools of simple workers that it can resize."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.autoscaler.decide import decide
from services.autoscaler.decision import Decision, PoolDecision
from services.autoscaler.observation import (
    Load,
    Observation,
    PoolSeen,
    Reading,
    Replica,
    ReplicaState,
)
from services.autoscaler.policy import PolicySpec
from services.autoscaler.state import State

NOW = 1_796_000_000.0  # 2026-11-30T00:53:20Z, a Monday
QUEUED = {"type": "QueuedTokens", "target": {"type": "AverageValue", "averageValue": "1000"}}
TTFT = {"type": "TTFT", "target": {"type": "Value", "value": "400m"}}
ITL = {"type": "ITL", "target": {"type": "Value", "value": "35m"}}
KV = {"type": "KVUtilization", "target": {"type": "Utilization", "averageUtilization": 75}}

Fields = dict[str, Any]  # a part of a policy file: pydantic checks it


def prefill_fields(**changes: Any) -> Fields:
    """Return a prefill pool as it stands in a file."""
    fields = {"name": "prefill", "role": "Prefill", "minReplicas": 1, "maxReplicas": 8}
    return {**fields, "metrics": [QUEUED], **changes}


def decode_fields(**changes: Any) -> Fields:
    """Return a decode pool as it stands in a file."""
    fields = {"name": "decode", "role": "Decode", "minReplicas": 1, "maxReplicas": 8}
    return {**fields, "metrics": [KV], **changes}


def make_policy(
    prefill: Fields | None = None, decode: Fields | None = None, **changes: Any
) -> PolicySpec:
    """Return a policy of two pools."""
    pools = [prefill_fields(**(prefill or {})), decode_fields(**(decode or {}))]
    return PolicySpec.model_validate({"clusterRef": {"name": "test"}, "pools": pools, **changes})


def behavior(
    up: Fields | None = None, down: Fields | None = None, *, panic: bool = False
) -> Fields:
    """Return a behavior that limits nothing but what is given."""
    free = [{"type": "Percent", "value": 10_000, "periodSeconds": 1}]
    all_of_it = [{"type": "Percent", "value": 100, "periodSeconds": 1}]
    return {
        "scaleUp": {"policies": free, "panic": {"enabled": panic}, **(up or {})},
        "scaleDown": {
            "stabilizationWindowSeconds": 0, "policies": all_of_it,
            "consolidationCheck": {"enabled": False}, **(down or {}),
        },
    }  # fmt: skip


def make_replicas(
    name: str, ready: int, starting: int = 0, draining: int = 0, *, at: float = NOW
) -> tuple[Replica, ...]:
    """Return replicas that have served for an hour, or begun to start or leave 10 s ago."""
    counts = (
        (ReplicaState.READY, ready), (ReplicaState.STARTING, starting),
        (ReplicaState.DRAINING, draining),
    )  # fmt: skip
    return tuple(
        Replica(
            f"{name}-{state.value}-{i}", state, at - (3600 if state is ReplicaState.READY else 10)
        )
        for state, num in counts
        for i in range(num)
    )


def make_seen(
    prefill: Mapping[str, float] | None = None,
    decode: Mapping[str, float] | None = None,
    *,
    ready: tuple[int, int] = (2, 2),
    starting: tuple[int, int] = (0, 0),
    age_s: float = 0.0,
    at: float = NOW,
    **changes: Any,
) -> Observation:
    """Return what is seen at a moment; by default both pools are right at their targets."""
    figures = {
        "prefill": prefill if prefill is not None else {"QueuedTokens": 1000.0 * ready[0]},
        "decode": decode if decode is not None else {"KVUtilization": 0.75},
    }
    pools = {
        name: PoolSeen(
            replicas=make_replicas(name, ready[i], starting[i], at=at),
            readings={k: Reading(v, at - age_s) for k, v in figures[name].items()},
        )
        for i, name in enumerate(("prefill", "decode"))
    }
    load = Load(10, 10_000, 1_000, at - age_s, 5.0)
    return Observation(**{"pools": pools, "load": load, **changes})


def of_pool(decision: Decision, name: str) -> PoolDecision:
    """Return one pool's part of a decision."""
    return next(p for p in decision.pools if p.pool == name)


def sizes(decision: Decision) -> tuple[int, ...]:
    """Return the sizes decided, in the order of the policy."""
    return tuple(p.desired for p in decision.pools)


def steps_of(pool: PoolDecision) -> list[str]:
    """Return the steps that changed a size."""
    return [c.step for c in pool.clamps]


@dataclass
class World:
    """Two pools of workers without queues of their own, in virtual time.

    Prompts wait in one queue, which ready prefill workers empty at `prefill_rate` tokens a second
    each. Decode workers are as full as the output rate asks for: `decode_rate` each at 100 %.
    """

    policy: PolicySpec
    prompt_rate: Callable[[float], float]  # tokens a second, by seconds since the start
    output_rate: Callable[[float], float]
    prefill_rate: float = 1000.0
    decode_rate: float = 1000.0
    startup_s: float = 30.0
    drain_s: float = 10.0
    flip_s: float = 3.0
    cold_s: float = 0.0  # after its start a worker does a tenth of its rate for so long
    never_comes_up: Callable[[str], bool] = lambda _: False
    seed_sizes: Sequence[int] = (1, 1)
    now: float = NOW
    state: State = field(default_factory=State)
    queued: float = 0.0
    history: list[Decision] = field(default_factory=list)
    ready_history: list[tuple[int, int]] = field(default_factory=list)
    _pools: dict[str, list[Replica]] = field(default_factory=dict)
    _ends: dict[str, float] = field(default_factory=dict)  # when a start or a drain is over
    _flips: dict[str, str] = field(default_factory=dict)
    _num_made: int = 0

    def __post_init__(self) -> None:
        for i, pool in enumerate(self.policy.pools):
            self._pools[pool.name] = [
                Replica(f"{pool.name}-{k}", ReplicaState.READY, NOW - 3600.0)
                for k in range(self.seed_sizes[i])
            ]

    def run(self, duration_s: float) -> World:
        """Let ticks pass."""
        end = self.now + duration_s
        while self.now < end:
            self.tick()
        return self

    def tick(self) -> Decision:
        """Pass one tick of time, decide, and act."""
        tick_s = float(self.policy.tick_seconds)
        self.now += tick_s
        self._come_and_go()
        seen = self._work(tick_s)
        decision, self.state = decide(self.policy, seen, self.state, self.now)
        self.history.append(decision)
        self.ready_history.append((self.num_ready("prefill"), self.num_ready("decode")))
        if decision.is_acted_on:
            self._act(decision)
        return decision

    def num_ready(self, pool: str) -> int:
        """Return how many serve."""
        return sum(1 for r in self._pools[pool] if r.state is ReplicaState.READY)

    def num_live(self, pool: str) -> int:
        """Return how many hold accelerators."""
        return len(self._pools[pool])

    def desired(self, pool: str) -> list[int]:
        """Return the sizes decided, tick by tick."""
        return [of_pool(d, pool).desired for d in self.history]

    def _pace(self, pool: str, rate: float) -> float:
        ready = [r for r in self._pools[pool] if r.state is ReplicaState.READY]
        return sum(rate * (0.1 if self.now - r.since < self.cold_s else 1.0) for r in ready)

    def _work(self, tick_s: float) -> Observation:
        elapsed = self.now - NOW
        came, asked = self.prompt_rate(elapsed) * tick_s, self.output_rate(elapsed)
        pace = self._pace("prefill", self.prefill_rate)
        done = min(self.queued + came, pace * tick_s)
        self.queued += came - done
        num_prefill, num_decode = self.num_ready("prefill"), self.num_ready("decode")
        decode_pace = self._pace("decode", self.decode_rate)
        full = asked / decode_pace if decode_pace else 0.0
        figures = {
            "prefill": {
                "QueuedTokens": self.queued,
                "TTFT": 0.1 + (self.queued / pace if pace else 0.0),
            },
            "decode": {"KVUtilization": full, "ITL": 0.02 * max(1.0, full / 0.75)},
        }
        busy = done / pace * num_prefill if pace else 0.0
        work = {"prefill": (done, busy),
                "decode": (min(asked, decode_pace) * tick_s, num_decode * tick_s)}  # fmt: skip
        pools = {
            name: PoolSeen(
                tuple(replicas),
                {k: Reading(v, self.now) for k, v in figures[name].items()},
                work_tokens=int(work[name][0]),
                busy_s=work[name][1],
            )
            for name, replicas in self._pools.items()
        }
        load = Load(int(came > 0 or asked > 0), int(came), int(asked * tick_s), self.now, tick_s)
        return Observation(pools, load, idle_s=0.0 if load.num_requests else elapsed)

    def _come_and_go(self) -> None:
        for name, replicas in list(self._pools.items()):
            for replica in list(replicas):
                if self._ends.get(replica.replica_id, self.now + 1.0) > self.now:
                    continue
                del self._ends[replica.replica_id]
                replicas.remove(replica)
                target = self._flips.pop(replica.replica_id, name)
                if replica.state is ReplicaState.STARTING or target != name:
                    self._pools[target].append(
                        Replica(replica.replica_id, ReplicaState.READY, self.now)
                    )

    def _act(self, decision: Decision) -> None:
        for pool in decision.pools:
            replicas = self._pools[pool.pool]
            replicas[:] = [r for r in replicas if r.replica_id not in pool.cancel]
            for replica_id in pool.drain:
                self._drain(pool.pool, replica_id, self.drain_s)
            for _ in range(pool.start):
                self._num_made += 1
                replica_id = f"{pool.pool}-new-{self._num_made}"
                replicas.append(Replica(replica_id, ReplicaState.STARTING, self.now))
                if not self.never_comes_up(replica_id):
                    self._ends[replica_id] = self.now + self.startup_s
        for flip in decision.flips:
            self._drain(flip.source, flip.replica_id, self.flip_s)
            self._flips[flip.replica_id] = flip.target

    def _drain(self, pool: str, replica_id: str, takes_s: float) -> None:
        replicas = self._pools[pool]
        i = next(i for i, r in enumerate(replicas) if r.replica_id == replica_id)
        replicas[i] = Replica(replica_id, ReplicaState.DRAINING, self.now)
        self._ends[replica_id] = self.now + takes_s
