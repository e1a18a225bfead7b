"""`isthmus operator`: the process that keeps IsthmusCluster resources as they are written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import settings
from services.cli.serve import (
    ConfigFile,
    HealthPort,
    KubernetesUrl,
    LogLevel,
    SideHost,
    SideMetricsPort,
    set_up_logs,
)

if TYPE_CHECKING:
    from services.autoscaler.kube_api import KubeApi


def operator(
    config: ConfigFile = None,
    kubernetes: KubernetesUrl = "",
    namespace: Annotated[
        str, typer.Option(help="Where clusters and the Lease are; left out: our own pod's.")
    ] = "",
    cluster_wide: Annotated[
        bool, typer.Option("--cluster-wide", help="Watch clusters of every name space.")
    ] = False,
    host: SideHost = "127.0.0.1",
    grpc_port: HealthPort = 0,
    metrics_port: SideMetricsPort = None,
    log_level: LogLevel = None,
) -> int:
    """Keep clusters on Kubernetes as written; of several such processes one acts at a time."""
    from services.common.errors import ConfigError

    loaded = settings.load(config, {"telemetry.log_level": log_level})
    set_up_logs(loaded, {})
    try:
        import kopf

        from services.autoscaler.kube_api import KubeApi
        from services.operator.main import Options, run_operator
    except ModuleNotFoundError as error:
        raise ConfigError(f"the operator needs isthmus[kubernetes] (no {error.name})") from None

    if kubernetes and not namespace:
        raise typer.BadParameter("--kubernetes needs --namespace")

    def make_api(space: str) -> KubeApi:
        if kubernetes:
            return KubeApi(kubernetes, space or namespace)
        return KubeApi.in_cluster(namespace=space or namespace)

    return run_operator(
        Options(
            make_api=make_api,
            login=(lambda: kopf.ConnectionInfo(server=kubernetes)) if kubernetes else None,
            is_cluster_wide=cluster_wide,
            host=host,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
        )
    )
