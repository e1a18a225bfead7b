"""`isthmus chaos store`: the store is hurt in every way under load, and no request may fail for it.

Between two faults nobody is disturbed for as long as a fault lasts, so that times to the first
token are held against those of the same minutes. A fault is over when the hints are back: the store
knows of as many as before, and both routers ask it again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import struct
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.bench.result import Bar, BenchFailed, BenchResult, Figure
from services.chaos.attack import Attack, Load, loaded_cluster
from services.chaos.keyed_load import KeyedLoad, Seen, ttft_ms
from services.chaos.known_load import LoadShape
from services.chaos.rig import Rig
from services.common.progress import Progress, silent

TTFT_BAR = 1.3
HINTS_BACK_BAR_S = 5.0
SLOW_S = 0.3  # an answer of the slow store
FAULTS = ("kill", "restart", "freeze", "slow", "flush", "retype", "lie")
_BACK_SHARE = 0.8  # of the hints there were: caches go on changing meanwhile
_BACK_TIMEOUT_S = 30.0  # then they count as lost
_LOOK_S = 0.05
_ADMIN_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class StorePlan:
    """How often, for how long, and with what load."""

    seed: int
    rounds: int = 3  # in each every fault comes once
    span_s: float = 4.0  # of a fault, and of the quiet before it
    load: Load = field(
        default_factory=lambda: Load(
            clients=6,
            shape=LoadShape((400, 900, 1500), output_lengths=(1, 8, 20, 60), timeout_s=40.0),
        )
    )


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when something was so; `fault` is empty where nothing was."""

    fault: str
    began_at: float
    ended_at: float


def run(plan: StorePlan, progress: Progress = silent) -> BenchResult:
    """Run on the main thread: the processes die with it."""
    return asyncio.run(_run(plan, progress))


async def _run(plan: StorePlan, progress: Progress) -> BenchResult:
    # A store dies with the thread that has started it: this one outlives them all, and the clients
    # do not stand still meanwhile.
    with ThreadPoolExecutor(1) as starter:
        async with loaded_cluster(plan.seed, plan.load, has_store_proxy=True) as (rig, load):
            hurting = _Hurting(plan, rig, load, starter, progress)
            await hurting.run()
            return _result(plan, hurting)


class _Hurting(Attack):
    """Hurts the store in every way, in an order drawn anew for each round."""

    def __init__(
        self,
        plan: StorePlan,
        rig: Rig,
        load: KeyedLoad,
        starter: ThreadPoolExecutor,
        progress: Progress,
    ) -> None:
        super().__init__(rig, load, plan.load.clients)
        self.spans: list[Span] = []
        self.back_s: dict[str, list[float]] = {fault: [] for fault in FAULTS}
        self.fewest_hints = 0  # that were there before a fault
        self._plan = plan
        self._starter = starter
        self._progress = progress
        self._rng = random.Random(f"{plan.seed}/store")

    async def _attack(self) -> None:
        await asyncio.sleep(self._plan.span_s)  # caches fill
        held = []
        for number in range(self._plan.rounds):
            for fault in self._rng.sample(FAULTS, len(FAULTS)):
                self._progress(fault, number / self._plan.rounds)
                quiet_at = time.monotonic()
                await asyncio.sleep(self._plan.span_s)
                self._note_deaths()
                held.append(await asyncio.to_thread(_num_hints, self._rig.store.url))
                began_at = time.monotonic()
                await self._take(fault)
                self.back_s[fault].append(await self._until_back(held[-1]))
                rest_s = began_at + self._plan.span_s - time.monotonic()
                await asyncio.sleep(max(0.0, rest_s))
                self.spans += [
                    Span("", quiet_at, began_at),
                    Span(fault, began_at, time.monotonic()),
                ]
                self.tally.faults[fault] += 1
        self.fewest_hints = min(held)

    async def _take(self, fault: str) -> None:
        """Hurt the store; it is healed when this returns, or has nobody to heal it but isthmus."""
        rig, span_s = self._rig, self._plan.span_s
        if fault == "kill":
            os.kill(rig.store.pid, signal.SIGKILL)
            await asyncio.sleep(span_s)
            await self._start_again()
        elif fault == "restart":
            await self._start_again()
        elif fault == "freeze":
            os.kill(rig.store.pid, signal.SIGSTOP)
            await asyncio.sleep(span_s)
            os.kill(rig.store.pid, signal.SIGCONT)
        elif fault == "slow":
            assert rig.store_proxy is not None
            rig.store_proxy.faults.delay_s = SLOW_S / 2  # each way
            await asyncio.sleep(span_s)
            rig.store_proxy.faults.delay_s = 0.0
        elif fault == "flush":
            await asyncio.to_thread(_flush, rig.store.url)
        elif fault == "retype":
            await asyncio.to_thread(_retype, rig.store.url)
            await asyncio.sleep(span_s)
            await asyncio.to_thread(_flush, rig.store.url)
        else:
            await asyncio.to_thread(_lie, rig.store.url, self._rng)

    async def _start_again(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._starter, self._rig.start_store_again)

    async def _until_back(self, num_before: int) -> float:
        """Wait until hints are back; return the seconds."""
        started = time.monotonic()
        while time.monotonic() - started < _BACK_TIMEOUT_S:
            num, degraded = await asyncio.gather(
                asyncio.to_thread(_num_hints, self._rig.store.url),
                asyncio.to_thread(self._num_degraded),
            )
            if num >= _BACK_SHARE * num_before and not degraded:
                break
            await asyncio.sleep(_LOOK_S)
        return time.monotonic() - started

    def _num_degraded(self) -> int:
        return sum(router.metric("isthmus_router_degraded") > 0 for router in self._rig.routers)


