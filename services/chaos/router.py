"""`isthmus chaos router`: every process of a cluster dies in turn, and no client may notice.

Each process is killed, frozen and restarted, one fault at a time, under mixed load. A client whose
router died asks the other one, once, with the same idempotency key; anything else that a client
sees and that is not the right answer counts. So no router is hit while a request is at its second.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.bench.result import Bar, BenchResult
from services.chaos.attack import Attack, Load, loaded_cluster
from services.chaos.keyed_load import KeyedLoad
from services.chaos.rig import Rig, RigRouter, RigWorker
from services.common.progress import Progress, silent

ACTIONS = ("kill", "freeze", "restart")
STORE = "store"
# Shortest and longest stop by SIGSTOP: up to past the silence after which a worker is given up.
_FREEZE_S = {"worker": (0.2, 3.5), "router": (0.2, 2.0), STORE: (0.2, 2.0)}
_PAUSE_S = (0.1, 0.6)  # between faults, so that they meet running requests and idle moments


@dataclass(frozen=True, slots=True)
class RouterCampaign:
    """How long, and with what load."""

    seed: int
    seconds: float
    load: Load = field(default_factory=Load)
    is_whole: bool = True  # goes on until everyone has had every fault, however long that takes


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


def run(campaign: RouterCampaign, progress: Progress = silent) -> BenchResult:
    """Run on the main thread: the processes die with it."""
    return asyncio.run(_run(campaign, progress))


async def _run(campaign: RouterCampaign, progress: Progress) -> BenchResult:
    async with loaded_cluster(campaign.seed, campaign.load) as (rig, load):
        started = time.monotonic()
        attack = _InTurn(campaign, rig, load, progress)
        await attack.run()
        return _result(campaign, attack, time.monotonic() - started)


class _InTurn(Attack):
    """One fault after the other."""

    def __init__(
        self, campaign: RouterCampaign, rig: Rig, load: KeyedLoad, progress: Progress
    ) -> None:
        super().__init__(rig, load, campaign.load.clients)
        self._campaign = campaign
        self._progress = progress

    async def _attack(self) -> None:
        campaign, names = self._campaign, [*(p.name for p in self._processes), STORE]
        least = len(names) * len(ACTIONS) if campaign.is_whole else 0
        start = time.monotonic()
        for number, turn in enumerate(turns(campaign.seed, names)):
            took_s = time.monotonic() - start
            if took_s >= campaign.seconds and number >= least:
                return
            shares = (took_s / campaign.seconds, number / least if least else 1.0)
            self._progress(f"{turn.action} {turn.name}", min(shares))
            await asyncio.sleep(turn.pause_s)
            await self._take(turn)
            self.tally.faults[f"{turn.action}_{turn.name}"] += 1

    async def _take(self, turn: Turn) -> None:
        self._note_deaths()
        if turn.name.startswith("router"):
            await self._until_first_tries()
        started = time.monotonic()
        if turn.name == STORE:
            await self._hit_store(turn)
        else:
            await self._hit(turn, next(p for p in self._processes if p.name == turn.name))
        await self._until_live(started)

    async def _until_first_tries(self) -> None:
        """No request is to lose two routers: who has lost one may end first.

        Nobody loses another meanwhile, as all routers live; every request ends by its deadline.
        """
        while self.load.num_second_tries:  # noqa: ASYNC110 - as said above
            await asyncio.sleep(0.01)

    async def _hit(self, turn: Turn, process: RigWorker | RigRouter) -> None:
        if turn.action == "freeze":
            process.child.send(signal.SIGSTOP)
            await asyncio.sleep(turn.hold_s)
            process.child.send(signal.SIGCONT)
            return
        sig = signal.SIGKILL if turn.action == "kill" else signal.SIGTERM
        await self._begin_anew(process, sig)

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


def _result(campaign: RouterCampaign, attack: _InTurn, took_s: float) -> BenchResult:
    moved = attack.load.findings.num_migrations + attack.load.num_sent_again
    result = BenchResult("chaos router")
    result.figures = {"seed": campaign.seed, "took_s": round(took_s, 1), **attack.figures()}
    result.figures |= attack.examples()
    result.bars = [
        *attack.bars(),
        # Without faults that met requests the zeros above would prove nothing.
        Bar("moved_or_sent_again", moved, 1, ">="),
        Bar("faults", attack.tally.faults.total(), 1, ">="),
    ]
    return result
