"""The routers a command talks to: each is asked, and one that does not answer is told of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import grpc
import typer

from services.cli.client import connect, credentials, explain_rpc_error
from services.cli.router_options import DEFAULT_SERVER
from services.common.clock import SystemClock
from services.pb import admin_pb2, admin_pb2_grpc

TIMEOUT_S = 5.0
_TRIES_A_PROCESS = 8  # one in a few thousand is missed
_NOT_FOUND = grpc.StatusCode.NOT_FOUND

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
Metadata = tuple[tuple[str, str], ...]
# One RPC: the stub, what to send along, and how long it may take.
Call = Callable[[admin_pb2_grpc.AdminStub, Metadata, float], Answer]
Rpc = Callable[[admin_pb2_grpc.AdminStub], "grpc.UnaryUnaryMultiCallable[Ask, Answer]"]


def calling(rpc: Rpc[Ask, Answer], ask: Ask) -> Call[Answer]:
    """Make a call of an RPC with what it asks."""
    return lambda stub, metadata, timeout_s: rpc(stub)(ask, metadata=metadata, timeout=timeout_s)


@dataclass(frozen=True, slots=True)
class Reply(Generic[Answer]):
    """What one router said; without an answer there is a reason."""

    server: str
    answer: Answer | None
    reason: str = ""
    is_not_found: bool = False  # it answered that it does not know what was asked for


@dataclass(frozen=True, slots=True)
class Peer:
    """Which process answers, and of how many behind its address."""

    router_id: str
    num_processes: int


def by_requests(stub: admin_pb2_grpc.AdminStub, metadata: Metadata, timeout_s: float) -> Peer:
    """Ask who answers, with the scope admin."""
    ask = admin_pb2.ListRequestsRequest()
    answer = stub.ListRequests(ask, metadata=metadata, timeout=timeout_s)
    return Peer(answer.router_id, max(1, answer.processes))


def by_status(stub: admin_pb2_grpc.AdminStub, metadata: Metadata, timeout_s: float) -> Peer:
    """Ask who answers, with the scope monitor."""
    ask = admin_pb2.ClusterStatusRequest()
    answer = stub.ClusterStatus(ask, metadata=metadata, timeout=timeout_s)
    return Peer(answer.router_id, max(1, answer.processes))


@dataclass(frozen=True, slots=True)
class Routers:
    """Addresses and how to reach them."""

    servers: tuple[str, ...]
    api_key: str = ""
    tls: bool = False
    ca_file: Path | None = None
    identify: Call[Peer] = by_requests

    @classmethod
    def of(
        cls, servers: Sequence[str] | None, api_key: str, tls: bool, ca_file: Path | None
    ) -> Routers:
        """Take the flags as they were given."""
        return cls(tuple(servers or (DEFAULT_SERVER,)), api_key, tls, ca_file)

    def ask_all(self, call: Call[Answer], timeout_s: float = TIMEOUT_S) -> list[Reply[Answer]]:
        """Ask every router, and every process where several share an address."""
        return [
            reply for server in self.servers for reply in self._replies(server, call, timeout_s)
        ]

    def ask_until(self, call: Call[Answer], timeout_s: float = TIMEOUT_S) -> Reply[Answer]:
        """Ask one after another until one knows what was asked for; the last reply otherwise."""
        for server in self.servers:
            for reply in self._replies(server, call, timeout_s):
                if reply.answer is not None:
                    return reply
                if not reply.is_not_found:
                    complain(reply)
        return reply

    def _replies(
        self, server: str, call: Call[Answer], timeout_s: float
    ) -> Iterator[Reply[Answer]]:
        """Ask what is behind an address: the kernel picks a process for every new connection."""
        seen: set[str] = set()
        tries_left = 1
        while tries_left:
            tries_left -= 1
            reply, peer = self._ask(server, call, timeout_s, seen)
            if peer is None:
                if reply is not None:
                    yield reply
                return
            if reply is not None:
                yield reply
            if not seen:
                tries_left = _TRIES_A_PROCESS * peer.num_processes
            seen.add(peer.router_id)
            if len(seen) >= peer.num_processes:
                return

    def _ask(
        self, server: str, call: Call[Answer], timeout_s: float, seen: set[str]
    ) -> tuple[Reply[Answer] | None, Peer | None]:
        """Ask whoever answers a new connection, unless it was asked already, and say who it is."""
        clock = SystemClock()
        peer: Peer | None = None
        try:
            with connect(server, self.tls, self.ca_file) as channel:
                stub, started = admin_pb2_grpc.AdminStub(channel), clock.now()
                metadata = credentials(self.api_key)
                try:
                    peer = self.identify(stub, metadata, TIMEOUT_S)
                    if peer.router_id in seen:
                        return None, peer
                    name = server if peer.num_processes == 1 else f"{server} {peer.router_id}"
                    return Reply(name, call(stub, metadata, timeout_s)), peer
                except grpc.RpcError as error:
                    why = explain_rpc_error(error, timeout_s, clock.now() - started)
                    is_not_found = isinstance(error, grpc.Call) and error.code() is _NOT_FOUND
                    return Reply(server, None, why, is_not_found), peer
        except typer.Exit:
            return Reply(server, None), None  # the reason has been printed


def complain(reply: Reply[Answer]) -> None:
    """Say why there is no answer."""
    if reply.reason:
        typer.echo(f"isthmus: {reply.server}: {reply.reason}", err=True)
