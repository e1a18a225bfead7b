"""`isthmus key`: API keys of the front doors."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from services.cli import exits, settings
from services.cli.router_options import KEY_VARIABLE

app = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True)

KeysFile = Annotated[
    Path | None, typer.Option("--file", help="Keys file; default: auth.keys_file.")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration file.")]


@app.command("new")
def new(
    tenant: Annotated[str, typer.Option(help="Who the key belongs to.")] = "default",
    label: Annotated[str, typer.Option(help="What it is for.")] = "",
    file: KeysFile = None,
    config: ConfigFile = None,
) -> int:
    """Make a key and print it; the file keeps its digest only, so it is shown this once."""
    from services.common.clock import SystemClock
    from services.gateway.keys import create_key

    key, record = create_key(_path(file, config), tenant, label, SystemClock().unix_ms())
    typer.echo(key)
    typer.echo(f"id {record.key_id}, tenant {record.tenant}", err=True)
    typer.echo(
        f"isthmus chat and status read it from {KEY_VARIABLE}; other clients send "
        "authorization: Bearer <key>",
        err=True,
    )
    return exits.OK


@app.command("list")
def list_all(file: KeysFile = None, config: ConfigFile = None) -> int:
    """List the keys of the file by id."""
    from services.gateway.keys import list_keys

    for record in list_keys(_path(file, config)):
        created = datetime.fromtimestamp(record.created_unix_ms / 1e3, UTC)
        typer.echo(f"{record.key_id}  {record.tenant:<20} {created:%Y-%m-%d %H:%M}  {record.label}")
    return exits.OK


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(help="Id shown by `isthmus key list`.")],
    file: KeysFile = None,
    config: ConfigFile = None,
) -> int:
    """Take a key out of the file; routers notice within a second."""
    from services.gateway.keys import revoke_key

    if revoke_key(_path(file, config), key_id):
        return exits.OK
    typer.echo(f"isthmus: no key with id {key_id}", err=True)
    return exits.FAILED


def _path(file: Path | None, config: Path | None) -> Path:
    from services.common.errors import ConfigError

    if file is not None:
        return file
    configured = settings.load(config, {}).auth.keys_file
    if not configured:
        raise ConfigError("no keys file: give --file or set auth.keys_file")
    return Path(configured)
