"""`isthmus status`: what the router sees and what the workers say of themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import exits, settings
from services.cli.router_options import DEFAULT_SERVER, ApiKey, CaFile, Server, Tls

if TYPE_CHECKING:
    import grpc
    from rich.console import Console
    from rich.table import Table

    from services.cli.dial import Dial
    from services.pb import admin_pb2, worker_pb2

    Answer = worker_pb2.StatusResponse | str  # its counters, or FROZEN or UNREACHABLE

FROZEN = "frozen: does not answer"
UNREACHABLE = "unreachable; being restarted?"
_RPC_TIMEOUT_S = 3.0
_WORKERS_TIMEOUT_S = 2.0  # for all workers together: they are asked at once
_PIPE_COLUMNS = 160


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Configuration file; its tls.cluster_* are for the workers."),
]


def status(
    server: Server = DEFAULT_SERVER,
    api_key: ApiKey = "",
    tls: Tls = False,
    ca_file: CaFile = None,
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show the cluster: workers, their load and the planes in use; exit 1 without workers."""
    import grpc

    from services.cli.client import connect, credentials, explain_rpc_error
    from services.cli.dial import dial_worker
    from services.common.clock import SystemClock
    from services.pb import admin_pb2, admin_pb2_grpc

    clock = SystemClock()
    own_tls = settings.load(config, {}).tls
    dial = dial_worker(own_tls)
    with connect(server, tls, ca_file) as channel:
        started = clock.now()
        try:
            cluster = admin_pb2_grpc.AdminStub(channel).ClusterStatus(
                admin_pb2.ClusterStatusRequest(),
                timeout=_RPC_TIMEOUT_S,
                metadata=credentials(api_key),
            )
        except grpc.RpcError as error:
            why = explain_rpc_error(error, _RPC_TIMEOUT_S, clock.now() - started)
            typer.echo(f"isthmus: {why}", err=True)
            return exits.FAILED
    own = ask_workers({view.worker_id: view.address for view in cluster.workers}, dial=dial)
    if as_json:
        typer.echo(json.dumps(to_json(cluster, own), indent=2))
    else:
        _print_cluster(cluster, own)
    speaks_tls = tls or ca_file is not None
    if hint := tls_hint(own, speaks_tls, has_certificate=bool(own_tls.cluster_cert_file)):
        typer.echo(hint, err=True)
    return exits.OK if cluster.workers else exits.FAILED


def tls_hint(own: Mapping[str, Answer], speaks_tls: bool, has_certificate: bool) -> str:
    """Say what else may keep workers from answering us: to them we look like anybody."""
    if not speaks_tls or has_certificate or all(answer != UNREACHABLE for answer in own.values()):
        return ""
    return "isthmus: to ask workers that speak TLS, give --config with tls.cluster_*"


def ask_workers(
    addresses: dict[str, str],
    timeout_s: float = _WORKERS_TIMEOUT_S,
    dial: Dial | None = None,
) -> dict[str, Answer]:
    """Ask all workers at once for their own counters; why there are none where there are none."""
    from contextlib import ExitStack

    from services.cli.dial import plaintext
    from services.pb import worker_pb2, worker_pb2_grpc

    dial = dial or plaintext
    with ExitStack() as stack:
        calls = {}
        for worker_id, address in addresses.items():
            channel = stack.enter_context(dial(address, ()))
            stub = worker_pb2_grpc.WorkerStub(channel)
            calls[worker_id] = stub.Status.future(worker_pb2.StatusRequest(), timeout=timeout_s)
        return {worker_id: _answer_of(call) for worker_id, call in calls.items()}


def _answer_of(call: grpc.Future[worker_pb2.StatusResponse]) -> Answer:
    """Wait for one of the calls; their deadline is the same moment."""
    import grpc

    try:
        return call.result()
    except grpc.RpcError as error:
        # A process that stands still has its port open, one that is gone has not.
        code = error.code() if isinstance(error, grpc.Call) else None
        is_silent = code is grpc.StatusCode.DEADLINE_EXCEEDED
        return FROZEN if is_silent else UNREACHABLE


