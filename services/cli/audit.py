"""`isthmus audit` and `isthmus usage`: what routers have written down."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from services.cli import exits, settings

app = typer.Typer(help="Check the audit log.", no_args_is_help=True)
usage = typer.Typer(help="Read what tenants have used.", no_args_is_help=True)


@app.command("verify")
def verify(
    files: Annotated[list[Path], typer.Argument(help="Files of one router, oldest first.")],
    head: Annotated[
        str, typer.Option(help="Hash the last line must have; without it a lost end goes unseen.")
    ] = "",
) -> int:
    """Check that no line was changed, moved or taken out; exit 1 and the place where one was."""
    from services.telemetry.audit import AuditHead, verify_lines

    # A first file may be gone for its age: the chain is then checked from the first line there is.
    chain: AuditHead | None = None
    num_lines = 0
    for path in files:
        try:
            with path.open("rb") as file:
                found = verify_lines(file, chain)
        except OSError as error:
            typer.echo(f"isthmus: {path} cannot be read ({error.strerror})", err=True)
            return exits.USAGE
        if found.fault:
            typer.echo(f"{path}: {found.fault}", err=True)
            return exits.FAILED
        num_lines += found.num_lines
        chain = found.head if found.num_lines else chain
    last = chain or AuditHead()
    if head and last.hash != head:
        typer.echo(f"the last line is {last.hash}, not {head}", err=True)
        return exits.FAILED
    typer.echo(f"{num_lines} lines, the last is number {last.seq}, head {last.hash}")
    return exits.OK


class Format(StrEnum):
    """How counters are written."""

    json = "json"
    csv = "csv"


@usage.command("export")
def export(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where routers keep them; accounting.usage_dir.")
    ] = None,
    output: Annotated[Format, typer.Option("--format", help="json or csv.")] = Format.json,
    config: Annotated[Path | None, typer.Option("--config", help="Configuration file.")] = None,
) -> int:
    """Print requests and tokens per tenant, of all routers that write there together."""
    from services.common.errors import ConfigError
    from services.gateway.usage import read_all, to_csv, to_json

    where = str(directory) if directory else settings.load(config, {}).accounting.usage_dir
    if not where:
        raise ConfigError("no usage: give --dir or set accounting.usage_dir")
    if not Path(where).is_dir():
        raise ConfigError(f"{where} is no directory; give the routers' accounting.usage_dir")
    total = read_all(Path(where))
    typer.echo(to_csv(total) if output is Format.csv else to_json(total), nl=output is Format.json)
    return exits.OK
