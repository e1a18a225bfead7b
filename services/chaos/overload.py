"""`isthmus bench overload`: what is left of the peak when three times as much is asked for.

Scripted workers with a rate and a queue of their own, a router on one core. Clients in a closed
loop find what the cluster can do; then requests with an SLO come at random moments, whatever became
of those before them, at that rate and at a multiple of it.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import numpy as np
import psutil

from services.bench.result import Bar, BenchFailed, BenchResult
from services.chaos.client import code_of
from services.chaos.rig import Rig, RigPlan
from services.chaos.scripted_model import make_scripted_model
from services.common.model_manifest import read_manifest
from services.common.progress import Progress, silent
from services.common.quantile import nearest_rank
from services.gateway.wire_names import TRAILER_RETRY_AFTER
from services.pb import inference_pb2, inference_pb2_grpc

GOODPUT_BAR = 0.9
REJECT_BAR_MS = 50.0
TTFT_BAR = 2.0
ATTEMPTS_BAR = 1.1
SPEED = "6000:2"  # of every worker: prompt tokens a second, ms a step
PROMPT_TOKENS = 768  # too long to be computed by a decode worker
ANSWER_TOKENS = 4
CLIENTS = 16  # of the closed loop: more than all workers have in hand
CALL_TIMEOUT_S = 30.0
LIVE_TIMEOUT_S = 60.0
SETTLE_SHARE = 0.2  # of an arm's time, until queues are as long as they will be
_REFUSED = frozenset({"overloaded", "rate_limited"})


@dataclass(frozen=True, slots=True)
class Setup:
    """What is asked of the cluster."""

    seconds: float  # of each arm
    factor: float
    slo_ttft_ms: int
    seed: int = 0
    workers: int = 2  # of each role


@dataclass(frozen=True, slots=True)
class Call:
    """How one request went, in seconds of this machine's clock."""

    began: float
    ended: float
    code: str  # "" = answered
    ttft_s: float | None
    retry_after_ms: int | None

    @property
    def is_refused(self) -> bool:
        """Whether it was sent away for want of room."""
        return self.code in _REFUSED


@dataclass(slots=True)
class Arm:
    """The requests of one load."""

    seconds: float
    began: float = 0.0
    calls: list[Call] = field(default_factory=list)

    def settled(self) -> list[Call]:
        """Return the requests that came once queues had filled."""
        since = self.began + SETTLE_SHARE * self.seconds
        return [c for c in self.calls if since <= c.began < self.began + self.seconds]

    def rate(self, is_counted: Callable[[Call], bool]) -> float:
        """Return how many calls of a kind ended in a second, once queues had filled."""
        since, until = self.began + SETTLE_SHARE * self.seconds, self.began + self.seconds
        ended = sum(is_counted(c) and since <= c.ended < until for c in self.calls)
        return ended / (until - since)


def run(setup: Setup, progress: Progress = silent) -> BenchResult:
    """Run on the main thread: the processes die with it."""
    return asyncio.run(_run(setup, progress))


async def _run(setup: Setup, progress: Progress) -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as made:
        model_dir = make_scripted_model(Path(made) / "model")
        vocab_size = read_manifest(model_dir).vocab_size
        count = setup.workers
        plan = RigPlan(model_dir, prefill=count, decode=count, speed=SPEED, planes=("memfd", "zmq"))
        progress(f"starting {count} + {count} workers", 0.0)
        async with Rig(plan, lambda _: "") as rig:
            await rig.until_live(LIVE_TIMEOUT_S)
            (router,) = rig.routers
            assert router.child.pid is not None, "it is live"
            os.sched_setaffinity(router.child.pid, {min(os.sched_getaffinity(0))})
            async with grpc.aio.insecure_channel(rig.grpc) as channel:
                load = _Load(inference_pb2_grpc.InferenceStub(channel), setup, vocab_size)
                progress("finding the capacity", 0.1)
                capacity = await load.closed_loop()
                rate = capacity.rate(_is_answered)
                if not rate:
                    raise BenchFailed("no request was answered")
                progress(f"{rate:.0f} requests a second", 0.4)
                at_capacity = await load.open_loop(rate)
                progress(f"{setup.factor * rate:.0f} requests a second", 0.7)
                busy_s = _busy_s(router.child.pid)
                overloaded = await load.open_loop(rate * setup.factor)
                busy_s = _busy_s(router.child.pid) - busy_s
            retries = await asyncio.to_thread(router.metric, "isthmus_retries_total")
            if not rig.routers_are_running:
                raise BenchFailed("the router ended: " + rig.tails())
        result = _result(setup, rate, at_capacity, overloaded, retries)
        ms = busy_s / len(overloaded.calls) * 1e3
        result.figures["router_cpu_ms_per_overload_request"] = round(ms, 3)
        return result


