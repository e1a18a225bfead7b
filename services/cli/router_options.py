"""Flags of the commands that talk to a running router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_SERVER = "127.0.0.1:50051"
KEY_VARIABLE = "ISTHMUS_API_KEY"

Server = Annotated[
    str,
    typer.Option(
        envvar="ISTHMUS_SERVER", help="Router's gRPC address, HOST:PORT without a scheme."
    ),
]
Servers = Annotated[
    list[str] | None,
    typer.Option(
        "--server",
        envvar="ISTHMUS_SERVER",
        help="Router's gRPC address, HOST:PORT; may be repeated (in the variable: with spaces) "
        f"to ask several. Default: {DEFAULT_SERVER}.",
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        envvar="ISTHMUS_CA_FILE",
        help="Authority of the router's certificate, PEM; turns TLS on.",
    ),
]
Tls = Annotated[
    bool,
    typer.Option("--tls", envvar="ISTHMUS_TLS", help="Speak TLS; well-known authorities sign."),
]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar=KEY_VARIABLE,
        help="API key, if the router has a keys file. Prefer the variable: flags are visible "
        "to other users.",
    ),
]
