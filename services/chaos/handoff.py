"""`isthmus chaos handoff`: a real cluster under seeded faults, and what must not be found in it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from services.bench.cancel import REST_BAR_MS, Look, freed
from services.bench.result import Bar, BenchResult, Figure
from services.chaos.client import call
from services.chaos.fault_schedule import (
    DELAY_S,
    DUPLICATE_SHARE,
    FLIP_EVERY_BYTES,
    LINK_KINDS,
    FaultSchedule,
    OuterFault,
)
from services.chaos.known_load import (
    Answer,
    Body,
    KnownLoad,
    LoadShape,
    asked_answers,
    computed_answers,
    make_bodies,
)
from services.chaos.rig import MODEL, SCRIPTED, Rig, RigPlan, RigWorker, held
from services.chaos.scripted_model import make_scripted_model
from services.common.model_manifest import read_manifest
from services.common.progress import Progress, silent
from services.models.catalog import resolve
from services.pb import inference_pb2_grpc

LEASE_S = 2.0
STEP_MS = 50  # aimed at by every step, with decodes or without
FREE_AFTER_S = LEASE_S + 3.0  # everything lent or open must be back this long after the last call
MODEL_PROMPT = 400  # tokens of the longest prompt a real model is given
PROBE_TOKENS = 400  # of the long answer that is cancelled
SPEED = "20000:2"  # of scripted workers: prompt tokens a second, ms a step
_SETTINGS: dict[str, dict[str, object]] = {
    "transfer": {"lease_ms": round(LEASE_S * 1000)},
    "worker": {
        "num_blocks": 640,
        "chunk_target_ms": STEP_MS,
        "chunk_target_alone_ms": STEP_MS,
        "threads": 1,
        "drain_s": 0.5,
    },
}
_LIVE_TIMEOUT_S = 180.0  # real models on a busy machine take their time
SIDES = ("prefill", "decode")
_REVIVE_POLL_S = 0.01
_FREE_POLL_S = 0.005  # every look costs the workers a little too


@dataclass(frozen=True, slots=True)
class Campaign:
    """How much, how fast, with what."""

    seed: int
    num_faults: int
    model: str = ""  # empty = scripted workers
    clients: int = 6
    pause_s: float = 0.4  # mean time between outer faults
    faults_a_check: int = 100
    probes_a_check: int = 12
    shape: LoadShape = field(default_factory=LoadShape)
    planes: tuple[str, ...] = ()  # of every worker; empty = the rig's mix


def usual_campaign(
    seed: int, num_faults: int, model: str = "", planes: tuple[str, ...] = ()
) -> Campaign:
    """Give what a command runs; a real model takes seconds to start and longer to answer."""
    if not model:
        a_check = min(100, max(20, num_faults // 2))
        return Campaign(seed, num_faults, faults_a_check=a_check, planes=planes)
    shape = LoadShape((1, 16, 40, 150, MODEL_PROMPT), (1, 2, 8, 20), num_bodies=16, timeout_s=30.0)
    return Campaign(
        seed,
        num_faults,
        model,
        clients=3,
        pause_s=1.5,
        faults_a_check=15,
        shape=shape,
        planes=planes,
    )


@dataclass(frozen=True, slots=True)
class Freed:
    """From a cancel to free blocks on both sides, in ms; the running step, and the rest."""

    step_ms: float
    free_ms: dict[str, float]  # side -> when it was free

    @property
    def total_ms(self) -> float:
        """When the last side was free."""
        return max(self.free_ms.values())

    @property
    def rest_ms(self) -> float:
        """What passed after the step the last worker was in."""
        return self.total_ms - self.step_ms


@dataclass(slots=True)
class Tally:
    """What was done, and what the processes said between the rounds."""

    faults: Counter[str] = field(default_factory=Counter)
    num_leaked: int = 0
    num_crashed: int = 0
    longest_idle_s: float = 0.0  # until everything was back, after a round's last call
    planes: set[str] = field(default_factory=set)  # over which KV came
    freed: list[Freed] = field(default_factory=list)
    num_early: int = 0  # cancels that came before any worker held anything
    longest_look_ms: float = 0.0  # between two looks at what is held: how far times may be off
    notes: list[str] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        """Faults that happened."""
        return self.faults.total()


def run(campaign: Campaign, progress: Progress = silent) -> BenchResult:
    """Run on the main thread: the processes die with it."""
    return asyncio.run(_run(campaign, progress))


async def _run(campaign: Campaign, progress: Progress) -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="isthmus-chaos-") as made:
        if campaign.model:
            model_dir, program = resolve(campaign.model), MODEL
        else:
            model_dir, program = make_scripted_model(Path(made) / "model"), SCRIPTED
        started = time.monotonic()
        progress("starting 2 + 2 workers", 0.0)
        plan = RigPlan(
            model_dir, program=program, speed=SPEED, settings=_SETTINGS, planes=campaign.planes
        )
        schedule = FaultSchedule(campaign.seed, plan.prefill + plan.decode)
        # Nothing passes a point before the load begins.
        async with Rig(plan, lambda worker: schedule.next_point(worker.role)) as rig:
            attack = await _Attack.prepare(campaign, rig, schedule, model_dir)
            attack.progress = progress
            await attack.run()
        return _result(campaign, attack, time.monotonic() - started)


class _Attack:
    """One campaign against one running rig."""

    def __init__(
        self, campaign: Campaign, rig: Rig, schedule: FaultSchedule, load: KnownLoad, probe: Body
    ) -> None:
        self.load = load
        self.tally = Tally()
        self._campaign = campaign
        self._rig = rig
        self._probe = probe
        self._schedule = schedule
        self.progress: Progress = silent
        self._rng = random.Random(f"{campaign.seed}/probes")
        self._ours: set[str] = set()  # workers we killed or froze ourselves
        self._is_arming = False
        self._healing: set[asyncio.Task[None]] = set()

    @classmethod
    async def prepare(
        cls, campaign: Campaign, rig: Rig, schedule: FaultSchedule, model_dir: Path
    ) -> _Attack:
        """Wait for the cluster and learn the right answers."""
        manifest = read_manifest(model_dir)
        bodies = make_bodies(campaign.seed, campaign.shape, manifest.vocab_size)
        await rig.until_live(_LIVE_TIMEOUT_S)
        answers: list[Answer]
        if campaign.model:
            answers = await asked_answers(rig.grpc, bodies, timeout_s=60.0)
        else:
            answers = await asyncio.to_thread(computed_answers, bodies, manifest)
        probe = Body()
        probe.CopyFrom(max(bodies, key=lambda body: len(body.token_ids)))
        probe.max_tokens, probe.n = PROBE_TOKENS, 1
        load = KnownLoad(rig.grpc, bodies, answers, campaign.seed)
        return cls(campaign, rig, schedule, load, probe)

    async def run(self) -> None:
        """Rounds of faults, each followed by a look at what is left."""
        clients = [asyncio.create_task(self.load.client()) for _ in range(self._campaign.clients)]
        reviver = asyncio.create_task(self._revive())
        try:
            while self.tally.num_faults < self._campaign.num_faults:
                await self._round(self._campaign.faults_a_check)
                await self._check()
                self.progress(self._line(), self._share)
            self.load.stop()
            await asyncio.gather(*clients)
        finally:
            for task in (*clients, reviver, *self._healing):
                task.cancel()
            await asyncio.gather(*clients, reviver, *self._healing, return_exceptions=True)

    def _line(self) -> str:
        findings, tally = self.load.findings, self.tally
        return (
            f"{tally.num_faults} faults, {findings.num_answered} answered, "
            f"{findings.codes.total()} refused, {findings.num_wrong} wrong, "
            f"{tally.num_leaked} leaked, {findings.num_hung} hung"
        )

    @property
    def _share(self) -> float:
        return min(1.0, self.tally.num_faults / self._campaign.num_faults)

    # -- faults ------------------------------------------------------------------------------

    async def _round(self, num_faults: int) -> None:
        goal = min(self.tally.num_faults + num_faults, self._campaign.num_faults)
        self._is_arming = True
        self.load.resume()
        while self.tally.num_faults < goal:
            await asyncio.sleep(self._schedule.pause_s(self._campaign.pause_s))
            self.progress("injecting faults", self._share)
            fault = self._schedule.next_outer()
            self._inject(fault, self._rig.workers[fault.worker_idx])
        self._is_arming = False

    def _inject(self, fault: OuterFault, worker: RigWorker) -> None:
        if fault.kind in LINK_KINDS:
            self._break_link(fault, worker)
        elif not worker.child.is_running or worker.name in self._ours:
            return  # dead or frozen already
        elif fault.kind == "kill":
            self._ours.add(worker.name)
            worker.child.send(signal.SIGKILL)
        else:
            self._ours.add(worker.name)
            worker.child.send(signal.SIGSTOP)
            self._later(fault.hold_s, lambda: self._thaw(worker))
        self.tally.faults[fault.kind] += 1

    def _break_link(self, fault: OuterFault, worker: RigWorker) -> None:
        faults = worker.proxy.faults
        if fault.kind == "cut":
            worker.proxy.cut()
            return
        if fault.kind == "silence":
            faults.is_silent = True
        elif fault.kind == "delay":
            faults.delay_s = DELAY_S
        elif fault.kind == "duplicate":
            faults.duplicate_share = DUPLICATE_SHARE
        else:
            faults.flip_every_bytes = FLIP_EVERY_BYTES
        self._later(fault.hold_s, lambda: _heal(worker))

    def _thaw(self, worker: RigWorker) -> None:
        self._ours.discard(worker.name)
        worker.child.send(signal.SIGCONT)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(delay_s)
            act()

        task = asyncio.create_task(wait())
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    async def _revive(self) -> None:
        """Start dead workers again at once, and thaw those a point has frozen."""
        while True:
            for worker in self._rig.workers:
                if not worker.child.is_running:
                    self._mourn(worker)
                elif worker.name not in self._ours and worker.is_frozen():
                    self._ours.add(worker.name)
                    self._count_point(worker)
                    self._later(self._rng.uniform(0.05, 1.5), lambda w=worker: self._thaw(w))  # type: ignore[misc]  # a default binds the loop's value
            await asyncio.sleep(_REVIVE_POLL_S)

    def _mourn(self, worker: RigWorker) -> None:
        status = worker.child.poll()
        is_ours = worker.name in self._ours
        if not is_ours and status == -signal.SIGKILL and worker.point:
            self._count_point(worker)
        elif status != -signal.SIGKILL:
            self.tally.num_crashed += 1
            self.tally.notes.append(f"{worker.name} ended with {status}: {worker.child.tail(3)}")
        self._ours.discard(worker.name)
        worker.spawn(self._schedule.next_point(worker.role) if self._is_arming else "")

    def _count_point(self, worker: RigWorker) -> None:
        name, _, rest = worker.point.partition(":")
        worker.point = ""
        self.tally.faults[f"{'stop' if rest.endswith('stop') else 'kill'}_{name}"] += 1

    # -- checks ------------------------------------------------------------------------------

    async def _check(self) -> None:
        """Heal everything, wait for silence, and look for what is still held."""
        await self.load.pause()
        start = time.monotonic()
        for task in list(self._healing):
            task.cancel()
        for worker in self._rig.workers:
            _heal(worker)
            self._thaw(worker)
        await self._rig.until_live(_LIVE_TIMEOUT_S)
        left = await self._held()
        while left and time.monotonic() - start < FREE_AFTER_S:
            await asyncio.sleep(0.02)
            left = await self._held()
        self.tally.longest_idle_s = max(self.tally.longest_idle_s, time.monotonic() - start)
        if left:
            self.tally.num_leaked += sum(left.values())
            self.tally.notes.append(f"held {FREE_AFTER_S:.0f} s after the last call: {left}")
            return
        for _ in range(self._campaign.probes_a_check):
            await self._probe_cancel()

    async def _held(self) -> dict[str, int]:
        """Blocks, transfers and requests that live workers hold; a dead one holds nothing."""
        statuses = await self._rig.statuses()
        for status in statuses.values():
            if status is not None:
                self.tally.planes.update(status.planes.values())
        return held(statuses)

    async def _probe_cancel(self) -> None:
        """Cancel one long request somewhere on its way; time until both sides are free."""
        # The probe before may have met a point, and a worker that is starting answers nobody.
        await self._rig.until_live(_LIVE_TIMEOUT_S)
        if await self._held():
            return
        before = self._disturbances()
        async with grpc.aio.insecure_channel(self._rig.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            task = asyncio.create_task(call(stub, self._probe, timeout_s=15.0, mode="REMOTE"))
            await asyncio.wait([task], timeout=self._rng.uniform(0.0, 0.3))
            looks = {name: [look] for name, look in (await self._look()).items()}
            start = time.monotonic()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._look_until_free(start, looks)
        if self._disturbances() != before:
            return  # a death or a freeze takes its own time
        one = _freed(looks, start)
        if one is None:
            self.tally.num_early += 1
            return
        if one.total_ms > (LEASE_S + 1.0) * 1000:
            self.tally.notes.append(f"{one} after a cancel, held: {await self._held()}")
        self.tally.freed.append(one)

    def _disturbances(self) -> tuple[int, ...]:
        return self.tally.num_faults, *(worker.num_lives for worker in self._rig.workers)

    async def _look_until_free(self, start: float, looks: dict[str, list[Look]]) -> None:
        """Look at every worker again and again until none holds anything."""
        last = start
        while time.monotonic() - start < FREE_AFTER_S:
            for name, look in (await self._look()).items():
                looks.setdefault(name, []).append(look)
            now = time.monotonic()
            self.tally.longest_look_ms = max(self.tally.longest_look_ms, (now - last) * 1000)
            last = now
            if all(seen[-1].is_free for seen in looks.values()):
                return
            await asyncio.sleep(_FREE_POLL_S)

    async def _look(self) -> dict[str, Look]:
        """Counters of all workers that answer."""
        workers = self._rig.workers
        statuses = await asyncio.gather(*(worker.status() for worker in workers))
        looks = {}
        for worker, status in zip(workers, statuses, strict=True):
            if status is not None:
                held = status.blocks_in_use + status.transfers_open + status.requests_open
                looks[worker.name] = Look(
                    time.monotonic(), status.steps, status.transfers_open, held == 0
                )
        return looks


def _freed(looks: Mapping[str, Sequence[Look]], start: float) -> Freed | None:
    """Judge the looks at every worker, the first of each from before the cancel.

    None when no worker held anything: the request had not come that far.
    """
    free_ms = dict.fromkeys(SIDES, 0.0)
    step_ms, last_ms = 0.0, -1.0
    for name, seen in looks.items():
        parts = freed(seen[0], seen[1:], start)
        if parts is None:
            continue  # it held nothing
        stepped, free = (part * 1000 for part in parts)
        side = next(side for side in SIDES if name.startswith(side))
        free_ms[side] = max(free_ms[side], free)
        if free > last_ms:
            last_ms, step_ms = free, stepped
    return Freed(step_ms, free_ms) if last_ms >= 0 else None


def _heal(worker: RigWorker) -> None:
    faults = worker.proxy.faults
    faults.is_silent, faults.delay_s = False, 0.0
    faults.flip_every_bytes, faults.duplicate_share = 0, 0.0


# -- the result --------------------------------------------------------------------------------


def _result(campaign: Campaign, attack: _Attack, took_s: float) -> BenchResult:
    tally, findings = attack.tally, attack.load.findings
    total = findings.num_answered + findings.codes.total()
    result = BenchResult("chaos handoff")
    result.figures = {
        "seed": campaign.seed,
        "engine": campaign.model or "scripted",
        "took_s": round(took_s, 1),
        "faults": tally.num_faults,
        **{f"faults_{kind}": count for kind, count in sorted(tally.faults.items())},
        "planes_allowed": ",".join(campaign.planes) or "mixed",
        "planes": ",".join(sorted(tally.planes | findings.planes)),
        "answered": findings.num_answered,
        "cancelled_by_client": findings.num_cancelled,
        **{f"ended_{code}": count for code, count in sorted(findings.codes.items())},
        "slowest_request_s": round(findings.slowest_s, 2),
        "longest_until_all_free_s": round(tally.longest_idle_s, 2),
        **_free_figures(tally),
        "aimed_step_ms": STEP_MS,
        "load_average": round(os.getloadavg()[0], 1),
        **{f"example_{i}": text for i, text in enumerate((*findings.examples, *tally.notes[:5]))},
    }
    result.bars = [
        Bar("faults", tally.num_faults, campaign.num_faults, ">="),
        Bar("wrong_tokens", findings.num_wrong, 0, "=="),
        Bar("broken_streams", findings.num_broken, 0, "=="),
        Bar("leaked_blocks", tally.num_leaked, 0, "=="),
        Bar("hung_requests", findings.num_hung, 0, "=="),
        Bar("crashed_workers", tally.num_crashed, 0, "=="),
        # A campaign in which hardly anything is answered would prove nothing.
        Bar("answered_share", round(findings.num_answered / max(total, 1), 3), 0.25, ">="),
        # The running step is what it is; on a busy machine it is longer than it aims at.
        Bar("time_to_free_after_step_p99_ms", _rest_p99_ms(tally), REST_BAR_MS, "<="),
    ]
    return result


def _free_figures(tally: Tally) -> dict[str, Figure]:
    """Both parts of the time from a cancel to free blocks, and what may be off in them."""
    values = {
        "": [one.total_ms for one in tally.freed],
        "_running_step": [one.step_ms for one in tally.freed],
        "_after_step": [one.rest_ms for one in tally.freed],
        **{f"_{side}": [one.free_ms[side] for one in tally.freed] for side in SIDES},
    }
    return {
        "cancels_timed": len(tally.freed),
        "cancels_too_early": tally.num_early,
        **{
            f"time_to_free{part}_{name}_ms": _quantile(sorted(times), share)
            for part, times in values.items()
            for name, share in (("p50", 0.5), ("p99", 0.99))
        },
        "longest_between_looks_ms": round(tally.longest_look_ms, 1),
    }


def _rest_p99_ms(tally: Tally) -> float:
    rest_ms = _quantile(sorted(one.rest_ms for one in tally.freed), 0.99)
    return FREE_AFTER_S * 1000 if rest_ms is None else rest_ms  # nothing timed proves nothing


def _quantile(values: list[float], share: float) -> float | None:
    if not values:
        return None
    return round(values[min(len(values) - 1, int(share * len(values)))], 1)
