"""`isthmus key`: API keys of the front doors, and the keys workers know each other by."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from services.cli import exits, settings
from services.cli.router_options import KEY_VARIABLE

if TYPE_CHECKING:
    from services.common.access import Scope

app = typer.Typer(help="Make, list and revoke API keys; rotate keys.", no_args_is_help=True)
cluster = typer.Typer(
    help="CURVE keys of the KV connections: make a ring, then add, promote, retire.",
    no_args_is_help=True,
)
app.add_typer(cluster, name="cluster")

MAX_DAYS = 36_500

KeysFile = Annotated[
    Path | None, typer.Option("--file", help="Keys file; default: auth.keys_file.")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration file.")]


@app.command("new")
def new(
    tenant: Annotated[str, typer.Option(help="Who the key belongs to.")] = "default",
    label: Annotated[str, typer.Option(help="What it is for.")] = "",
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="What it may do, may be repeated: inference (the default), monitor (metrics, "
            "`isthmus status`), admin."
        ),
    ] = None,
    expires_days: Annotated[
        float | None, typer.Option(help="Days until it is of no use, above 0; default: never.")
    ] = None,
    file: KeysFile = None,
    config: ConfigFile = None,
) -> int:
    """Make a key and print it; the file keeps its digest only, so it is shown this once."""
    from services.common.clock import SystemClock
    from services.gateway.keys import create_key
    from services.gateway.namespaces import make_secret

    if expires_days is not None and not 0 < expires_days <= MAX_DAYS:
        raise typer.BadParameter(f"--expires-days must be above 0, up to {MAX_DAYS}")
    path, now = _path(file, config), SystemClock().unix_ms()
    expires = None if expires_days is None else now + round(expires_days * 86_400_000)
    # Names are checked with the rest of the record.
    scopes = cast("tuple[Scope, ...]", tuple(scope or ("inference",)))
    key, record = create_key(path, tenant, label, now, scopes, expires)
    typer.echo(key)
    typer.echo(
        f"id {record.key_id}, tenant {record.tenant}, may {', '.join(record.scopes)}", err=True
    )
    secret = _secret_path(file, path, config)
    if make_secret(secret):
        typer.echo(f"made {secret}: every router needs the same one", err=True)
    typer.echo(
        f"commands of isthmus read it from {KEY_VARIABLE}; other clients send "
        "authorization: Bearer <key>",
        err=True,
    )
    return exits.OK


@app.command("list")
def list_all(file: KeysFile = None, config: ConfigFile = None) -> int:
    """List the keys of the file by id."""
    from services.gateway.keys import list_keys

    for record in list_keys(_present(_path(file, config))):
        created = datetime.fromtimestamp(record.created_unix_ms / 1e3, UTC)
        typer.echo(
            f"{record.key_id}  {record.tenant:<20} {created:%Y-%m-%d %H:%M}  "
            f"{_until(record.expires_unix_ms):<16}  {','.join(record.scopes):<24} {record.label}"
        )
    return exits.OK


def _until(expires_unix_ms: int | None) -> str:
    if expires_unix_ms is None:
        return "for ever"
    return f"{datetime.fromtimestamp(expires_unix_ms / 1e3, UTC):%Y-%m-%d %H:%M}"


@app.command("tenant-secret")
def tenant_secret(
    file: Annotated[
        Path, typer.Option("--file", help="Where to make it: auth.tenant_secret_file.")
    ],
) -> int:
    """Make the secret that keeps tenants' prefix caches apart; never over a file that is there."""
    from services.common.errors import ConfigError
    from services.gateway.namespaces import make_secret

    if not make_secret(file):
        raise ConfigError(f"{file} is there: a new secret would void what all caches hold")
    return exits.OK


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(help="Id shown by `isthmus key list`.")],
    file: KeysFile = None,
    config: ConfigFile = None,
) -> int:
    """Take a key out of the file; routers notice within a second."""
    from services.gateway.keys import revoke_key

    path = _present(_path(file, config))
    if revoke_key(path, key_id):
        typer.echo(f"{key_id} is revoked", err=True)
        return exits.OK
    typer.echo(f"isthmus: {path} has no key with id {key_id}; see `isthmus key list`", err=True)
    return exits.FAILED


RingFile = Annotated[
    Path | None, typer.Option("--file", help="Key ring; default: transfer.curve_key_file.")
]


@cluster.command("new")
def cluster_new(file: RingFile = None, config: ConfigFile = None) -> int:
    """Make a ring of one new key; never over a file that is there."""
    from services.common.errors import ConfigError
    from services.transfer.key_ring import KeyRing, make_keys, write_ring

    path = _ring_path(file, config)
    if path.exists():
        raise ConfigError(f"{path} is there: `isthmus key cluster add` begins a rotation")
    write_ring(path, KeyRing((make_keys(),)))
    return _show(path)


@cluster.command("add")
def cluster_add(file: RingFile = None, config: ConfigFile = None) -> int:
    """Step 1: add a new key, which every worker then accepts; the old one stays in use."""
    return _step("added", file, config)


@cluster.command("promote")
def cluster_promote(file: RingFile = None, config: ConfigFile = None) -> int:
    """Step 2: put the other key in use, once every worker has the file of step 1."""
    return _step("promoted", file, config)


@cluster.command("retire")
def cluster_retire(file: RingFile = None, config: ConfigFile = None) -> int:
    """Step 3: drop the key that is not in use, once every worker has the file of step 2."""
    return _step("retired", file, config)


@cluster.command("list")
def cluster_list(file: RingFile = None, config: ConfigFile = None) -> int:
    """List the keys of the ring by the beginning of their public part."""
    return _show(_ring_path(file, config))


def _step(name: str, file: Path | None, config: Path | None) -> int:
    from services.transfer.key_ring import KeyRing, make_keys, read_ring, write_ring

    path = _ring_path(file, config)
    ring = read_ring(path)
    steps = {"promoted": KeyRing.promoted, "retired": KeyRing.retired}
    write_ring(path, ring.added(make_keys()) if name == "added" else steps[name](ring))
    return _show(path)


def _show(path: Path) -> int:
    from services.transfer.key_ring import key_id, read_ring

    for i, key in enumerate(read_ring(path).keys):
        typer.echo(f"{key_id(key.public)}  {'in use' if i == 0 else 'accepted'}")
    return exits.OK


def _ring_path(file: Path | None, config: Path | None) -> Path:
    from services.common.errors import ConfigError

    if file is not None:
        return file
    configured = settings.load(config, {}).transfer.curve_key_file
    if not configured:
        raise ConfigError("no key ring: give --file or set transfer.curve_key_file")
    return Path(configured)


def _secret_path(file: Path | None, keys: Path, config: Path | None) -> Path:
    from services.gateway.namespaces import secret_path

    configured = settings.load(config, {}).auth.tenant_secret_file if file is None else ""
    return secret_path(configured, str(keys))


def _path(file: Path | None, config: Path | None) -> Path:
    from services.common.errors import ConfigError

    if file is not None:
        return file
    configured = settings.load(config, {}).auth.keys_file
    if not configured:
        raise ConfigError("no keys file: give --file or set auth.keys_file")
    return Path(configured)


def _present(path: Path) -> Path:
    from services.common.errors import ConfigError

    if not path.exists():
        raise ConfigError(f"there is no {path}; `isthmus key new` makes it")
    return path
