"""What attacks on a whole cluster share: two routers, load whose answers are known, a count."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from services.bench.result import Bar, BenchFailed, Figure
from services.chaos.keyed_load import KeyedLoad, undisturbed_answers, vary
from services.chaos.known_load import LoadShape, known_requests
from services.chaos.rig import Rig, RigPlan, RigRouter, RigWorker, held
from services.text.tokenizer import TextModel

SPEED = "20000:4"  # of scripted workers: prompt tokens a second, ms a step
LEASE_S = 2.0
FREE_AFTER_S = LEASE_S + 4.0  # everything must be back this long after the last call
CUTTING_DRAIN_S = 0.5  # of a router: less than many answers take, which it has to cut off
_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "transfer": {"lease_ms": round(LEASE_S * 1000)},
    "worker": {"threads": 1, "drain_s": 1.0},
}
LIVE_TIMEOUT_S = 60.0  # a busy machine starts a router slowly
_END_TIMEOUT_S = 30.0  # of a process told to end, its drain included


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked for at once, and what."""

    clients: int = 8
    shape: LoadShape = field(
        default_factory=lambda: LoadShape(output_lengths=(1, 8, 60, 200, 300), timeout_s=40.0)
    )


@dataclass(slots=True)
class Tally:
    """What was done, and what the processes said."""

    faults: Counter[str] = field(default_factory=Counter)
    num_crashed: int = 0
    num_leaked: int = 0
    longest_until_live_s: float = 0.0
    until_free_s: float = 0.0
    notes: list[str] = field(default_factory=list)


@asynccontextmanager
async def loaded_cluster(
    seed: int,
    load: Load,
    *,
    router_drain_s: float = CUTTING_DRAIN_S,
    has_store_proxy: bool = False,
    num_blocks: int = 640,
    speed: str = SPEED,
) -> AsyncIterator[tuple[Rig, KeyedLoad]]:
    """Two workers of each role, two routers, and clients that know every answer."""
    with tempfile.TemporaryDirectory(prefix="isthmus-chaos-") as made:
        model_dir, bodies, answers = await known_requests(Path(made), seed, load.shape)
        vary(bodies, answers, TextModel.load(model_dir), seed)
        settings = {**_SETTINGS, "router": {"drain_s": router_drain_s}}
        settings["worker"] = {**settings["worker"], "num_blocks": num_blocks}
        plan = RigPlan(
            model_dir, routers=2, speed=speed, settings=settings, has_store_proxy=has_store_proxy
        )
        async with Rig(plan, lambda _worker: "") as rig:
            await rig.until_live(LIVE_TIMEOUT_S)
            undisturbed = await undisturbed_answers(rig.grpc, bodies, answers)
            yield rig, KeyedLoad(bodies, answers, undisturbed, seed)


class Attack:
    """One attack on one running rig; how it goes on is the subclass's."""

    def __init__(self, rig: Rig, load: KeyedLoad, num_clients: int) -> None:
        self.load = load
        self.tally = Tally()
        self._rig = rig
        self._num_clients = num_clients
        self._clients: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Attack under load, then look at what is left."""
        for _ in range(self._num_clients):
            self._add_client()
        try:
            self.load.resume()
            await self._attack()
            await self.load.pause()
            await self._until_free()
            self.load.stop()
            await asyncio.gather(*self._clients)
        finally:
            for task in self._clients:
                task.cancel()
            await asyncio.gather(*self._clients, return_exceptions=True)

    def _add_client(self) -> None:
        """Begin one more client, until the end of the attack; every second asks the other first."""
        order = 1 if len(self._clients) % 2 else -1
        client = self.load.client_of(self._rig.routers[::order])
        self._clients.append(asyncio.create_task(client))

    async def _attack(self) -> None:
        """Do what this attack is about."""
        raise NotImplementedError

    @property
    def _processes(self) -> Sequence[RigWorker | RigRouter]:
        return [*self._rig.workers, *self._rig.routers]

    async def _begin_anew(self, process: RigWorker | RigRouter, sig: signal.Signals) -> None:
        """End a process by a signal and start it again; one that was asked ends well."""
        process.child.send(sig)
        end = time.monotonic() + _END_TIMEOUT_S
        while process.child.is_running:
            if time.monotonic() > end:
                raise BenchFailed(f"{process.name} does not end\n{self._rig.tails()}")
            await asyncio.sleep(0.01)
        if sig == signal.SIGTERM and process.child.poll() != 0:
            self._note_crash(process)
        process.spawn()

    async def _until_live(self, started: float) -> None:
        await self._rig.until_live(LIVE_TIMEOUT_S)
        took_s = time.monotonic() - started
        self.tally.longest_until_live_s = max(self.tally.longest_until_live_s, took_s)

    def _note_deaths(self) -> None:
        """Nobody dies but by us."""
        for process in self._processes:
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

    # -- what is told ------------------------------------------------------------------------

    def figures(self) -> dict[str, Figure]:
        """What happened; the order is that of interest."""
        tally, findings = self.tally, self.load.findings
        return {
            "faults": tally.faults.total(),
            **{f"faults_{kind}": count for kind, count in sorted(tally.faults.items())},
            "answered": findings.num_answered,
            "cancelled_by_client": findings.num_cancelled,
            "sent_to_other_router": self.load.num_sent_again,
            "migrations": findings.num_migrations,
            **{f"ended_{code}": count for code, count in sorted(findings.codes.items())},
            "slowest_request_s": round(findings.slowest_s, 2),
            "longest_until_all_live_s": round(tally.longest_until_live_s, 2),
            "until_all_free_s": round(tally.until_free_s, 2),
            "load_average": round(os.getloadavg()[0], 1),
        }

    def examples(self) -> dict[str, Figure]:
        """A few of the things that were not right."""
        findings = self.load.findings
        texts = (*findings.examples, *findings.failed, *self.tally.notes[:5])
        return {f"example_{i}": text for i, text in enumerate(texts)}

    def bars(self) -> list[Bar]:
        """What no attack may cost."""
        tally, findings = self.tally, self.load.findings
        return [
            Bar("failed_requests", findings.codes.total(), 0, "=="),
            Bar("wrong_answers", findings.num_wrong, 0, "=="),
            Bar("broken_streams", findings.num_broken, 0, "=="),
            Bar("leaked_blocks", tally.num_leaked, 0, "=="),
            Bar("hung_requests", findings.num_hung, 0, "=="),
            Bar("crashed_processes", tally.num_crashed, 0, "=="),
        ]
