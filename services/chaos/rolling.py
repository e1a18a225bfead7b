"""`isthmus chaos rolling`: routers are restarted one after the other, as by a rolling update.

First nobody is disturbed for a while, for comparison. Then each router in turn is asked to end
(SIGTERM) and started again once it has. A client may send a request once more, by its key.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.bench.result import Bar, BenchResult, Figure
from services.chaos.attack import Attack, Load, loaded_cluster
from services.chaos.keyed_load import KeyedLoad, Seen, ttft_ms
from services.chaos.rig import Rig
from services.common.progress import Progress, silent

BLIND_BAR = 0.01
_PAUSE_S = 1.0  # between restarts: both routers serve


@dataclass(frozen=True, slots=True)
class RollingPlan:
    """How often, and with what load."""

    seed: int
    rounds: int = 5  # in each every router is restarted
    quiet_s: float = 10.0  # before the first
    # For answers under way. A client whose router cuts one off asks the other router, and would
    # need a third try if that one ended the same way before it has answered.
    drain_s: float = 10.0
    load: Load = field(default_factory=Load)


def run(plan: RollingPlan, progress: Progress = silent) -> BenchResult:
    """Run on the main thread: the processes die with it."""
    return asyncio.run(_run(plan, progress))


async def _run(plan: RollingPlan, progress: Progress) -> BenchResult:
    async with loaded_cluster(plan.seed, plan.load, router_drain_s=plan.drain_s) as (
        rig,
        load,
    ):
        rolling = _Rolling(plan, rig, load, progress)
        await rolling.run()
        return _result(plan, rolling)


class _Rolling(Attack):
    """Restarts every router in turn."""

    def __init__(self, plan: RollingPlan, rig: Rig, load: KeyedLoad, progress: Progress) -> None:
        super().__init__(rig, load, plan.load.clients)
        self.began_at = 0.0
        self._plan = plan
        self._progress = progress

    async def _attack(self) -> None:
        self._progress("nobody is disturbed", 0.0)
        await asyncio.sleep(self._plan.quiet_s)
        self.began_at = time.monotonic()
        for number in range(self._plan.rounds):
            for router in self._rig.routers:
                self._progress(f"restarting {router.name}", number / self._plan.rounds)
                self._note_deaths()
                started = time.monotonic()
                await self._begin_anew(router, signal.SIGTERM)
                await self._until_live(started)
                self.tally.faults[f"restart_{router.name}"] += 1
                await asyncio.sleep(_PAUSE_S)


def _result(plan: RollingPlan, rolling: _Rolling) -> BenchResult:
    before = [seen for seen in rolling.load.seen if seen.asked_at < rolling.began_at]
    during = [seen for seen in rolling.load.seen if seen.asked_at >= rolling.began_at]
    blind = [seen for seen in during if seen.was_blind]
    blind_share = len(blind) / max(1, len(during))
    result = BenchResult("chaos rolling")
    result.figures = {
        "seed": plan.seed,
        **rolling.figures(),
        **_seen("before", before),
        **_seen("during", during),
        **_seen("sent_again", [seen for seen in during if seen.was_sent_again]),
        **rolling.examples(),
    }
    result.bars = [
        *rolling.bars(),
        Bar("blind_share_during", round(blind_share, 4), BLIND_BAR, "<="),
        # Without restarts that met requests the zeros above would prove nothing.
        Bar("sent_to_other_router", rolling.load.num_sent_again, 1, ">="),
        Bar("answered_during", len(during), 1, ">="),
    ]
    return result


def _seen(when: str, seen: Sequence[Seen]) -> dict[str, Figure]:
    return {
        f"answered_{when}": len(seen),
        f"blind_{when}": sum(one.was_blind for one in seen),
        f"ttft_p50_{when}_ms": ttft_ms(seen, 0.5),
        f"ttft_p99_{when}_ms": ttft_ms(seen, 0.99),
    }