# -- what is done to the data ------------------------------------------------------------------


def _admin(url: str) -> redis.Redis:
    """Connect past the proxy."""
    return redis.Redis.from_url(
        url, socket_timeout=_ADMIN_TIMEOUT_S, retry=Retry(NoBackoff(), 0), protocol=2
    )


def _keys(client: redis.Redis, pattern: str) -> list[bytes]:
    found: list[bytes] = list(client.scan_iter(f"isthmus:*:{pattern}", count=1000))
    return found


def _rows(client: redis.Redis, key: bytes) -> Mapping[bytes, bytes]:
    return cast("Mapping[bytes, bytes]", client.hgetall(key))  # nothing is decoded here


def _num_hints(url: str) -> int:
    """Count the hashes the store has owners for; 0 where it does not answer."""
    try:
        with closing(_admin(url)) as client:
            asked = client.pipeline(transaction=False)
            for key in _keys(client, "b:*"):
                asked.hlen(key)
            answers = asked.execute(raise_on_error=False)
    except (redis.RedisError, OSError):
        return 0
    return sum(answer for answer in answers if isinstance(answer, int))


def _flush(url: str) -> None:
    """Lose data and scripts."""
    with closing(_admin(url)) as client:
        client.flushall()
        client.script_flush()


def _retype(url: str) -> None:
    """Make every key one of another type."""
    with closing(_admin(url)) as client:
        changes = client.pipeline()
        for key in _keys(client, "*"):
            changes.delete(key)
            changes.lpush(key, "nonsense")
        changes.execute()


def _lie(url: str, rng: random.Random) -> None:
    """Name every worker an owner of every hash, and book endless work at each of them."""
    with closing(_admin(url)) as client:
        lies = client.pipeline()
        for workers in _keys(client, "w"):
            records = _rows(client, workers)
            owners = b"".join(
                struct.pack("<H", int(slot)) + record[:2] for slot, record in records.items()
            )
            for bucket in _keys(client, "b:*"):
                for name, value in _rows(client, bucket).items():
                    lies.hset(bucket, name, owners + value)
            for slot, record in records.items():
                endless = struct.pack("<IIIIIdd", 1, *[2**32 - 1] * 4, 1e300, float("nan"))
                lies.hset(workers[:-1] + b"q", slot, record[:2] + b"\xff\xff" + endless)
            for i in range(64):
                lies.set(workers[:-1] + b"r:forged-%d" % i, rng.randbytes(16))
                lies.zadd(workers[:-1] + b"rz", {rng.randbytes(rng.randrange(1, 20)): i})
                lies.hset(workers[:-1] + b"s:%d" % i, rng.randbytes(8), rng.randbytes(24))
        lies.execute()


# -- what is told ------------------------------------------------------------------------------


def _during(seen: Sequence[Seen], spans: Sequence[Span]) -> list[Seen]:
    return [s for s in seen if any(span.began_at <= s.asked_at < span.ended_at for span in spans)]


def _result(plan: StorePlan, hurting: _Hurting) -> BenchResult:
    seen, spans = hurting.load.seen, hurting.spans
    quiet = _during(seen, [span for span in spans if not span.fault])
    hurt = _during(seen, [span for span in spans if span.fault])
    hurt_ms, quiet_ms = ttft_ms(hurt, 0.99), ttft_ms(quiet, 0.99)
    if hurt_ms is None or quiet_ms is None:
        raise BenchFailed("no answer was streamed, so its time to the first token is not known")
    ratio = hurt_ms / quiet_ms
    slowest_s = max(max(times) for times in hurting.back_s.values())
    result = BenchResult("chaos store")
    result.figures = {
        "seed": plan.seed,
        **hurting.figures(),
        "fewest_hints_before": hurting.fewest_hints,
        **_times("undisturbed", quiet),
        **_times("hurt", hurt),
        "blind_hurt": sum(one.was_blind for one in hurt),
    }
    for fault in FAULTS:
        ours = _during(seen, [span for span in spans if span.fault == fault])
        result.figures |= _times(fault, ours)
        result.figures[f"hints_back_{fault}_s"] = round(max(hurting.back_s[fault]), 2)
    result.figures |= hurting.examples()
    result.bars = [
        *hurting.bars(),
        Bar("ttft_p99_hurt_to_undisturbed", round(ratio, 3), TTFT_BAR, "<="),
        Bar("hints_back_s", round(slowest_s, 2), HINTS_BACK_BAR_S, "<="),
        # Without hints to lose and decisions made alone the zeros above would prove nothing.
        Bar("fewest_hints_before", hurting.fewest_hints, 1, ">="),
        Bar("blind_hurt", sum(one.was_blind for one in hurt), 1, ">="),
    ]
    return result


def _times(name: str, seen: Sequence[Seen]) -> dict[str, Figure]:
    return {
        f"answered_{name}": len(seen),
        f"ttft_p50_{name}_ms": ttft_ms(seen, 0.5),
        f"ttft_p99_{name}_ms": ttft_ms(seen, 0.99),
    }
