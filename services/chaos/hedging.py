"""`isthmus chaos hedging`: a prefill worker stalls now and then; a second prefill spares the wait.

The same requests to the same workers, first without and then with hedged prefills. Every answer
must be the computed one, with each token once, and nothing may be left at any worker.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from services.bench.result import Bar, BenchResult, Figure
from services.chaos.attack import FREE_AFTER_S, LIVE_TIMEOUT_S
from services.chaos.client import StreamBroken, call
from services.chaos.known_load import (
    Answer,
    Body,
    LoadShape,
    known_requests,
    wrong_tokens,
)
from services.chaos.rig import CHANNEL_OPTIONS, Rig, RigPlan, held
from services.common.progress import Progress, silent
from services.common.quantile import nearest_rank
from services.pb import inference_pb2_grpc
from services.router.hedge import HedgeConfig

P99_BAR = 0.8  # of the TTFT without hedging
_SPEED = "20000:2"
_STALL_EVERY, _STALL_MS = 40, 1500  # of the prefill steps of one of two workers
_CLIENTS = 3  # few: what waits behind a stalled prefill is not what hedging is for
_SHAPE = LoadShape(
    prompt_lengths=(60, 200, 400), output_lengths=(4, 8), num_bodies=40, timeout_s=30.0
)


@dataclass(frozen=True, slots=True)
class HedgingPlan:
    """How much is asked in each arm."""

    seed: int
    requests: int = 800


@dataclass(slots=True)
class _Arm:
    """What one arm showed."""

    firsts_s: list[float] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0
    num_left: int = 0
    sent: float = 0.0  # second prefills
    won: float = 0.0

    def p_ms(self, share: float) -> float:
        """A percentile of its TTFT."""
        return round(nearest_rank(self.firsts_s, share) * 1000, 1) if self.firsts_s else 0.0


def run(plan: HedgingPlan, progress: Progress = silent) -> BenchResult:
    """Run on the main thread: the processes die with it."""
    return asyncio.run(_run(plan, progress))


async def _run(plan: HedgingPlan, progress: Progress) -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="isthmus-chaos-") as made:
        model_dir, bodies, answers = await known_requests(Path(made), plan.seed, _SHAPE)
        arms = []
        for is_hedged in (False, True):
            progress("with hedging" if is_hedged else "without hedging", 0.5 * is_hedged)
            arms.append(await _arm(plan, model_dir, bodies, answers, is_hedged=is_hedged))
    return _result(plan, *arms)


async def _arm(
    plan: HedgingPlan,
    model_dir: Path,
    bodies: Sequence[Body],
    answers: Sequence[Answer],
    *,
    is_hedged: bool,
) -> _Arm:
    rig_plan = RigPlan(
        model_dir,
        speed=_SPEED,
        speeds={"prefill-0": f"{_SPEED}:{_STALL_EVERY}:{_STALL_MS}"},
        settings={"router": {"hedge_prefill": is_hedged}},
    )
    arm = _Arm()
    async with Rig(rig_plan, lambda _worker: "") as rig:
        await rig.until_live(LIVE_TIMEOUT_S)
        async with grpc.aio.insecure_channel(rig.grpc, options=CHANNEL_OPTIONS) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            rng = random.Random(f"{plan.seed}/turns")
            turns = iter([rng.randrange(len(bodies)) for _ in range(plan.requests)])
            await asyncio.gather(
                *(_client(stub, bodies, answers, turns, arm) for _ in range(_CLIENTS))
            )
        arm.num_left = await _left(rig)
        if is_hedged:
            router = rig.routers[0]
            arm.sent = router.metric("isthmus_hedges_total", 'outcome="sent"')
            arm.won = router.metric("isthmus_hedges_total", 'outcome="won"')
    return arm


async def _client(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    bodies: Sequence[Body],
    answers: Sequence[Answer],
    turns: Iterator[int],
    arm: _Arm,
) -> None:
    for index in turns:
        try:
            heard = await call(stub, bodies[index], timeout_s=2 * _SHAPE.timeout_s, mode="REMOTE")
        except StreamBroken:
            arm.num_wrong += 1
            continue
        if heard.code or heard.first_s is None:
            arm.codes[heard.code or "no_token"] += 1
            continue
        arm.firsts_s.append(heard.first_s)
        arm.num_wrong += bool(wrong_tokens(answers[index], heard.token_ids, is_whole=True))


async def _left(rig: Rig) -> int:
    """What workers and the router hold, at last."""
    end = time.monotonic() + FREE_AFTER_S
    while True:
        left = sum(held(await rig.statuses()).values())
        status = await rig.routers[0].status()
        left += status.requests_open if status is not None else 1
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.02)


def _result(plan: HedgingPlan, alone: _Arm, hedged: _Arm) -> BenchResult:
    result = BenchResult("chaos hedging")
    limits = HedgeConfig()
    most = limits.ratio + limits.reserve / plan.requests
    ratio = hedged.p_ms(0.99) / max(alone.p_ms(0.99), 0.001)
    result.figures = {
        "seed": plan.seed,
        "requests_an_arm": plan.requests,
        "stall_ms": _STALL_MS,
        **_figures("alone", alone),
        **_figures("hedged", hedged),
        "second_prefills": hedged.sent,
        "second_prefills_first": hedged.won,
        "load_average": round(os.getloadavg()[0], 1),
    }
    failed = alone.codes.total() + hedged.codes.total()
    result.bars = [
        Bar("failed_requests", failed, 0, "=="),
        Bar("wrong_answers", alone.num_wrong + hedged.num_wrong, 0, "=="),
        Bar("left_behind", alone.num_left + hedged.num_left, 0, "=="),
        Bar("ttft_p99_hedged_over_alone", round(ratio, 3), P99_BAR, "<="),
        Bar("second_prefills_share", round(hedged.sent / plan.requests, 4), most, "<="),
        Bar("second_prefills_first", hedged.won, 1, ">="),
    ]
    return result


def _figures(name: str, arm: _Arm) -> dict[str, Figure]:
    return {
        f"ttft_p50_{name}_ms": arm.p_ms(0.5),
        f"ttft_p95_{name}_ms": arm.p_ms(0.95),
        f"ttft_p99_{name}_ms": arm.p_ms(0.99),
        f"ttft_max_{name}_ms": arm.p_ms(1.0),
        **{f"ended_{code}_{name}": count for code, count in sorted(arm.codes.items())},
    }
