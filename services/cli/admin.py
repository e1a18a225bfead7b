"""`isthmus admin`: what an operator does to a running cluster, through its routers."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from services.cli import exits
from services.cli.router_options import ApiKey, CaFile, Servers, Tls

if TYPE_CHECKING:
    from services.cli.routers import Reply, Routers, Rpc
    from services.pb import admin_pb2

DIAGNOSTICS_TIMEOUT_S = 30.0

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")

app = typer.Typer(no_args_is_help=True)

WorkerId = Annotated[str, typer.Argument(help="Name of the worker, as in `isthmus status`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def options(
    context: typer.Context,
    server: Servers = None,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca_file: CaFile = None,
) -> None:
    """Run a cluster: requests, drains, roles, caches, logs, diagnostics (scope admin).

    These flags stand before the command's name: isthmus admin --server HOST:PORT requests
    """
    from services.cli.routers import Routers

    context.obj = Routers.of(server, api_key, tls, ca_file)


@app.command("requests")
def requests(context: typer.Context, as_json: AsJson = False) -> int:
    """List the requests that run now, of all routers; no prompts, no answers."""
    from services.cli.client import message_fields
    from services.pb import admin_pb2

    ask = admin_pb2.ListRequestsRequest()
    replies = _ask_all(context, lambda stub: stub.ListRequests, ask)
    answers = [reply.answer for reply in replies if reply.answer is not None]
    if as_json:
        found = [message_fields(answer) for answer in answers]
        typer.echo(json.dumps(found, indent=2))
    elif answers:
        _print_requests(answers)
    return _status_of(replies)


@app.command("kill")
def kill(
    context: typer.Context,
    request_id: Annotated[str, typer.Argument(help="As listed by `isthmus admin requests`.")],
) -> int:
    """End a request: its client gets the error `killed`."""
    from services.pb import admin_pb2

    ask = admin_pb2.KillRequestRequest(request_id=request_id)
    done = _ask_one(context, lambda stub: stub.KillRequest, ask)
    if done is None:
        return exits.FAILED
    typer.echo(f"{request_id} is killed")
    return exits.OK


@app.command("drain")
def drain(
    context: typer.Context,
    worker_id: WorkerId,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, max=600, help="Seconds to wait until it is empty.")
    ] = 0.0,
) -> int:
    """Give a worker no new work; answers under way move to others. Exit 1 if it is not empty."""
    from services.pb import admin_pb2

    ask = admin_pb2.DrainWorkerRequest(worker_id=worker_id, wait_ms=round(wait_s * 1000))
    done = _ask_one(context, lambda stub: stub.DrainWorker, ask, wait_s)
    if done is None:
        return exits.FAILED
    typer.echo(f"{worker_id} drains, {done.requests_open} work items open")
    return exits.FAILED if wait_s and done.requests_open else exits.OK


@app.command("undrain")
def undrain(context: typer.Context, worker_id: WorkerId) -> int:
    """Give a drained worker work again."""
    from services.pb import admin_pb2

    ask = admin_pb2.UndrainWorkerRequest(worker_id=worker_id)
    done = _ask_one(context, lambda stub: stub.UndrainWorker, ask)
    if done is None:
        return exits.FAILED
    typer.echo(f"{worker_id} takes work again")
    return exits.OK


@app.command("role")
def role(
    context: typer.Context,
    worker_id: WorkerId,
    pool: Annotated[str, typer.Argument(help="prefill or decode.")],
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, max=600, help="Seconds it may take to drain.")
    ] = 30.0,
) -> int:
    """Move a worker to another pool: it drains, changes and takes work again; nothing restarts."""
    from services.pb import admin_pb2

    ask = admin_pb2.SetWorkerRoleRequest(
        worker_id=worker_id, role=pool, drain_ms=max(1, round(wait_s * 1000))
    )
    done = _ask_one(context, lambda stub: stub.SetWorkerRole, ask, wait_s)
    if done is None:
        return exits.FAILED
    typer.echo(f"{worker_id} is a {pool} worker now")
    return exits.OK


@app.command("flush")
def flush(context: typer.Context, worker_id: WorkerId) -> int:
    """Have a worker forget its prefix cache, except what requests use."""
    from services.pb import admin_pb2

    ask = admin_pb2.FlushCacheRequest(worker_id=worker_id)
    done = _ask_one(context, lambda stub: stub.FlushCache, ask)
    if done is None:
        return exits.FAILED
    typer.echo(f"{done.blocks_dropped} blocks dropped, {done.blocks_kept} kept for requests")
    return exits.OK


@app.command("log-level")
def log_level(
    context: typer.Context,
    level: Annotated[str, typer.Argument(help="debug, info, warning or error.")],
    worker_id: Annotated[
        str, typer.Option("--worker", help="This worker instead of the routers.")
    ] = "",
) -> int:
    """Write more or less to a log, until the process ends or the next such command."""
    from services.pb import admin_pb2

    ask = admin_pb2.SetLogLevelRequest(level=level, worker_id=worker_id)

    if worker_id:
        answer = _ask_one(context, lambda stub: stub.SetLogLevel, ask)
        if answer is None:
            return exits.FAILED
        typer.echo(f"{worker_id}: {level}, was {answer.previous}")
        return exits.OK
    replies = _ask_all(context, lambda stub: stub.SetLogLevel, ask)
    for reply in replies:
        if reply.answer is not None:
            typer.echo(f"{reply.server}: {level}, was {reply.answer.previous}")
    return _status_of(replies)


@app.command("bundle")
def bundle(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Archive to write, .tar.gz; mode 0600.")],
) -> int:
    """Write a diagnostics bundle: states, settings, decisions, metrics, stacks; no secrets."""
    from services.pb import admin_pb2

    ask = admin_pb2.DiagnosticsRequest()
    replies = _ask_all(context, lambda stub: stub.Diagnostics, ask, DIAGNOSTICS_TIMEOUT_S)
    files = {
        f"{reply.server.replace('/', '_')}/{found.name}": found.content
        for reply in replies
        if reply.answer is not None
        for found in reply.answer.files
    }
    status = _status_of(replies)
    if not files:
        return exits.FAILED
    try:
        write_bundle(file, files)
    except OSError as error:
        typer.echo(f"isthmus: {file} cannot be written ({error.strerror})", err=True)
        return exits.FAILED
    typer.echo(f"{len(files)} files in {file}")
    return status


traffic = typer.Typer(help="Aliases, canaries and mirrors of models.", no_args_is_help=True)
app.add_typer(traffic, name="traffic")


@traffic.command("show")
def show_traffic(context: typer.Context) -> int:
    """Print the rules in force in every router and the names requests may ask for."""
    from services.pb import admin_pb2

    ask = admin_pb2.GetTrafficRequest()
    replies = _ask_all(context, lambda stub: stub.GetTraffic, ask)
    for reply in replies:
        if reply.answer is None:
            continue
        typer.echo(f"{reply.server}: rules of {reply.answer.source}")
        typer.echo(json.dumps(json.loads(reply.answer.table), indent=2))
        for name in reply.answer.names:
            typer.echo(f"{name.name}: weights {name.weights_digest[:16]}")
        _warn_of_unserved(reply)
    return _status_of(replies)


@traffic.command("set")
def set_traffic(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help="Rules, YAML or JSON; none = those of the routers' file.")
    ] = None,
) -> int:
    """Put rules in force in every router given, until its own file changes or it restarts."""
    from services.pb import admin_pb2

    text = ""
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            typer.echo(f"isthmus: {file} cannot be read ({reason})", err=True)
            return exits.USAGE
    ask = admin_pb2.SetTrafficRequest(table=text)
    replies = _ask_all(context, lambda stub: stub.SetTraffic, ask)
    for reply in replies:
        if reply.answer is not None:
            typer.echo(f"{reply.server}: the rules of {file or 'its file'} are in force")
    status = _status_of(replies)
    if status == exits.OK:
        look = admin_pb2.GetTrafficRequest()
        for found in _ask_all(context, lambda stub: stub.GetTraffic, look):
            _warn_of_unserved(found)
    return status


def _warn_of_unserved(reply: Reply[admin_pb2.GetTrafficResponse]) -> None:
    """Say which rules come to nothing: a misspelt model looks like one that is not there yet."""
    if reply.answer is None:
        return
    served = {found.name: found.weights_digest for found in reply.answer.names}
    for name in unserved(json.loads(reply.answer.table), served):
        typer.echo(
            f"isthmus: {reply.server}: the rules name {name!r}, which it does not serve", err=True
        )


# Any: a table as JSON.
def unserved(table: dict[str, Any], served: Mapping[str, str]) -> list[str]:
    """Give the models rules name and nobody serves; `served` is name -> weights digest."""
    from services.router.traffic import is_named

    named = [target["model"] for targets in table["aliases"].values() for target in targets]
    named += [name for source, rule in table["mirrors"].items() for name in (source, rule["to"])]
    return [
        name
        for name in dict.fromkeys(named)
        if not any(is_named(name, model, digest) for model, digest in served.items())
    ]


def write_bundle(path: Path, files: dict[str, bytes]) -> None:
    """Write a tar archive only its owner can read; an existing file is not overwritten."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(f"isthmus-diagnostics/{_inside(name)}")
            entry.size, entry.mode = len(content), 0o600
            archive.addfile(entry, io.BytesIO(content))


