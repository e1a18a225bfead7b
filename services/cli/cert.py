"""`isthmus cert`: certificates for development."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli import exits

app = typer.Typer(help="Make certificates for development.", no_args_is_help=True)


@app.command("dev")
def dev(
    directory: Annotated[Path, typer.Option("--dir", help="Where to put them, mode 0600.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Further name or address clients reach a router by; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=825, help="Days they are valid.")] = 30,
) -> int:
    """Make an authority and certificates of the front doors, of routers and of workers.

    Run again it keeps the authority and makes the others anew: a rotation.
    """
    from datetime import UTC, datetime

    from services.common.clock import SystemClock
    from services.common.config import TlsSettings
    from services.runtime.dev_certs import Leaf, make_dev_certs

    names = TlsSettings()
    leaves = (
        Leaf("doors", ("localhost", "127.0.0.1", "::1", *(host or ()))),
        Leaf("router", names.router_names),
        Leaf("worker", (names.worker_name,)),
        Leaf("cluster", (*names.router_names, names.worker_name)),  # `up` has one configuration
    )
    now = datetime.fromtimestamp(SystemClock().unix_ms() / 1000, UTC)
    make_dev_certs(directory, leaves, days, now)
    typer.echo(f"""\
# for `isthmus up`; on machines of their own routers show router.pem and workers worker.pem
tls:
  cert_file: {directory}/doors.pem
  key_file: {directory}/doors.key
  cluster_cert_file: {directory}/cluster.pem
  cluster_key_file: {directory}/cluster.key
  cluster_ca_file: {directory}/ca.pem""")
    return exits.OK
