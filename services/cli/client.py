"""What the client commands share: channels to a router, credentials, faults in plain words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from services.cli import exits
from services.cli.router_options import KEY_VARIABLE

CONNECT_TIMEOUT_S = 3.0
MAX_MESSAGE_BYTES = 16 << 20
_DEADLINE_SLACK_S = 0.5  # the server knows our deadline and may act on it a little before us
_TRAILER_CODE = "isthmus-code"


@contextlib.contextmanager
def connect(address: str, tls: bool = False, ca_file: Path | None = None) -> Iterator[grpc.Channel]:
    """Open a channel that is known to work; a silent address ends the command."""
    _check_address(address)
    options = (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A channel is a connection of its own: several processes may share the address.
        ("grpc.use_local_subchannel_pool", 1),
    )
    if tls or ca_file is not None:
        channel = grpc.secure_channel(address, _credentials(ca_file), options=options)
    else:
        channel = grpc.insecure_channel(address, options=options)
    try:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            typer.echo(
                f"isthmus: nobody answers at {address} {_in_which_way(tls, ca_file)}",
                err=True,
            )
            raise typer.Exit(exits.UNREACHABLE) from None
        yield channel
    finally:
        channel.close()


def _in_which_way(tls: bool, ca_file: Path | None) -> str:
    if ca_file is not None:
        return f"with a certificate signed by {ca_file}; is a cluster running, with TLS?"
    if tls:
        return (
            "with a certificate of a well-known authority; is a cluster running? "
            "--ca-file names an authority of your own"
        )
    return "in plaintext; is a cluster running? If it speaks TLS, give --ca-file or --tls"


def _credentials(ca_file: Path | None) -> grpc.ChannelCredentials:
    if ca_file is None:
        return grpc.ssl_channel_credentials()
    try:
        return grpc.ssl_channel_credentials(ca_file.read_bytes())
    except OSError as error:
        typer.echo(f"isthmus: {ca_file} cannot be read ({error.strerror})", err=True)
        raise typer.Exit(exits.USAGE) from None


def _check_address(address: str) -> None:
    """Refuse what gRPC would wait for in vain: a scheme names a resolver, no port means 443."""
    is_path = address.startswith("unix:")
    if "://" in address or not (is_path or address.rpartition(":")[2].isdecimal()):
        typer.echo(
            "isthmus: --server wants the gRPC address HOST:PORT, without a scheme"
            " (not the address of the OpenAI API)",
            err=True,
        )
        raise typer.Exit(exits.USAGE)


def credentials(api_key: str) -> tuple[tuple[str, str], ...]:
    """Metadata that carries the key."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def explain_rpc_error(error: grpc.RpcError, timeout_s: float, waited_s: float) -> str:
    """Say why a call failed and what to do about it.

    Args:
        error: as the call raised it.
        timeout_s: the deadline the call was given.
        waited_s: how long the call has taken; a server's own limit may be shorter.
    """
    if not isinstance(error, grpc.Call):
        return f"UNKNOWN: {error}"
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and waited_s >= timeout_s - _DEADLINE_SLACK_S:
        return f"no full answer within {timeout_s:g} s"
    details = error.details() or "no details"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        details += f" (set {KEY_VARIABLE})"
    elif code is grpc.StatusCode.PERMISSION_DENIED:
        details += " (`isthmus key new --scope SCOPE` makes a key that has it)"
    # Details of our own servers begin with a code of the error table, which says more.
    return details if _has_own_code(error, details) else f"{code.name}: {details}"


def _has_own_code(error: grpc.Call, details: str) -> bool:
    trailers = error.trailing_metadata() or ()
    return any(
        key == _TRAILER_CODE and isinstance(value, str) and details.startswith(f"{value}: ")
        for key, value in trailers
    )


def message_fields(message: Message) -> dict[str, object]:
    """Return a message for JSON: names as in the protos, and zeros written out."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