# Any: the result is JSON.
def to_json(cluster: admin_pb2.ClusterStatusResponse, own: dict[str, Answer]) -> dict[str, Any]:
    """One object for scripts."""
    from services.cli.client import message_fields

    workers = []
    for view in cluster.workers:
        entry = message_fields(view)
        answer = own[view.worker_id]
        entry["worker_error"] = answer if isinstance(answer, str) else None
        entry["worker"] = None if isinstance(answer, str) else message_fields(answer)
        workers.append(entry)
    return {
        "router_id": cluster.router_id,
        "model": cluster.model,
        "requests_open": cluster.requests_open,
        "degraded": cluster.degraded,
        "degraded_reason": cluster.degraded_reason,
        "workers": workers,
        "autoscaler": (
            message_fields(cluster.autoscaler) if cluster.HasField("autoscaler") else None
        ),
    }


def _print_cluster(cluster: admin_pb2.ClusterStatusResponse, own: dict[str, Answer]) -> None:
    import sys

    from rich.console import Console

    # A pipe has no width: lines for scripts are not folded.
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    line = f"{cluster.model} · {cluster.router_id} · {cluster.requests_open} requests open"
    console.print(line, highlight=False, markup=False)
    if cluster.degraded:
        line = f"degraded: {cluster.degraded_reason}"
        console.print(line, style="yellow", highlight=False, markup=False)
    if cluster.HasField("autoscaler"):
        _print_autoscaler(console, cluster)
    if not cluster.workers:
        is_zero = cluster.HasField("autoscaler") and not any(
            pool.desired for pool in cluster.autoscaler.pools
        )
        why = "scaled to zero: the next request starts some" if is_zero else "still loading?"
        console.print(f"no workers yet ({why})", highlight=False)
        return
    console.print(worker_table(cluster, own))
    for view in cluster.workers:
        line = about_worker(view, own[view.worker_id])
        console.print(line, highlight=False, markup=False)


def _print_autoscaler(console: Console, cluster: admin_pb2.ClusterStatusResponse) -> None:
    from services.cli.top import pool_rows, pool_table

    told = cluster.autoscaler
    holds = f" · {', '.join(told.conditions)}" if told.conditions else ""
    line = f"autoscaler: policy {told.policy} · mode {told.mode}{holds}"
    console.print(line, highlight=False, markup=False)
    console.print(pool_table(pool_rows([cluster])))


def worker_table(cluster: admin_pb2.ClusterStatusResponse, own: dict[str, Answer]) -> Table:
    """One row a worker; it fits a terminal of 80 columns."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("worker", no_wrap=True)
    table.add_column("role")
    table.add_column("state")
    table.add_column("address", no_wrap=True)
    for column in ("reqs", "KV blocks", "cached"):
        table.add_column(column, justify="right")
    for view in cluster.workers:
        answer = own[view.worker_id]
        figures = ("", "", "")
        if not isinstance(answer, str):
            used = f"{answer.blocks_in_use}/{answer.blocks_total}"
            figures = (str(answer.requests_open), used, str(answer.blocks_cached))
        table.add_row(view.worker_id, view.role, view.state, view.address, *figures)
    return table


def about_worker(view: admin_pb2.WorkerView, own: Answer) -> str:
    """What has no room in a table: why it is not used, its kernels, the planes to its peers."""
    parts = [view.reason] if view.reason else []
    if isinstance(own, str):
        parts.append(own)
    else:
        parts.append(f"kernels: {own.kernel_path}")
        planes = ", ".join(f"{peer} {plane}" for peer, plane in sorted(own.planes.items()))
        parts += [f"planes: {planes}"] if planes else []
    return f"{view.worker_id}: {' · '.join(parts)}"
