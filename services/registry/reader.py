"""The router's side of the registry: short deadlines, no retries, hostile answers tolerated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import redis.exceptions

from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.registry.answers import parse_route, parse_snapshot, parse_status
from services.registry.base import WorkerInfo, WorkerRecord
from services.registry.cost import Candidate, Pairs, Verdict, Weights
from services.registry.schema import Keys
from services.registry.scripts import Invocation, RouteAsk, ScriptCalls
from services.registry.store_client import AsyncStore, StoreAddress

_LAST_SHARE = 0.2  # of a deadline, which begins when the rest of it was seen to pass
SCRIPTS = ("snapshot", "route", "release", "hold", "limits", "tell")  # that a router runs


class RegistryReader(Protocol):
    """The router's side (asyncio). Every call has a deadline and raises StoreUnavailable."""

    async def snapshot(self) -> tuple[WorkerRecord, ...]:
        """All workers whose entries exist, expired ones included."""
        ...

    async def route(
        self,
        weights: Weights,
        candidates: Sequence[Candidate],
        pairs: Pairs,
        asks: Sequence[RouteAsk],
    ) -> tuple[Verdict | None, ...]:
        """Decide and reserve for some requests, in one round trip."""
        ...

    async def release(self, ends: Sequence[tuple[str, bytes]]) -> None:
        """End reservations, each with the hash fields its worker turned out not to hold."""
        ...

    async def hold(self, rids: Sequence[str]) -> None:
        """Extend reservations."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """Deadlines of store calls."""

    floor_s: float = 0.025  # two busy laptop cores alone give a p99 of 5 ms; a server sets 5 ms
    cap_s: float = 0.1
    snapshot_timeout_s: float = 0.25  # not on any request's path


def reader_config(call_timeout_s: float) -> ReaderConfig:
    """Return deadlines around the usual wait for a decision."""
    return ReaderConfig(floor_s=call_timeout_s, cap_s=4 * call_timeout_s)


class LatencyDeadline:
    """A deadline of 8 x the median latency, between two bounds. Pure."""

    def __init__(self, floor_s: float, cap_s: float) -> None:
        self._floor_s = floor_s
        self._cap_s = cap_s
        self._median_s = floor_s / 8

    @property
    def seconds(self) -> float:
        """How long the next call may take."""
        return min(self._cap_s, max(self._floor_s, 8 * self._median_s))

    def observe(self, latency_s: float) -> None:
        """Move the median estimate a step towards one more latency."""
        step = max(self._median_s * 0.05, 1e-6)
        self._median_s = max(1e-6, self._median_s + (step if latency_s > self._median_s else -step))


class RedisRegistryReader:
    """RegistryReader over Redis or Valkey."""

    def __init__(
        self, store: StoreAddress, namespace: str, clock: Clock, config: ReaderConfig | None = None
    ) -> None:
        self._config = config or ReaderConfig()
        self._calls = ScriptCalls(Keys(namespace))
        self._clock = clock
        self._deadline = LatencyDeadline(self._config.floor_s, self._config.cap_s)
        self._infos: dict[int, WorkerInfo] = {}
        self._info_version = ""
        self._store = AsyncStore(store, SCRIPTS)

    async def snapshot(self) -> tuple[WorkerRecord, ...]:
        """Return all workers whose entries exist, expired ones included."""
        known, known_version = self._infos, self._info_version
        call = self._calls.snapshot(known_version)
        raw = await self._call(call, self._config.snapshot_timeout_s)
        answer = parse_snapshot(raw, known, known_version)
        self._infos, self._info_version = dict(answer.infos), answer.info_version
        return answer.records

    async def route(
        self,
        weights: Weights,
        candidates: Sequence[Candidate],
        pairs: Pairs,
        asks: Sequence[RouteAsk],
    ) -> tuple[Verdict | None, ...]:
        """Decide and reserve for some requests, in one round trip."""
        started = self._clock.now()
        try:
            call = self._calls.route(weights, candidates, pairs, asks)
            raw = await self._call(call, self._deadline.seconds)
        finally:
            self._deadline.observe(self._clock.now() - started)
        return parse_route(raw, len(asks))

    async def release(self, ends: Sequence[tuple[str, bytes]]) -> None:
        """End reservations; no request waits for it."""
        parse_status(await self._call(self._calls.release(ends), self._config.snapshot_timeout_s))

    async def hold(self, rids: Sequence[str]) -> None:
        """Extend reservations; no request waits for it."""
        parse_status(await self._call(self._calls.hold(rids), self._config.snapshot_timeout_s))

    async def run(self, call: Invocation, timeout_s: float) -> object:
        """Run a script of another part of the router; raises StoreUnavailable."""
        return await self._call(call, timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._store.close()

    async def _call(self, call: Invocation, timeout_s: float) -> object:
        loop = asyncio.get_running_loop()
        last_s = timeout_s * _LAST_SHARE
        try:
            async with asyncio.timeout(None) as limit:
                # Not all at once: where this process stood still, the answer is here, and read
                # before the rest has passed. Else a busy machine would look like a slow store.
                timer = loop.call_later(
                    timeout_s - last_s, lambda: limit.reschedule(loop.time() + last_s)
                )
                try:
                    return await self._store.run(call)
                finally:
                    timer.cancel()
        except TimeoutError:
            raise StoreUnavailable(f"no answer within {timeout_s * 1000:.0f} ms") from None
        except (redis.exceptions.RedisError, OSError) as error:
            raise StoreUnavailable(f"the store failed: {type(error).__name__}") from None
