"""Calls to single workers: their counters, a drain, a change of pool. Each has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias, TypeVar

import grpc
import grpc.aio

from services.autoscaler.driver import DriverError
from services.pb import worker_pb2, worker_pb2_grpc

STATUS_TIMEOUT_S = 2.0
_STATUSES_TIMEOUT_S = 4.0  # for all of them: a tick must not be as long as the silent are many
CALL_TIMEOUT_S = 5.0
_AT_ONCE = 64  # workers asked at the same time
OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 1000))
# Opens a channel to an address; the configuration says with which certificates. Raises DriverError
# where it says that there is to be none.
Dial: TypeAlias = Callable[[str], grpc.aio.Channel]
Stub: TypeAlias = "worker_pb2_grpc.WorkerAsyncStub"  # known to the type checker alone

Answer = TypeVar("Answer")


def plaintext(address: str) -> grpc.aio.Channel:
    """Open a channel without TLS."""
    return grpc.aio.insecure_channel(address, options=OPTIONS)


class WorkerCalls:
    """Calls to the workers of one cluster. Belongs to the event loop."""

    def __init__(self, dial: Dial = plaintext) -> None:
        self._dial = dial
        # By address, for what is asked at every tick; other calls are rare.
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def statuses(
        self, addresses: Mapping[str, str]
    ) -> dict[str, worker_pb2.StatusResponse | None]:
        """Ask workers for their counters, all at once; None of one that does not answer in time."""
        await self._forget(frozenset(addresses.values()))
        answers = await asyncio.gather(*map(self._status, addresses.values()))
        return dict(zip(addresses, answers, strict=True))

    async def drain(self, address: str) -> None:
        """Have a worker take no new work; returns at once. Raises DriverError."""
        request = worker_pb2.DrainRequest(deadline_ms=0)
        await self._call(address, lambda stub: stub.Drain(request, timeout=CALL_TIMEOUT_S))

    async def undrain(self, address: str) -> None:
        """Have a worker take work again. Raises DriverError."""
        request = worker_pb2.UndrainRequest()
        await self._call(address, lambda stub: stub.Undrain(request, timeout=CALL_TIMEOUT_S))

    async def join_pool(self, address: str, role: str, drain_s: float) -> None:
        """Have a worker drain, join another pool and take work again; returns when it has.

        Raises DriverError: it does not answer, or was not empty in time and goes on as before.
        """
        request = worker_pb2.SetRoleRequest(pool=role, drain_ms=max(1, round(drain_s * 1000)))
        timeout_s = CALL_TIMEOUT_S + drain_s
        await self._call(address, lambda stub: stub.SetRole(request, timeout=timeout_s))

    async def close(self) -> None:
        """Close every channel."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    async def _status(self, address: str) -> worker_pb2.StatusResponse | None:
        try:
            async with asyncio.timeout(_STATUSES_TIMEOUT_S), self._room:
                return await self._stub(address).Status(
                    worker_pb2.StatusRequest(), timeout=STATUS_TIMEOUT_S
                )
        except (grpc.aio.AioRpcError, DriverError, TimeoutError):
            return None

    async def _call(self, address: str, call: Callable[[Stub], Awaitable[Answer]]) -> Answer:
        try:
            async with self._dial(address) as channel:
                return await call(worker_pb2_grpc.WorkerStub(channel))
        except grpc.aio.AioRpcError as error:
            why = error.details() or error.code().name
            raise DriverError(f"the worker at {address}: {why}") from None

    def _stub(self, address: str) -> Stub:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._dial(address)
        return worker_pb2_grpc.WorkerStub(channel)

    async def _forget(self, wanted: frozenset[str]) -> None:
        """Close the channels of workers that are gone."""
        gone = [address for address in self._channels if address not in wanted]
        await asyncio.gather(*(self._channels.pop(address).close() for address in gone))
