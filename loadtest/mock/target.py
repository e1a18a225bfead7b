"""A target that brings its own server: `mock://http?KEY=VALUE&...` or `mock://grpc?...`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from loadtest.mock.process import MockProcess
from loadtest.mock.settings import parse_url
from loadtest.records import PlannedRequest, RequestRecord
from loadtest.target import LiveTarget, TargetFacts


class MockTarget:
    """Starts a mock when it is opened, and measures it over the wire like any other server."""

    def __init__(self, url: str, make_target: Callable[[str], LiveTarget]) -> None:
        """Read the settings; ConfigError names what is wrong with them."""
        self._url = url
        self._door, settings = parse_url(url)
        self._process = MockProcess(settings)
        self._make_target = make_target
        self._target: LiveTarget | None = None

    async def open(self) -> TargetFacts:
        """Start the server and connect."""
        await self._process.start()
        self._target = self._make_target(self._process.url(self._door))
        facts = await self._target.open()
        return dataclasses.replace(facts, kind="mock", address=self._url)

    async def send(self, request: PlannedRequest, record: RequestRecord, timeout_s: float) -> None:
        """Send one request."""
        assert self._target is not None
        await self._target.send(request, record, timeout_s)

    async def close(self) -> None:
        """Let go of connections, and end the server."""
        if self._target is not None:
            await self._target.close()
        await self._process.stop()