def _busy_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class _Load:
    """Sends prompts of random tokens: no prefix is ever shared."""

    def __init__(
        self, stub: inference_pb2_grpc.InferenceAsyncStub, setup: Setup, vocab_size: int
    ) -> None:
        self._stub = stub
        self._setup = setup
        self._vocab_size = vocab_size
        self._rng = random.Random(setup.seed)
        self._prompts = np.random.default_rng(setup.seed)

    async def closed_loop(self) -> Arm:
        """Let as many clients as keep every worker busy ask one request after the other."""
        arm = Arm(self._setup.seconds, time.monotonic())
        until = arm.began + arm.seconds

        async def client() -> None:
            while time.monotonic() < until:
                arm.calls.append(await self._call(slo_ttft_ms=0))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return arm

    async def open_loop(self, per_s: float) -> Arm:
        """Send requests at random moments, `per_s` in a second on average."""
        arm = Arm(self._setup.seconds, time.monotonic())
        running: set[asyncio.Task[None]] = set()
        at = arm.began

        async def one() -> None:
            arm.calls.append(await self._call(self._setup.slo_ttft_ms))

        while (at := at + self._rng.expovariate(per_s)) < arm.began + arm.seconds:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            task = asyncio.create_task(one())
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
        return arm

    async def _call(self, slo_ttft_ms: int) -> Call:
        ids = self._prompts.integers(3, self._vocab_size, PROMPT_TOKENS, dtype="<u4")
        body = inference_pb2.GenerateRequest(
            token_ids=ids.tobytes(),
            max_tokens=ANSWER_TOKENS,
            ignore_eos=True,
            slo_ttft_ms=slo_ttft_ms,
        )
        began, ttft_s, code, retry_after_ms = time.monotonic(), None, "", None
        try:
            async for _ in self._stub.Generate(body, timeout=CALL_TIMEOUT_S):
                if ttft_s is None:
                    ttft_s = time.monotonic() - began
        except grpc.aio.AioRpcError as error:
            code, retry_after_ms = code_of(error), _retry_after_ms(error)
        return Call(began, time.monotonic(), code, ttft_s, retry_after_ms)


def _retry_after_ms(error: grpc.aio.AioRpcError) -> int | None:
    for key, value in error.trailing_metadata() or ():
        if key == TRAILER_RETRY_AFTER.name:
            return int(value)
    return None


def _is_answered(call: Call) -> bool:
    return not call.code


def _result(
    setup: Setup, capacity: float, at_capacity: Arm, overloaded: Arm, retries: float
) -> BenchResult:
    slo_s = setup.slo_ttft_ms / 1000

    def is_good(call: Call) -> bool:
        return not call.code and call.ttft_s is not None and call.ttft_s <= slo_s

    result = BenchResult("overload")
    result.reference |= {
        "capacity_per_s": round(capacity, 2),
        "slo_ttft_ms": setup.slo_ttft_ms,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "workers_of_each_role": setup.workers,
    }
    ttft_p99: list[float] = []
    for name, arm in (("at_capacity", at_capacity), ("overloaded", overloaded)):
        calls = arm.settled()
        ttfts = [c.ttft_s for c in calls if not c.code and c.ttft_s is not None]
        if not ttfts:
            raise BenchFailed(f"{name}: no request was answered: {_codes(calls)}")
        ttft_p99.append(nearest_rank(ttfts, 0.99))
        result.figures |= {
            f"{name}_offered_per_s": round(len(calls) / (arm.seconds * (1 - SETTLE_SHARE)), 2),
            f"{name}_goodput_per_s": round(arm.rate(is_good), 2),
            f"{name}_ttft_p50_ms": round(nearest_rank(ttfts, 0.5) * 1e3, 1),
            f"{name}_ttft_p99_ms": round(ttft_p99[-1] * 1e3, 1),
            f"{name}_refused": sum(c.is_refused for c in calls),
            f"{name}_codes": _codes(calls),
        }
    refused = [c for c in overloaded.settled() if c.is_refused]
    if not refused:
        raise BenchFailed("nothing was refused: the load was no overload")
    rejects_ms = [(c.ended - c.began) * 1e3 for c in refused]
    told = [c.retry_after_ms for c in refused if c.retry_after_ms]
    num_sent = sum(not c.is_refused for c in (*at_capacity.calls, *overloaded.calls))
    peak = max(capacity, at_capacity.rate(is_good))
    share = overloaded.rate(is_good) / peak
    result.figures |= {
        "goodput_share_of_peak": round(share, 3),
        "reject_p50_ms": round(nearest_rank(rejects_ms, 0.5), 2),
        "reject_p99_ms": round(nearest_rank(rejects_ms, 0.99), 2),
        "refused_with_retry_after": len(told),
        "retry_after_p50_ms": nearest_rank(told, 0.5) if told else None,
        "ttft_p99_ratio": round(ttft_p99[1] / ttft_p99[0], 3),
        "attempts_per_request": round(1 + retries / max(1, num_sent), 4),
    }
    times = f"{setup.factor:g}x"
    result.bars += [
        Bar(f"goodput at {times} the capacity over the peak", round(share, 3), GOODPUT_BAR, ">="),
        Bar("refusals, p99 ms", round(nearest_rank(rejects_ms, 0.99), 2), REJECT_BAR_MS, "<="),
        Bar(
            f"TTFT p99 at {times} over that at capacity",
            round(ttft_p99[1] / ttft_p99[0], 3), TTFT_BAR, "<=",
        ),
        Bar("attempts a request", round(1 + retries / max(1, num_sent), 4), ATTEMPTS_BAR, "<="),
        Bar("refusals without a time to come back", len(refused) - len(told), 0, "=="),
    ]  # fmt: skip
    return result


def _codes(calls: Sequence[Call]) -> str:
    counts = Counter(call.code or "answered" for call in calls)
    return ", ".join(f"{code} {count}" for code, count in sorted(counts.items()))
