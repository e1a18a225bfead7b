"""From what routers and workers count to what the autoscaler sees. Pure.

Routers tell sums since their start; a window is a difference of two of them, and several routers
are added up. What cannot be known is left out: a missing figure never shrinks a pool.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.autoscaler.observation import (
    Load,
    Observation,
    PoolSeen,
    Reading,
    Replica,
    ReplicaState,
    StepSeen,
)
from services.autoscaler.policy import LatencySlo, MetricType, PolicySpec, Pool, Role
from services.autoscaler.profile import Lengths, Profile, profiled_tokens_s
from services.common.log_histogram import MAX_BUCKET, LogHistogram

WINDOW_S = 15.0  # that latencies are looked at over, or three ticks
HISTORY_S = 60.0  # that the share of cached tokens is looked at over
# A serving replica without a lease is one still: a store that was restarted has all of them again
# within a second.
LEASE_GRACE_S = 10.0
_DEFAULT_SHARE = 0.95
_SHARES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
POOL_NAMES = {Role.PREFILL: "prefill", Role.DECODE: "decode"}  # as workers and routers call them


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """One router's word: sums since its life began, and what waits now."""

    router_id: str
    life: str
    measured_at: float
    num_requests: int = 0
    prompt_tokens: int = 0
    ended_prompt_tokens: int = 0
    ended_cached_tokens: int = 0
    output_tokens: int = 0
    num_open: int = 0
    num_held: int = 0
    queued_tokens: Mapping[str, int] = field(default_factory=dict)  # by role
    longest_s: float = 0.0
    idle_s: float = 0.0
    ttft: Mapping[str, LogHistogram] = field(default_factory=dict)  # by worker
    itl: LogHistogram = field(default_factory=LogHistogram)


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """One worker's lease and counters."""

    worker_id: str
    role: str
    incarnation: int
    measured_at: float
    is_draining: bool = False
    queued_tokens: int = 0  # of prompts, to be computed
    resident_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    step_s: float = 0.0  # of decode, as things are; 0 = it has not said
    # Since its start; None where it did not answer.
    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    busy_s: float | None = None
    num_held: int | None = None  # blocks, transfers and requests that it holds: 0 = it may go
    refuses_work: bool = False  # by its own word, which comes before its lease's

    @property
    def kv_tokens_wanted(self) -> int:
        """Those in use, and what waits for room: as long as what runs."""
        mean = self.resident_tokens / self.num_running if self.num_running else 0.0
        return self.kv_tokens_used + round(self.num_waiting * mean)


@dataclass(frozen=True, slots=True)
class Sources:
    """All that was read for a tick."""

    routers: Sequence[RouterCounts]
    workers: Sequence[WorkerCounts]
    replicas: Mapping[str, Sequence[Replica]]  # by pool of the policy, as the driver tells
    external: Mapping[str, Reading] = field(default_factory=dict)  # by name of the metric
    can_flip: bool = True


