"""`isthmus down`: end a cluster of this machine, or actors that a lost `isthmus up` left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import exits

if TYPE_CHECKING:
    from services.runtime.ray_cluster import RayCluster

_POLL_S = 0.1


def down(
    pid: Annotated[
        int | None, typer.Option(min=1, help="Process of `isthmus up`, where several run.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for running requests, and until all must be gone.")
    ] = 60.0,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Ray cluster that has actors of an `isthmus up` that is gone."),
    ] = None,
    ray_namespace: Annotated[
        str | None, typer.Option(help="Their namespace, as its status file says.")
    ] = None,
) -> int:
    """End what an `isthmus up` started, and nothing else."""
    if (ray_address is None) != (ray_namespace is None):
        raise typer.BadParameter("--ray-address and --ray-namespace belong together")
    if ray_address is not None and ray_namespace is not None:
        from services.runtime.ray_cluster import RayCluster

        return end_actors(RayCluster.connect(ray_address, ray_namespace, os.environ), timeout)
    return _end_up(pid, timeout)


def _end_up(pid: int | None, timeout_s: float) -> int:
    from services.runtime.runtime_dir import running_facts

    running = [int(facts["pid"]) for facts in map(json.loads, running_facts(os.environ))]
    wanted = running if pid is None else [one for one in running if one == pid]
    if len(wanted) != 1:
        there = ", ".join(map(str, running)) or "none"
        typer.echo(f"isthmus: which one? Running `isthmus up`: {there} (--pid)", err=True)
        return exits.FAILED
    return _end_process(wanted[0], timeout_s)


def _end_process(pid: int, timeout_s: float) -> int:
    try:
        handle = os.pidfd_open(pid)  # means this very process, whoever gets its number later
    except ProcessLookupError:
        return exits.OK
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        ended, _, _ = select.select([handle], [], [], timeout_s)
    finally:
        os.close(handle)
    if not ended:
        typer.echo(f"isthmus: {pid} still runs after {timeout_s:g} s", err=True)
        return exits.FAILED
    typer.echo(f"{pid} has ended, and all that it started")
    return exits.OK


def end_actors(cluster: RayCluster, timeout_s: float) -> int:
    """Drain the workers of a namespace and end them; those that do not end are killed."""
    from services.common.clock import SystemClock

    clock = SystemClock()
    try:
        workers = cluster.adopt()
        for worker in workers:
            worker.stop()
        end = clock.now() + timeout_s
        for worker in workers:
            while worker.poll() is None and clock.now() < end:
                time.sleep(_POLL_S)
            worker.kill()
        typer.echo(f"{len(workers)} workers of {cluster.namespace} have ended")
    finally:
        cluster.close()
    return exits.OK
