"""`isthmus status`: what the router sees and what the workers say of themselves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import exits
from services.cli.router_options import DEFAULT_SERVER, ApiKey, Server

if TYPE_CHECKING:
    from services.pb import admin_pb2, worker_pb2

_RPC_TIMEOUT_S = 3.0


def status(
    server: Server = DEFAULT_SERVER,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show the cluster: workers, their state, load, KV blocks and the planes in use."""
    import grpc

    from services.cli.client import connect, credentials, explain_rpc_error
    from services.common.clock import SystemClock
    from services.pb import admin_pb2, admin_pb2_grpc

    clock = SystemClock()
    with connect(server) as channel:
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
    own = {view.worker_id: _ask_worker(view.address) for view in cluster.workers}
    if as_json:
        typer.echo(json.dumps(to_json(cluster, own), indent=2))
    else:
        _print_table(cluster, own)
    return exits.OK


def _ask_worker(address: str) -> worker_pb2.StatusResponse | None:
    """A worker's own counters; None when it does not answer in time."""
    import grpc

    from services.pb import worker_pb2, worker_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)
            return stub.Status(worker_pb2.StatusRequest(), timeout=_RPC_TIMEOUT_S)
        except grpc.RpcError:
            return None


# Any: the result is JSON.
def to_json(
    cluster: admin_pb2.ClusterStatusResponse, own: dict[str, worker_pb2.StatusResponse | None]
) -> dict[str, Any]:
    """One object for scripts."""
    from google.protobuf.json_format import MessageToDict

    workers = []
    for view in cluster.workers:
        entry = MessageToDict(
            view, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        answer = own.get(view.worker_id)
        entry["worker"] = (
            None
            if answer is None
            else MessageToDict(
                answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
        )
        workers.append(entry)
    return {
        "router_id": cluster.router_id,
        "model": cluster.model,
        "requests_open": cluster.requests_open,
        "degraded": cluster.degraded,
        "degraded_reason": cluster.degraded_reason,
        "workers": workers,
    }


def _print_table(
    cluster: admin_pb2.ClusterStatusResponse, own: dict[str, worker_pb2.StatusResponse | None]
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    line = f"{cluster.model} · {cluster.router_id} · {cluster.requests_open} requests open"
    console.print(line, highlight=False)
    if cluster.degraded:
        console.print(f"degraded: {cluster.degraded_reason}", style="yellow", highlight=False)
    table = Table()
    for column in ("worker", "role", "state", "address", "requests", "in use", "cached", "planes"):
        table.add_column(column, overflow="fold")
    for view in cluster.workers:
        table.add_row(*_cells(view, own.get(view.worker_id)))
    console.print(table)
    for view in cluster.workers:
        answer = own.get(view.worker_id)
        about = [view.reason, f"kernels: {answer.kernel_path}" if answer is not None else ""]
        line = " · ".join(part for part in about if part)
        if line:
            console.print(f"{view.worker_id}: {line}", highlight=False, markup=False)


def _cells(view: admin_pb2.WorkerView, own: worker_pb2.StatusResponse | None) -> list[str]:
    head = [view.worker_id, view.role, view.state, view.address]
    if own is None:
        return [*head, "", "no answer", "", ""]
    planes = sorted(f"{peer}: {plane}" for peer, plane in own.planes.items())
    return [
        *head,
        str(own.requests_open),
        f"{own.blocks_in_use}/{own.blocks_total}",
        str(own.blocks_cached),
        "\n".join(planes),
    ]