def parse_word(router_id: str, text: str, measured_at: float) -> RouterCounts | None:
    """Read a router's word; None when it is none, since the store is not to be trusted."""
    try:
        raw = json.loads(text)
        return RouterCounts(
            router_id=router_id,
            life=str(raw["life"]),
            measured_at=measured_at,
            num_requests=_count(raw["requests"]),
            prompt_tokens=_count(raw["prompt"]),
            ended_prompt_tokens=_count(raw["ended_prompt"]),
            ended_cached_tokens=_count(raw["ended_cached"]),
            output_tokens=_count(raw["output"]),
            num_open=_count(raw["open"]),
            num_held=_count(raw["held"]),
            queued_tokens={str(role): _count(tokens) for role, tokens in raw["queued"].items()},
            longest_s=_seconds(raw["longest_s"]),
            idle_s=_seconds(raw["idle_s"]),
            ttft={str(worker): _histogram(counts) for worker, counts in raw["ttft"].items()},
            itl=_histogram(raw["itl"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError("not a count")
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ValueError("not a duration")
    return float(value)


def _histogram(raw: Mapping[str, Any]) -> LogHistogram:  # Any: JSON
    counts = {int(bucket): _count(count) for bucket, count in raw.items()}
    if counts and not 0 <= min(counts) <= max(counts) <= MAX_BUCKET:
        raise ValueError("not a bucket")
    return LogHistogram(counts)


class SignalBook:
    """Remembers what was read before, as far as differences need it."""

    def __init__(self) -> None:
        self._routers: dict[str, list[RouterCounts]] = {}  # oldest first
        self._workers: dict[str, WorkerCounts] = {}
        self._replicas: dict[str, Replica] = {}
        self._counted: dict[str, RouterCounts] = {}  # that the last load ends with
        self._lengths: Lengths | None = None  # of requests, as long as none came lately
        self._seen_ready: dict[str, float] = {}  # when a replica was last ready by its lease

    def observe(
        self, policy: PolicySpec, sources: Sources, now: float, profile: Profile | None = None
    ) -> Observation:
        """Return what is seen at a tick; `now` is not before the one of the last call."""
        self._note_routers(sources.routers, now)
        workers = {worker.worker_id: worker for worker in sources.workers}
        window_s = max(WINDOW_S, 3.0 * policy.tick_seconds)
        replicas = {
            pool.name: tuple(
                self._merged(replica, workers, now)
                for replica in sources.replicas.get(pool.name, ())
            )
            for pool in policy.pools
        }
        young = _young(policy, replicas, now)
        common = {**self._latencies(policy, window_s, young, workers, now), **sources.external}
        pools = {
            pool.name: self._pool_seen(pool, replicas[pool.name], workers, common, young)
            for pool in policy.pools
        }
        newest = self._newest()
        seen = Observation(
            pools=pools,
            load=self._load(),
            num_held=sum(word.num_held for word in newest),
            idle_s=min((word.idle_s for word in newest), default=0.0),
            can_flip=sources.can_flip,
        )
        seen = self._profiled(seen, policy, profile)
        self._workers = workers
        self._seen_ready = {
            replica_id: at
            for replica_id, at in self._seen_ready.items()
            if now - at <= LEASE_GRACE_S
        }
        self._replicas = {r.replica_id: r for pool in replicas.values() for r in pool}
        return seen

    # -- replicas ----------------------------------------------------------------------------

    def _merged(self, replica: Replica, workers: Mapping[str, WorkerCounts], now: float) -> Replica:
        """Join what the driver and the lease say of a replica."""
        worker, state = workers.get(replica.replica_id), replica.state
        if worker is not None and state is not ReplicaState.DRAINING:
            state = ReplicaState.DRAINING if worker.is_draining else ReplicaState.READY
            self._seen_ready[replica.replica_id] = now
        elif worker is None and state is ReplicaState.READY:
            ready_at = self._seen_ready.get(replica.replica_id, float("-inf"))
            if now - ready_at > LEASE_GRACE_S:
                state = ReplicaState.STARTING
        before = self._replicas.get(replica.replica_id)
        since = replica.since if state is replica.state else now
        if before is not None and before.state is state:
            since = min(before.since, since)
        used = 0 if worker is None else worker.kv_tokens_used
        return replace(replica, state=state, since=since, kv_tokens_used=used)

    # -- one pool ----------------------------------------------------------------------------

    def _pool_seen(
        self,
        pool: Pool,
        replicas: tuple[Replica, ...],
        workers: Mapping[str, WorkerCounts],
        common: Mapping[str, Reading],
        young: frozenset[str],
    ) -> PoolSeen:
        role = POOL_NAMES[pool.role]
        own = [workers[r.replica_id] for r in replicas if r.replica_id in workers]
        ready = {r.replica_id for r in replicas if r.state is ReplicaState.READY}
        serving = [worker for worker in own if worker.worker_id in ready]
        readings = dict(common)
        readings |= self._queued(role, own)
        room = sum(worker.kv_tokens_total for worker in serving)
        if room:
            wanted = sum(worker.kv_tokens_wanted for worker in serving)
            at = min(worker.measured_at for worker in serving)
            readings[MetricType.KV_UTILIZATION.value] = Reading(wanted / room, at)
        warm = [w for w in serving if w.worker_id not in young]
        work, busy_s = self._work(role, warm)
        is_decode = pool.role is Role.DECODE
        return PoolSeen(
            replicas,
            readings,
            work,
            busy_s,
            steps=tuple(_steps(warm)) if is_decode else (),
            most_answers=_most_answers(warm) if is_decode else None,
        )

    def _queued(self, role: str, own: Sequence[WorkerCounts]) -> dict[str, Reading]:
        newest = self._newest()
        if not newest:
            return {}
        at_routers = sum(word.queued_tokens.get(role, 0) for word in newest)
        at_workers = sum(worker.queued_tokens for worker in own)
        measured_at = min(
            min(word.measured_at for word in newest),
            min((worker.measured_at for worker in own), default=float("inf")),
        )
        return {
            MetricType.QUEUED_TOKENS.value: Reading(float(at_routers + at_workers), measured_at)
        }

    def _work(self, role: str, warm: Sequence[WorkerCounts]) -> tuple[int, float]:
        """Add up what warm replicas have done since the tick before, and how long they took."""
        tokens, busy_s = 0, 0.0
        for worker in warm:
            before = self._workers.get(worker.worker_id)
            if before is None or before.incarnation != worker.incarnation:
                continue
            done, done_before = _done(worker, role), _done(before, role)
            if done is None or done_before is None:
                continue
            tokens += max(0, done[0] - done_before[0])
            busy_s += max(0.0, done[1] - done_before[1])
        return tokens, busy_s

    def _profiled(
        self, seen: Observation, policy: PolicySpec, profile: Profile | None
    ) -> Observation:
        """Add what a replica of each pool does by the profile, once a request came."""
        self._lengths = self._lengths_of_late() or self._lengths
        if profile is None or self._lengths is None:
            return seen
        pools = dict(seen.pools)
        for pool in policy.pools:
            pace = profiled_tokens_s(profile, self._lengths, policy, pool.role)
            pools[pool.name] = replace(pools[pool.name], profile_tokens_s=pace)
        return replace(seen, pools=pools)

    # -- routers -----------------------------------------------------------------------------

    def _note_routers(self, words: Iterable[RouterCounts], now: float) -> None:
        seen = {word.router_id: word for word in words}
        for router_id in self._routers.keys() - seen.keys():
            del self._routers[router_id]
            self._counted.pop(router_id, None)
        for router_id, word in seen.items():
            kept = self._routers.setdefault(router_id, [])
            if kept and kept[-1].life != word.life:
                # All that a new life tells came after what the old one told last.
                started_at = kept[-1].measured_at
                kept[:] = [RouterCounts(router_id, word.life, started_at)]
                self._counted[router_id] = kept[0]
            if not kept or word.measured_at > kept[-1].measured_at:
                kept.append(word)
            while len(kept) > 2 and kept[1].measured_at <= now - HISTORY_S:
                del kept[0]

    def _newest(self) -> list[RouterCounts]:
        return [words[-1] for words in self._routers.values()]

    def _spans(self, window_s: float, now: float) -> list[tuple[RouterCounts, RouterCounts]]:
        """Return each router's words at both ends of a window, as far as it was watched."""
        spans = []
        for words in self._routers.values():
            before = [word for word in words if word.measured_at <= now - window_s]
            spans.append((before[-1] if before else words[0], words[-1]))
        return [(older, newer) for older, newer in spans if older is not newer]

    def _latencies(
        self,
        policy: PolicySpec,
        window_s: float,
        young: frozenset[str],
        workers: Mapping[str, WorkerCounts],
        now: float,
    ) -> dict[str, Reading]:
        spans = self._spans(window_s, now)
        if not spans or len(spans) < len(self._routers):
            return {}  # of some router nothing is known yet
        measured_at = min(newer.measured_at for _, newer in spans)
        ttft, itl = LogHistogram(), LogHistogram()
        for older, newer in spans:
            itl.merge(newer.itl.since(older.itl))
            for worker_id, counts in newer.ttft.items():
                if worker_id not in young:
                    ttft.merge(counts.since(older.ttft.get(worker_id, LogHistogram())))
        newest = self._newest()
        first_s = ttft.quantile(_share(policy.slo.ttft))
        if first_s is None:
            # Nobody got a first token: nobody asked, or somebody waits for it all the time.
            first_s = max(word.longest_s for word in newest)
        readings = {MetricType.TTFT.value: Reading(first_s, measured_at)}
        gap_s = itl.quantile(_share(policy.slo.itl))
        if gap_s is None and not any(worker.num_running for worker in workers.values()):
            gap_s = 0.0
        if gap_s is not None:
            readings[MetricType.ITL.value] = Reading(gap_s, measured_at)
        return readings

    def _load(self) -> Load | None:
        """Add up what came since the last load."""
        newest = self._newest()
        pairs = [(self._counted[w.router_id], w) for w in newest if w.router_id in self._counted]
        self._counted = {word.router_id: word for word in newest}
        spans = [newer.measured_at - older.measured_at for older, newer in pairs]
        if not pairs or max(spans) <= 0:
            return None
        prompts = sum(newer.prompt_tokens - older.prompt_tokens for older, newer in pairs)
        return Load(
            num_requests=sum(newer.num_requests - older.num_requests for older, newer in pairs),
            prompt_tokens=round(prompts * self._uncached_share()),
            output_tokens=sum(newer.output_tokens - older.output_tokens for older, newer in pairs),
            measured_at=min(word.measured_at for word in newest),
            span_s=max(spans),
        )

    def _lengths_of_late(self) -> Lengths | None:
        num_requests = prompts = answers = 0
        for words in self._routers.values():
            num_requests += words[-1].num_requests - words[0].num_requests
            prompts += words[-1].prompt_tokens - words[0].prompt_tokens
            answers += words[-1].output_tokens - words[0].output_tokens
        if num_requests <= 0:
            return None
        prompt = prompts / num_requests
        return Lengths(prompt, prompt * self._uncached_share(), answers / num_requests)

    def _uncached_share(self) -> float:
        """Return the share of prompt tokens that had to be computed lately; 1 where none ended."""
        prompts = cached = 0
        for words in self._routers.values():
            prompts += words[-1].ended_prompt_tokens - words[0].ended_prompt_tokens
            cached += words[-1].ended_cached_tokens - words[0].ended_cached_tokens
        return 1.0 - cached / prompts if prompts > 0 else 1.0


def _done(worker: WorkerCounts, role: str) -> tuple[int, float] | None:
    tokens = worker.prefill_tokens if role == POOL_NAMES[Role.PREFILL] else worker.decode_tokens
    if tokens is None or worker.busy_s is None:
        return None
    return tokens, worker.busy_s


def _steps(warm: Sequence[WorkerCounts]) -> Iterator[StepSeen]:
    for worker in warm:
        if worker.num_running and worker.step_s > 0:
            yield StepSeen(float(worker.num_running), worker.step_s)


def _most_answers(warm: Sequence[WorkerCounts]) -> float | None:
    """Return how many answers like those of now fit one replica on average."""
    used, running = (
        sum(worker.kv_tokens_used for worker in warm), sum(worker.num_running for worker in warm)
    )  # fmt: skip
    if not used or not running:
        return None
    return sum(worker.kv_tokens_total for worker in warm) / len(warm) / (used / running)


def _young(
    policy: PolicySpec, replicas: Mapping[str, Sequence[Replica]], now: float
) -> frozenset[str]:
    """Return the replicas that warm up: what they show says little of them."""
    return frozenset(
        replica.replica_id
        for pool in policy.pools
        for replica in replicas[pool.name]
        if replica.state is ReplicaState.READY
        and now - replica.since < pool.startup.warm_up_seconds
    )


def _share(slo: LatencySlo | None) -> float:
    return _DEFAULT_SHARE if slo is None else _SHARES[slo.percentile]
