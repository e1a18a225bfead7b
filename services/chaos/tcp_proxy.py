"""A TCP proxy that is slow, flips bits, cuts or goes silent: a bad network on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from dataclasses import dataclass

from services.chaos.zmtp import MessageSplitter, Unit

_CHUNK_BYTES = 16 * 1024
_CONNECT_TIMEOUT_S = 1.0
_SILENT_POLL_S = 0.01
_STOP_TIMEOUT_S = 5.0


@dataclass
class Faults:
    """What the proxy does, from now on; any thread may change it at any time.

    Rate, flips and `cut_after_bytes` are for bytes from the server to the client.
    """

    rate_bytes_s: float = 0.0  # 0 = as fast as it goes
    delay_s: float = 0.0  # every chunk waits this long, both ways
    flip_every_bytes: int = 0  # one random bit in about this many bytes; 0 = none
    flip_after_bytes: int = 0  # the first bytes of a connection stay whole
    cut_after_bytes: int = 0  # of all connections together; once
    is_silent: bool = False  # both ways, connections stay open
    duplicate_share: float = 0.0  # of ZMTP messages, both ways; of proxies that split them
    num_flips: int = 0
    num_cuts: int = 0
    num_duplicates: int = 0


class TcpProxy:
    """Listens on a port of its own and forwards to `target`; a thread with an event loop."""

    def __init__(
        self,
        target: tuple[str, int],
        faults: Faults | None = None,
        seed: int = 1,
        *,
        splits_messages: bool = False,
    ) -> None:
        """Listen; with `splits_messages` plaintext ZMTP passes message by message."""
        self._splits_messages = splits_messages
        self.target = target
        self.faults = faults or Faults()
        self._rng = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._num_forwarded = 0
        self._thread = threading.Thread(target=self._run, name="tcp-proxy", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Drop every open connection now."""
        self._loop.call_soon_threadsafe(self._drop_all)

    def stop(self) -> None:
        """Close everything and join."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()
            self._listener.close()

    async def _main(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._listener, limit=_CHUNK_BYTES)
        await self._stopping.wait()
        server.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopping.is_set():
            writer.transport.abort()
            return
        task = self._loop.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        # A task that is cancelled before it has begun closes nothing itself.
        task.add_done_callback(lambda _: writer.transport.abort())

    def _drop_all(self) -> None:
        for task in self._connections:
            task.cancel()
            self.faults.num_cuts += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                from_server, to_server = await asyncio.open_connection(
                    *self.target, limit=_CHUNK_BYTES
                )
            writers.append(to_server)
            pumps = (
                self._loop.create_task(self._pump(reader, to_server, is_answer=False)),
                self._loop.create_task(self._pump(from_server, writer, is_answer=True)),
            )
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, TimeoutError):
            pass  # nobody listens at the target just now: the client sees its connection end
        finally:
            for end in writers:  # all of them before a wait, which a cut may interrupt
                end.transport.abort()  # a cut link says no goodbye
            for end in writers:
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        num_bytes = 0
        splitter = MessageSplitter() if self._splits_messages else None
        while True:
            await self._until_it_speaks()
            chunk = bytearray(await reader.read(_CHUNK_BYTES))
            if not chunk:
                return
            await self._until_it_speaks()  # silence may have begun while we waited for bytes
            if splitter is not None:
                chunk = self._repeat_some(splitter.feed(bytes(chunk)))
            num_bytes += len(chunk)
            await self._wait(len(chunk), is_answer=is_answer)
            if is_answer:
                self._spoil(chunk, num_bytes)
            writer.write(chunk)
            await writer.drain()
            if is_answer and self._is_cut(len(chunk)):
                return

    async def _until_it_speaks(self) -> None:
        while True:  # a poll: other threads set the flag
            if not self.faults.is_silent:
                return
            await asyncio.sleep(_SILENT_POLL_S)

    async def _wait(self, num_bytes: int, *, is_answer: bool) -> None:
        faults = self.faults
        wait_s = faults.delay_s
        if is_answer and faults.rate_bytes_s:
            wait_s += num_bytes / faults.rate_bytes_s
        if wait_s:
            await asyncio.sleep(wait_s)

    def _repeat_some(self, units: list[Unit]) -> bytearray:
        passed = bytearray()
        for unit in units:
            passed += unit.data
            if unit.is_message and self._rng.random() < self.faults.duplicate_share:
                passed += unit.data
                self.faults.num_duplicates += 1
        return passed

    def _spoil(self, chunk: bytearray, num_bytes: int) -> None:
        faults = self.faults
        if not chunk or not faults.flip_every_bytes or num_bytes < faults.flip_after_bytes:
            return
        if self._rng.random() < len(chunk) / faults.flip_every_bytes:
            chunk[self._rng.randrange(len(chunk))] ^= 1 << self._rng.randrange(8)
            faults.num_flips += 1

    def _is_cut(self, num_bytes: int) -> bool:
        before, self._num_forwarded = self._num_forwarded, self._num_forwarded + num_bytes
        if before < self.faults.cut_after_bytes <= self._num_forwarded:
            self.faults.num_cuts += 1
            return True
        return False
