"""What the client commands share: channels to a router, credentials, faults in plain words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
import typer

from services.cli import exits

CONNECT_TIMEOUT_S = 3.0
MAX_MESSAGE_BYTES = 16 << 20


@contextlib.contextmanager
def connect(address: str) -> Iterator[grpc.Channel]:
    """Open a channel that is known to work; a silent address ends the command."""
    options = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)
    channel = grpc.insecure_channel(address, options=options)
    try:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            typer.echo(f"isthmus: nobody answers at {address}; is a cluster running?", err=True)
            raise typer.Exit(exits.UNREACHABLE) from None
        yield channel
    finally:
        channel.close()


def credentials(api_key: str) -> tuple[tuple[str, str], ...]:
    """Metadata that carries the key."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def explain_rpc_error(error: grpc.RpcError) -> str:
    """Status and details of a failed call."""
    code = error.code() if isinstance(error, grpc.Call) else None
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    name = code.name if code is not None else "UNKNOWN"
    return f"{name}: {details or 'no details'}"
