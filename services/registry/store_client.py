"""Connections to the store: no retries of the library's own, TLS by a CA, missing scripts loaded.

Two users are possible. The one of every day may run scripts and nothing else of note; the other
may load them and touch no key. It is used only when the store says that it lacks a script, which
also heals one that restarted empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any  # options of the redis package

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError
from redis.retry import Retry

from services.common.config import StoreSettings
from services.registry.scripts import Invocation, load_script
from services.registry.store_pipe import StorePipe

LOAD_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the store is, and as whom it is spoken to. The addresses may hold passwords."""

    url: str
    loader_url: str = ""  # of the user that may load scripts; empty = the same as for all else
    ca_file: str = ""  # who signs a rediss:// store's certificate; empty = the system's CAs


def store_address(settings: StoreSettings) -> StoreAddress:
    """Return the address a process is configured with."""
    return StoreAddress(
        settings.url.get_secret_value(), settings.loader_url.get_secret_value(), settings.ca_file
    )


class SyncStore:
    """For a thread: a call gives up after one timeout; the library's defaults block a minute."""

    def __init__(self, address: StoreAddress, timeout_s: float) -> None:
        self._address = address
        self._client = self._connect(address.url, timeout_s)
        self._loader_url = address.loader_url

    def run(self, call: Invocation) -> object:
        """Run a script; load it first when the store does not know it."""
        sha, args = call.script.sha, (*call.keys, *call.args)
        try:
            return self._client.evalsha(sha, len(call.keys), *args)
        except NoScriptError:
            self._load(call)
            return self._client.evalsha(sha, len(call.keys), *args)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _load(self, call: Invocation) -> None:
        if not self._loader_url:
            self._client.script_load(call.script.text)
            return
        loader = self._connect(self._loader_url, LOAD_TIMEOUT_S)
        try:
            loader.script_load(call.script.text)
        finally:
            loader.close()

    def _connect(self, url: str, timeout_s: float) -> redis.Redis:
        options: dict[str, Any] = {
            "health_check_interval": 0,
            "protocol": 2,
            "driver_info": None,  # else it introduces itself by a command that a user must have
        }
        if url.startswith("rediss:") and self._address.ca_file:
            options["ssl_ca_certs"] = self._address.ca_file
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            **options,
        )


class AsyncStore:
    """For an event loop; the caller bounds each call, connecting included."""

    def __init__(self, address: StoreAddress, scripts: tuple[str, ...]) -> None:
        """`scripts`: names of all that will be run; one that is missing brings them all."""
        self._address = address
        self._scripts = scripts
        self._pipe = StorePipe(address.url, address.ca_file)

    async def run(self, call: Invocation) -> object:
        """Run a script; load all of them first when the store does not know it."""
        words = ("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
        try:
            return await self._pipe.call(*words)
        except NoScriptError:
            await self._load(call)
            return await self._pipe.call(*words)

    async def close(self) -> None:
        """Close the connection."""
        await self._pipe.close()

    async def _load(self, call: Invocation) -> None:
        # All at once: on the path of a request there may be too little time to load any.
        texts = {call.script.text, *(load_script(name).text for name in self._scripts)}
        if not self._address.loader_url:
            for text in texts:
                await self._pipe.call("SCRIPT", "LOAD", text)
            return
        loader = StorePipe(self._address.loader_url, self._address.ca_file)
        try:
            for text in texts:
                await loader.call("SCRIPT", "LOAD", text)
        finally:
            await loader.close()