def _inside(name: str) -> str:
    """Keep a name that came over the network below the archive's own folder."""
    return "/".join(part for part in name.split("/") if part not in ("", ".", ".."))


def _routers(context: typer.Context) -> Routers:
    from services.cli.routers import Routers

    assert isinstance(context.obj, Routers)
    return context.obj


def _ask_all(
    context: typer.Context, rpc: Rpc[Ask, Answer], ask: Ask, timeout_s: float = 0.0
) -> list[Reply[Answer]]:
    """Ask every router; `timeout_s` 0 = as long as usual."""
    from services.cli.routers import TIMEOUT_S, calling

    return _routers(context).ask_all(calling(rpc, ask), timeout_s or TIMEOUT_S)


def _ask_one(
    context: typer.Context, rpc: Rpc[Ask, Answer], ask: Ask, extra_s: float = 0.0
) -> Answer | None:
    """Ask the routers for the one that knows; say why there is no answer."""
    from services.cli.routers import TIMEOUT_S, calling, complain

    reply = _routers(context).ask_until(calling(rpc, ask), 3 * TIMEOUT_S + extra_s)
    if reply.answer is None and reply.is_not_found:
        complain(reply)
    return reply.answer


def _status_of(replies: Sequence[Reply[Answer]]) -> int:
    from services.cli.routers import complain

    for reply in replies:
        if reply.answer is None:
            complain(reply)
    return exits.OK if all(reply.answer is not None for reply in replies) else exits.FAILED


def _print_requests(answers: Sequence[admin_pb2.ListRequestsResponse]) -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("request", no_wrap=True)
    for column in ("tenant", "model", "stage", "mode"):
        table.add_column(column)
    for column in ("age s", "prompt", "out"):
        table.add_column(column, justify="right")
    table.add_column("workers")
    for answer in answers:
        for request in sorted(answer.requests, key=lambda found: -found.age_ms):
            table.add_row(
                request.request_id,
                request.tenant,
                request.model,
                request.stage,
                request.mode,
                f"{request.age_ms / 1000:.1f}",
                str(request.prompt_tokens),
                f"{request.completion_tokens}/{request.max_tokens}",
                " ".join(request.workers),
            )
    # A pipe has no width: lines for scripts are not folded.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(table, markup=False)
