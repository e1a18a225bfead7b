"""Runs a mock server in a process of its own, which ends with whoever started it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from types import TracebackType

from loadtest.mock.settings import Door, MockSettings
from loadtest.target import TargetUnusable

_START_S = 30.0
_STOP_S = 5.0
_HOST = "127.0.0.1"


class MockProcess:
    """An asynchronous context: inside it the server answers."""

    def __init__(self, settings: MockSettings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._ports: dict[Door, int] = {}

    def url(self, door: Door) -> str:
        """Return the address of a door."""
        return f"{door}://{self.address(door)}"

    def address(self, door: Door) -> str:
        """Return HOST:PORT of a door."""
        return f"{_HOST}:{self._ports[door]}"

    async def lateness(self) -> Mapping[str, float]:
        """Ask how late it wrote against its own plan since this was asked last."""
        host, _, port = self.address("http").partition(":")
        async with asyncio.timeout(_STOP_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(b"GET /mock/lateness HTTP/1.1\r\nhost: mock\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"content-length: ")[2].split()[0])
                told: dict[str, float] = json.loads(await reader.readexactly(length))
            finally:
                writer.close()
        return told

    async def start(self) -> None:
        """Start, and wait until both doors are open; TargetUnusable if they never are."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadtest.mock", self._settings.model_dump_json(),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                self._ports = json.loads(await self._process.stdout.readline())
        except (TimeoutError, ValueError):
            await self.stop()
            raise TargetUnusable("the mock server did not start; its errors are above") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End it, if it runs."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def __aenter__(self) -> MockProcess:
        """Start it."""
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        await self.stop()
