"""The routers a command talks to: each is asked, and one that does not answer is told of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import grpc
import typer

from services.cli.client import connect, credentials, explain_rpc_error
from services.cli.router_options import DEFAULT_SERVER
from services.common.clock import SystemClock
from services.pb import admin_pb2_grpc

TIMEOUT_S = 5.0
_NOT_FOUND = grpc.StatusCode.NOT_FOUND

Answer = TypeVar("Answer")
Metadata = tuple[tuple[str, str], ...]
# One RPC: the stub, what to send along, and how long it may take.
Call = Callable[[admin_pb2_grpc.AdminStub, Metadata, float], Answer]


@dataclass(frozen=True, slots=True)
class Reply(Generic[Answer]):
    """What one router said; without an answer there is a reason."""

    server: str
    answer: Answer | None
    reason: str = ""
    is_not_found: bool = False  # it answered that it does not know what was asked for


@dataclass(frozen=True, slots=True)
class Routers:
    """Addresses and how to reach them."""

    servers: tuple[str, ...]
    api_key: str = ""
    tls: bool = False
    ca_file: Path | None = None

    @classmethod
    def of(
        cls, servers: Sequence[str] | None, api_key: str, tls: bool, ca_file: Path | None
    ) -> Routers:
        """Take the flags as they were given."""
        return cls(tuple(servers or (DEFAULT_SERVER,)), api_key, tls, ca_file)

    def ask_all(self, call: Call[Answer], timeout_s: float = TIMEOUT_S) -> list[Reply[Answer]]:
        """Ask every router."""
        return [self._ask(server, call, timeout_s) for server in self.servers]

    def ask_until(self, call: Call[Answer], timeout_s: float = TIMEOUT_S) -> Reply[Answer]:
        """Ask one after another until one knows what was asked for; the last reply otherwise."""
        for server in self.servers:
            reply = self._ask(server, call, timeout_s)
            if reply.answer is not None:
                break
            if not reply.is_not_found:
                complain(reply)
        return reply

    def _ask(self, server: str, call: Call[Answer], timeout_s: float) -> Reply[Answer]:
        clock = SystemClock()
        try:
            with connect(server, self.tls, self.ca_file) as channel:
                stub, started = admin_pb2_grpc.AdminStub(channel), clock.now()
                try:
                    return Reply(server, call(stub, credentials(self.api_key), timeout_s))
                except grpc.RpcError as error:
                    why = explain_rpc_error(error, timeout_s, clock.now() - started)
                    is_not_found = isinstance(error, grpc.Call) and error.code() is _NOT_FOUND
                    return Reply(server, None, why, is_not_found)
        except typer.Exit:
            return Reply(server, None)  # the reason has been printed


def complain(reply: Reply[Answer]) -> None:
    """Say why there is no answer."""
    if reply.reason:
        typer.echo(f"isthmus: {reply.server}: {reply.reason}", err=True)
