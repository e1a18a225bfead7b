"""`isthmus chaos scale`: the autoscaler resizes both pools 2-4-2 under load, again and again.

The controller is the real one, with its lease in the cluster's store; its policy's limits say how
large the pools are to be. No client may notice, and who leaves holds nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.autoscaler.controller import Controller, Parts
from services.autoscaler.driver import Capabilities, DriverError
from services.autoscaler.epoch_clock import EpochClock
from services.autoscaler.leadership import Lease
from services.autoscaler.observation import Replica, ReplicaState
from services.autoscaler.policy import OnDeadline, PoolAutoscalingPolicy
from services.autoscaler.policy_file import parse_policy
from services.autoscaler.signal_reader import SignalReader
from services.autoscaler.worker_calls import WorkerCalls
from services.bench.result import Bar, BenchFailed, BenchResult
from services.chaos.attack import LIVE_TIMEOUT_S, Attack, Load, loaded_cluster
from services.chaos.keyed_load import KeyedLoad
from services.chaos.known_load import LoadShape
from services.chaos.rig import Rig, RigWorker, held
from services.common.clock import SystemClock
from services.common.model_manifest import read_manifest
from services.common.progress import Progress, silent
from services.registry.reader import RedisRegistryReader
from services.registry.scaling import ScalingStore
from services.registry.schema import Keys, namespace_of
from services.registry.store_client import StoreAddress
from services.telemetry.metrics import Metrics

SMALL, LARGE = 2, 4
NUM_BLOCKS = 256  # of a worker, which may just hold the longest request
# Slow steps: answers hold their KV long, so that few requests a second fill it, whatever processor
# time they are left.
_SPEED = "20000:16"
_AIMED = 1.1  # times the share that the load has to take
_MAX_CLIENTS = 64
_HOLD_S = 1.5  # at each size
_LOOK_S = 0.1
_FILL_LOOK_S = 3.0
_LEAVE_TIMEOUT_S = 90.0
_END_TIMEOUT_S = 30.0  # of a process told to end
_ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """How often, and with what load: clients are added until it is large enough."""

    seed: int
    rounds: int = 20
    share: float = 0.6  # of two decode workers' KV that the load has to take
    load: Load = field(
        default_factory=lambda: Load(
            clients=12, shape=LoadShape(output_lengths=(8, 60, 200, 300), timeout_s=60.0)
        )
    )


def policy_of(size: int) -> PoolAutoscalingPolicy:
    """Return a policy by which both pools have that size."""
    metrics = {
        "Prefill": {
            "type": "QueuedTokens", "target": {"type": "AverageValue", "averageValue": "4k"}
        },
        "Decode": {
            "type": "KVUtilization", "target": {"type": "Utilization", "averageUtilization": 60}
        },
    }  # fmt: skip
    pools = [
        {
            "name": role.lower(),
            "role": role,
            "minReplicas": size,
            "maxReplicas": size,
            "metrics": [metric],
            "drain": {"deadlineSeconds": 60},
        }
        for role, metric in metrics.items()
    ]
    spec = {"clusterRef": {"name": "chaos"}, "tickSeconds": 1, "pools": pools}
    return parse_policy(
        {
            "apiVersion": "autoscaling.isthmus.dev/v1alpha1",
            "kind": "PoolAutoscalingPolicy",
            "metadata": {"name": "chaos"},
            "spec": spec,
        },
        "chaos scale",
    )


def run(plan: ScalePlan, progress: Progress = silent) -> BenchResult:
    """Run on the main thread: the processes die with it."""
    return asyncio.run(_run(plan, progress))


async def _run(plan: ScalePlan, progress: Progress) -> BenchResult:
    async with loaded_cluster(plan.seed, plan.load, num_blocks=NUM_BLOCKS, speed=_SPEED) as (
        rig,
        load,
    ):
        scale = _Scale(plan, rig, load, progress)
        await scale.run()
        return _result(plan, scale)


class RigDriver:
    """Implements Driver over the workers of a rig; pools are called as their roles."""

    capabilities = Capabilities(can_flip=False, names_victims=True)

    def __init__(self, rig: Rig, calls: WorkerCalls, clock: EpochClock) -> None:
        self.num_left = 0
        self.num_held_at_stop = 0  # by those that were stopped, as they said themselves
        self._rig = rig
        self._calls = calls
        self._clock = clock
        self._since: dict[str, float] = {}
        self._draining: set[str] = set()
        self._stopping: dict[str, asyncio.Task[None]] = {}

    async def replicas(self) -> Mapping[str, tuple[Replica, ...]]:
        """All workers but those that were told to end."""
        self._stopping = {name: task for name, task in self._stopping.items() if not task.done()}
        found: dict[str, list[Replica]] = {role: [] for role in _ROLES}
        for worker in self._rig.workers:
            if worker.name not in self._stopping:
                is_leaving = worker.name in self._draining
                # Its lease says when it serves.
                state = ReplicaState.DRAINING if is_leaving else ReplicaState.STARTING
                since = self._since.setdefault(worker.name, self._clock.now())
                found[worker.role].append(Replica(worker.name, state, since))
        return {role: tuple(replicas) for role, replicas in found.items()}

    async def start(self, pool: str, count: int) -> None:
        """Start workers."""
        for _ in range(count):
            worker = self._rig.add_worker(pool)
            self._since[worker.name] = self._clock.now()

    async def cancel(self, replica_ids: Sequence[str]) -> None:
        """End workers that start."""
        for replica_id in replica_ids:
            self._begin_stop(self._worker(replica_id))

    async def drain(self, replica_id: str, deadline_s: float, on_deadline: OnDeadline) -> None:
        """Tell the worker."""
        await self._calls.drain(self._worker(replica_id).grpc)
        self._draining.add(replica_id)

    async def stop(self, replica_id: str) -> None:
        """Read what it still holds, then end it."""
        if replica_id in self._stopping:
            return
        worker = self._worker(replica_id)
        self.num_held_at_stop += sum(held({worker.name: await worker.status()}).values())
        self.num_left += 1
        self._begin_stop(worker)

    async def flip(self, replica_id: str, pool: str) -> None:
        """Not here."""
        raise DriverError("workers of a rig keep their role")

    async def close(self) -> None:
        """Wait for those that end."""
        await asyncio.gather(*self._stopping.values())
        await self._calls.close()

    def _worker(self, replica_id: str) -> RigWorker:
        for worker in self._rig.workers:
            if worker.name == replica_id:
                return worker
        raise DriverError(f"there is no worker {replica_id}")

    def _begin_stop(self, worker: RigWorker) -> None:
        worker.stop()
        self._stopping[worker.name] = asyncio.create_task(self._end(worker))

    async def _end(self, worker: RigWorker) -> None:
        end = time.monotonic() + _END_TIMEOUT_S
        while worker.child.is_running:
            if time.monotonic() > end:
                raise BenchFailed(f"{worker.name} does not end: {worker.child.tail(3)}")
            await asyncio.sleep(0.02)
        self._draining.discard(worker.name)
        self._since.pop(worker.name, None)
        await self._rig.forget_worker(worker)


class _Scale(Attack):
    """Lets the pools grow and shrink."""

    def __init__(self, plan: ScalePlan, rig: Rig, load: KeyedLoad, progress: Progress) -> None:
        super().__init__(rig, load, plan.load.clients)
        self.policy = policy_of(SMALL)
        self.longest_up_s = self.longest_down_s = 0.0
        self.kv_shares: list[float] = []  # of the decode pool at its small size
        self._plan = plan
        self._progress = progress
        clock = SystemClock()
        epoch = EpochClock(clock)
        namespace = namespace_of(read_manifest(rig.model_dir).weights_digest)
        self._registry = RedisRegistryReader(StoreAddress(rig.store.url), namespace, clock)
        store = ScalingStore(Keys(namespace), self._registry.run, timeout_s=2.0)
        self._calls = WorkerCalls()
        self.driver = RigDriver(rig, WorkerCalls(), epoch)
        self._controller = Controller(
            Parts(
                policy=lambda: self.policy,
                reader=SignalReader(self._registry, store, self._calls),
                driver=self.driver,
                lease=Lease(store, "chaos", clock),
                clock=epoch,
                metrics=Metrics.disabled(),
            )
        )

    @property
    def num_clients(self) -> int:
        """Those that ask in the end."""
        return len(self._clients)

    async def _attack(self) -> None:
        running = asyncio.create_task(self._controller.run())
        try:
            self._progress("filling", 0.0)
            await self._fill()
            for number in range(self._plan.rounds):
                share = number / self._plan.rounds
                self._progress("growing", share)
                self.longest_up_s = max(self.longest_up_s, await self._resize(LARGE))
                await asyncio.sleep(_HOLD_S)
                self._progress("shrinking", share)
                self.longest_down_s = max(self.longest_down_s, await self._resize(SMALL))
                self.tally.faults["2-4-2"] += 1
                await self._note_load()
                self._note_deaths()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await self.driver.close()
            await self._calls.close()
            await self._registry.close()

    async def _resize(self, size: int) -> float:
        """Ask for a size and wait until both pools have it; return how long it took."""
        started, wanted = time.monotonic(), size * len(_ROLES)
        self.policy = policy_of(size)
        end = started + _LEAVE_TIMEOUT_S
        while len(self._rig.workers) != wanted:
            if time.monotonic() > end:
                raise BenchFailed(
                    f"{len(self._rig.workers)} workers instead of {wanted} after "
                    f"{_LEAVE_TIMEOUT_S:.0f} s\n{self._rig.tails()}"
                )
            await asyncio.sleep(0.05)
        await self._rig.until_live(LIVE_TIMEOUT_S)
        return time.monotonic() - started

    async def _fill(self) -> None:
        """Add clients until the load takes what it has to of the small pool."""
        while await self._kv_share(_FILL_LOOK_S) < self._plan.share * _AIMED:
            if len(self._clients) >= _MAX_CLIENTS:
                return  # the bar tells
            self._add_client()
            self._add_client()

    async def _note_load(self) -> None:
        """Look at the load between two rounds, and mend it where it has become too little."""
        self.kv_shares.append(await self._kv_share(_HOLD_S))
        if self.kv_shares[-1] < self._plan.share and len(self._clients) < _MAX_CLIENTS:
            self._add_client()

    async def _kv_share(self, for_s: float) -> float:
        """Return the mean share of the decode pool's KV in use over some time."""
        shares, end = [], time.monotonic() + for_s
        while time.monotonic() < end:
            statuses = await self._rig.statuses()
            decode = [s for name, s in statuses.items() if s and name.startswith("decode")]
            total = sum(status.blocks_total for status in decode)
            if total:
                shares.append(sum(status.blocks_in_use for status in decode) / total)
            await asyncio.sleep(_LOOK_S)
        return sum(shares) / len(shares) if shares else 0.0


def _result(plan: ScalePlan, scale: _Scale) -> BenchResult:
    shares = scale.kv_shares
    result = BenchResult("chaos scale")
    result.figures = {
        "seed": plan.seed,
        "rounds": plan.rounds,
        "workers_that_left": scale.driver.num_left,
        "longest_growing_s": round(scale.longest_up_s, 2),
        "longest_shrinking_s": round(scale.longest_down_s, 2),
        "clients": scale.num_clients,
        **scale.figures(),
        **scale.examples(),
    }
    result.bars = [
        *scale.bars(),
        # Nothing happens to routers here: no client has a reason to ask another one.
        Bar("sent_to_other_router", scale.load.num_sent_again, 0, "=="),
        Bar("held_by_who_was_stopped", scale.driver.num_held_at_stop, 0, "=="),
        # Else the zeros above would prove nothing.
        Bar("left_workers", scale.driver.num_left, plan.rounds * (LARGE - SMALL) * 2, ">="),
        Bar("answered", scale.load.findings.num_answered, 1, ">="),
        Bar("decode_kv_share", round(sum(shares) / len(shares), 3), plan.share, ">="),
    ]
    return result
