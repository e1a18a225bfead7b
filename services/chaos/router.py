"""`isthmus chaos router`: every process of a cluster dies in turn, and no client may notice.

Each process is killed, frozen and restarted, one fault at a time, under mixed load. A client whose
router died asks the other one, once, with the same idempotency key; anything else that a client
sees and that is not the right answer counts.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from services.bench.result import Bar, BenchFailed, BenchResult
from services.chaos.client import Heard, call
from services.chaos.known_load import (
    Body,
    KnownLoad,
    LoadShape,
    computed_answers,
    make_bodies,
)
from services.chaos.rig import CHANNEL_OPTIONS, Rig, RigPlan, RigRouter, RigWorker, held
from services.chaos.scripted_model import make_scripted_model
from services.common.model_manifest import read_manifest
from services.pb import inference_pb2_grpc

ACTIONS = ("kill", "freeze", "restart")
STORE = "store"
SPEED = "20000:4"  # of scripted workers: prompt tokens a second, ms a step
LEASE_S = 2.0
FREE_AFTER_S = LEASE_S + 4.0  # everything must be back this long after the last call
_SETTINGS: dict[str, dict[str, object]] = {
    "transfer": {"lease_ms": round(LEASE_S * 1000)},
    "worker": {"num_blocks": 640, "threads": 1, "drain_s": 1.0},
}
# Shortest and longest stop by SIGSTOP: up to past the silence after which a worker is given up.
_FREEZE_S = {"worker": (0.2, 3.5), "router": (0.2, 2.0), STORE: (0.2, 2.0)}
_PAUSE_S = (0.1, 0.6)  # between faults, so that they meet running requests and idle moments
_LIVE_TIMEOUT_S = 60.0  # a busy machine starts a router slowly
_END_TIMEOUT_S = 10.0  # of a process told to end
# What a client sees of a router that is gone or going; everything else is the cluster's fault.
ROUTER_GONE = frozenset({"unavailable", "draining"})


@dataclass(frozen=True, slots=True)
class RouterCampaign:
    """How long, and with what load."""

    seed: int
    seconds: float
    clients: int = 8
    shape: LoadShape = field(
        default_factory=lambda: LoadShape(output_lengths=(1, 8, 60, 200, 300), timeout_s=40.0)
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """One fault: who, what, for how long if frozen, and the pause before."""

    name: str
    action: str
    hold_s: float
    pause_s: float


def turns(seed: int, names: Sequence[str]) -> Iterator[Turn]:
    """Every process with every action, in an order drawn anew for each round."""
    rng = random.Random(f"{seed}/turns")
    while True:
        faults = [(name, action) for name in names for action in ACTIONS]
        rng.shuffle(faults)
        for name, action in faults:
            kind = name if name == STORE else "router" if name.startswith("router") else "worker"
            yield Turn(name, action, rng.uniform(*_FREEZE_S[kind]), rng.uniform(*_PAUSE_S))


class KeyedLoad(KnownLoad):
    """Clients that send a request once more, to the other router, when theirs is gone."""

    num_retried = 0
    _num_asked = 0

    async def client_of(self, addresses: Sequence[str]) -> None:
        """One client, until `stop`; the first address is its router."""
        async with AsyncExitStack() as stack:
            stubs = []
            for address in addresses:
                channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
                await stack.enter_async_context(channel)
                stubs.append(inference_pb2_grpc.InferenceStub(channel))

            async def ask(body: Body, limit_s: float, mode: str, heard: Heard) -> None:
                self._num_asked += 1
                keyed = Body()
                keyed.CopyFrom(body)
                keyed.idempotency_key = f"request-{self._num_asked}"
                await call(stubs[0], keyed, timeout_s=limit_s, mode=mode, heard=heard)
                if heard.code in ROUTER_GONE:
                    self.num_retried += 1
                    heard.forget()
                    await call(stubs[1], keyed, timeout_s=limit_s, mode=mode, heard=heard)

            await self.ask_on(ask)


@dataclass(slots=True)
class Tally:
    """What was done, and what the processes said."""

    faults: Counter[str] = field(default_factory=Counter)
    num_crashed: int = 0
    num_leaked: int = 0
    longest_until_live_s: float = 0.0
    until_free_s: float = 0.0
    notes: list[str] = field(default_factory=list)


def _silent(_line: str, _share: float) -> None:
    """Tell nobody."""


def run(campaign: RouterCampaign, progress: Callable[[str, float], None] = _silent) -> BenchResult:
    """Run on the main thread: the processes die with it."""
    return asyncio.run(_run(campaign, progress))


async def _run(campaign: RouterCampaign, progress: Callable[[str, float], None]) -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="isthmus-chaos-") as made:
        model_dir = make_scripted_model(Path(made) / "model")
        manifest = read_manifest(model_dir)
        bodies = make_bodies(campaign.seed, campaign.shape, manifest.vocab_size)
        answers = await asyncio.to_thread(computed_answers, bodies, manifest)
        started = time.monotonic()
        plan = RigPlan(model_dir, routers=2, speed=SPEED, settings=_SETTINGS)
        async with Rig(plan, lambda _worker: "") as rig:
            await rig.until_live(_LIVE_TIMEOUT_S)
            load = KeyedLoad(rig.grpc, bodies, answers, campaign.seed)
            attack = _Attack(campaign, rig, load, progress)
            await attack.run()
        return _result(campaign, attack, time.monotonic() - started)


class _Attack:
    """One campaign against one running rig."""

    def __init__(
        self,
        campaign: RouterCampaign,
        rig: Rig,
        load: KeyedLoad,
        progress: Callable[[str, float], None],
    ) -> None:
        self.load = load
        self.tally = Tally()
        self._campaign = campaign
        self._rig = rig
        self._progress = progress

    async def run(self) -> None:
        """Attack for as long as asked, then look at what is left."""
        addresses = [router.grpc for router in self._rig.routers]
        clients = [
            asyncio.create_task(self.load.client_of(addresses[:: 1 if i % 2 else -1]))
            for i in range(self._campaign.clients)
        ]
        try:
            self.load.resume()
            await self._attack()
            await self.load.pause()
            await self._until_free()
            self.load.stop()
            await asyncio.gather(*clients)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    def _processes(self) -> Sequence[RigWorker | RigRouter]:
        return [*self._rig.workers, *self._rig.routers]

    async def _attack(self) -> None:
        seconds = self._campaign.seconds
        names = [process.name for process in self._processes()]
        start = time.monotonic()
        for turn in turns(self._campaign.seed, [*names, STORE]):
            took_s = time.monotonic() - start
            if took_s >= seconds:
                return
            self._progress(f"{turn.action} {turn.name}", took_s / seconds)
            await asyncio.sleep(turn.pause_s)
            await self._take(turn)
            self.tally.faults[f"{turn.action}_{turn.name}"] += 1

    async def _take(self, turn: Turn) -> None:
        self._note_deaths()
        started = time.monotonic()
        if turn.name == STORE:
            await self._hit_store(turn)
        else:
            await self._hit(turn, next(p for p in self._processes() if p.name == turn.name))
        await self._rig.until_live(_LIVE_TIMEOUT_S)
        took_s = time.monotonic() - started
        self.tally.longest_until_live_s = max(self.tally.longest_until_live_s, took_s)

    async def _hit(self, turn: Turn, process: RigWorker | RigRouter) -> None:
        if turn.action == "freeze":
            process.child.send(signal.SIGSTOP)
            await asyncio.sleep(turn.hold_s)
            process.child.send(signal.SIGCONT)
            return
        process.child.send(signal.SIGKILL if turn.action == "kill" else signal.SIGTERM)
        end = time.monotonic() + _END_TIMEOUT_S
        while process.child.is_running:
            if time.monotonic() > end:
                raise BenchFailed(f"{process.name} does not end\n{self._rig.tails()}")
            await asyncio.sleep(0.01)
        if turn.action == "restart" and process.child.poll() != 0:
            self._note_crash(process)
        process.spawn()

    async def _hit_store(self, turn: Turn) -> None:
        pid = self._rig.store.pid
        if turn.action == "freeze":
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(turn.hold_s)
            os.kill(pid, signal.SIGCONT)
            return
        os.kill(pid, signal.SIGKILL if turn.action == "kill" else signal.SIGTERM)
        await asyncio.sleep(turn.hold_s)  # nobody misses it
        self._rig.start_store_again()

    def _note_deaths(self) -> None:
        """Nobody dies but by us."""
        for process in self._processes():
            if not process.child.is_running:
                self._note_crash(process)
                process.spawn()

    def _note_crash(self, process: RigWorker | RigRouter) -> None:
        self.tally.num_crashed += 1
        status = process.child.poll()
        self.tally.notes.append(f"{process.name} ended with {status}: {process.child.tail(3)}")

    async def _until_free(self) -> None:
        start = time.monotonic()
        left = held(await self._rig.statuses())
        while left and time.monotonic() - start < FREE_AFTER_S:
            await asyncio.sleep(0.02)
            left = held(await self._rig.statuses())
        self._note_deaths()
        self.tally.until_free_s = time.monotonic() - start
        self.tally.num_leaked = sum(left.values())
        if left:
            self.tally.notes.append(f"held {FREE_AFTER_S:.0f} s after the last call: {left}")


def _result(campaign: RouterCampaign, attack: _Attack, took_s: float) -> BenchResult:
    tally, load, findings = attack.tally, attack.load, attack.load.findings
    result = BenchResult("chaos router")
    result.figures = {
        "seed": campaign.seed,
        "took_s": round(took_s, 1),
        "faults": tally.faults.total(),
        **{f"faults_{kind}": count for kind, count in sorted(tally.faults.items())},
        "answered": findings.num_answered,
        "cancelled_by_client": findings.num_cancelled,
        "sent_to_other_router": load.num_retried,
        "migrations": findings.num_migrations,
        **{f"ended_{code}": count for code, count in sorted(findings.codes.items())},
        "slowest_request_s": round(findings.slowest_s, 2),
        "longest_until_all_live_s": round(tally.longest_until_live_s, 2),
        "until_all_free_s": round(tally.until_free_s, 2),
        "load_average": round(os.getloadavg()[0], 1),
        **{
            f"example_{i}": text
            for i, text in enumerate((*findings.examples, *findings.failed, *tally.notes[:5]))
        },
    }
    result.bars = [
        Bar("failed_requests", findings.codes.total(), 0, "=="),
        Bar("wrong_tokens", findings.num_wrong, 0, "=="),
        Bar("broken_streams", findings.num_broken, 0, "=="),
        Bar("leaked_blocks", tally.num_leaked, 0, "=="),
        Bar("hung_requests", findings.num_hung, 0, "=="),
        Bar("crashed_processes", tally.num_crashed, 0, "=="),
        # Without faults that met requests the zeros above would prove nothing.
        Bar("moved_or_sent_again", findings.num_migrations + load.num_retried, 1, ">="),
        Bar("faults", tally.faults.total(), 1, ">="),
    ]
    return result
