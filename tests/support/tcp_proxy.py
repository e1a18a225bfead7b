"""A TCP proxy that is slow, flips bits, cuts or goes silent: a bad network on loopback."""

from __future__ import annotations

import random
import select
import socket
import threading
import time
from dataclasses import dataclass, field


@dataclass
class Faults:
    """What the proxy does to bytes that flow from the server to the client."""

    rate_bytes_s: float = 0.0  # 0 = as fast as it goes
    flip_every_bytes: int = 0  # one random bit in about this many bytes; 0 = none
    flip_after_bytes: int = 0  # the first bytes of a connection stay whole
    cut_after_bytes: int = 0  # of all connections together; once
    is_silent: bool = False  # both ways, connections stay open
    num_flips: int = 0
    num_cuts: int = 0


@dataclass
class TcpProxy:
    """Listens on a port of its own and forwards to `target`."""

    target: tuple[str, int]
    faults: Faults = field(default_factory=Faults)
    seed: int = 1

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._stopping = threading.Event()
        self._num_forwarded = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def stop(self) -> None:
        """Close everything and join."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            if select.select([self._listener], [], [], 0.05)[0]:
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self.target, 1)
        except OSError:
            client.close()
            return
        try:
            self._forward(client, server)
        except OSError:
            pass  # one side has closed; so do we
        finally:
            client.close()
            server.close()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        num_bytes = 0
        while not self._stopping.is_set():
            if self.faults.is_silent:
                time.sleep(0.01)
                continue
            for readable in select.select([client, server], [], [], 0.05)[0]:
                chunk = bytearray(readable.recv(16 * 1024))
                if not chunk:
                    return
                if readable is client:
                    server.sendall(chunk)
                    continue
                num_bytes += len(chunk)
                self._spoil(chunk, num_bytes)
                client.sendall(chunk)
                if self._is_cut(len(chunk)):
                    return

    def _spoil(self, chunk: bytearray, num_bytes: int) -> None:
        faults = self.faults
        if faults.rate_bytes_s:
            time.sleep(len(chunk) / faults.rate_bytes_s)
        if not faults.flip_every_bytes or num_bytes < faults.flip_after_bytes:
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
