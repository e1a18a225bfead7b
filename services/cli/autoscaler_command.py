"""`isthmus autoscaler`: the process that resizes the pools of a cluster by a policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import exits, settings
from services.cli.serve import (
    ConfigFile,
    HealthPort,
    KubernetesUrl,
    LogLevel,
    ModelName,
    SideHost,
    SideMetricsPort,
    StoreUrl,
    set_up_logs,
)

if TYPE_CHECKING:
    from services.autoscaler.deployment_driver import DeploymentDriver
    from services.autoscaler.epoch_clock import EpochClock
    from services.autoscaler.kube_api import KubeApi
    from services.autoscaler.kuberay_driver import KubeRay, KubeRayDirect
    from services.autoscaler.main import MakeDriver
    from services.autoscaler.policy import PoolAutoscalingPolicy
    from services.autoscaler.profile import Profile
    from services.autoscaler.ray_driver import LocalRay
    from services.autoscaler.worker_calls import WorkerCalls
    from services.common.config import IsthmusConfig


class DriverName(StrEnum):
    """What runs the replicas."""

    process = "process"  # `isthmus up` on this machine
    deployment = "deployment"  # Kubernetes, a Deployment for each pool
    ray = "ray"  # actors of ray.namespace at ray.address
    kuberay = "kuberay"  # the same, whose nodes are pods that Ray's own autoscaler sizes
    kuberay_direct = "kuberay-direct"  # whose pods are sized here, by the resource of the cluster


PolicyFile = Annotated[Path, typer.Option("--policy", help="PoolAutoscalingPolicy, YAML or JSON.")]


def autoscaler(
    policy: PolicyFile,
    config: ConfigFile = None,
    model: ModelName = None,
    redis: StoreUrl = None,
    driver: Annotated[
        DriverName, typer.Option(help="What runs the replicas.")
    ] = DriverName.process,
    control: Annotated[
        Path | None,
        typer.Option(help="Control socket of `isthmus up --policy` (driver process)."),
    ] = None,
    deployment: Annotated[
        list[str] | None,
        typer.Option(help="POOL=NAME, for each pool of the policy (driver deployment)."),
    ] = None,
    kubernetes: KubernetesUrl = "",
    namespace: Annotated[
        str, typer.Option(help="Of what is driven there; left out: our own pod's.")
    ] = "",
    ray_cluster: Annotated[
        str, typer.Option(help="Name of the RayCluster (driver kuberay-direct).")
    ] = "",
    group: Annotated[
        list[str] | None,
        typer.Option(help="POOL=NAME of its worker group, for each pool (driver kuberay-direct)."),
    ] = None,
    worker_port: Annotated[
        int, typer.Option(min=1, max=65_535, help="gRPC port of workers (driver deployment).")
    ] = 7000,
    prometheus: Annotated[
        str | None, typer.Option(help="Address of a Prometheus server, for metrics by name.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Write every decision and what it follows from to this file."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Decide again what is recorded in this file; exit 1 on differences."),
    ] = None,
    show: Annotated[
        bool,
        typer.Option(
            "--show", help="Print what the last tick of whoever leads came to, as JSON, and end."
        ),
    ] = False,
    host: SideHost = "127.0.0.1",
    grpc_port: HealthPort = 0,
    metrics_port: SideMetricsPort = None,
    log_level: LogLevel = None,
) -> int:
    """Resize the pools while they serve; of several such processes one acts at a time."""
    if replay is not None:
        return _replay(policy, replay)
    if show:
        return _show(config, model, redis)
    loaded = settings.load_serving(
        config,
        {"model.name": model, "store.url": redis, "telemetry.log_level": log_level},
    )
    if driver is DriverName.process:
        make_driver = _process_driver(control)
    elif driver is DriverName.ray:
        make_driver = _ray_driver(loaded)
    elif driver is DriverName.kuberay:
        make_driver = _kuberay_driver(loaded)
    elif driver is DriverName.kuberay_direct:
        api = _kube_api(kubernetes, namespace)
        make_driver = _kuberay_direct_driver(loaded, api, ray_cluster, group or [])
    else:
        make_driver = _deployment_driver(deployment or [], kubernetes, namespace, worker_port)
    set_up_logs(loaded, {"policy": str(policy)})
    from services.autoscaler.main import Options, run_autoscaler
    from services.autoscaler.prometheus import prometheus_reader

    return run_autoscaler(
        loaded,
        settings.resolve_model(loaded),
        Options(
            policy=policy,
            make_driver=make_driver,
            read_profile=lambda name: read_profile(name, policy.parent),
            external=prometheus_reader(prometheus, policy),
            record=record,
            host=host,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
        ),
    )


def read_profile(name: str, directory: Path) -> Profile:
    """Read NAME.json beside the policy, or else the model of that name that comes with isthmus."""
    from services.common.errors import ConfigError
    from services.sim.autoscaling.profile import Profile
    from services.sim.performance import read_model, shipped_model, shipped_names

    if name != Path(name).name:
        raise ConfigError(f"profileRef.name: {name!r} is no plain name")
    own = directory / f"{name}.json"
    if own.is_file():
        return Profile(read_model(own))
    if name not in shipped_names():
        raise ConfigError(
            f"profileRef.name: there is no {own}; `isthmus profile --out {own.name}` writes one"
        )
    return Profile(shipped_model(own.name))


def _process_driver(control: Path | None) -> MakeDriver:
    from services.autoscaler.process_driver import ProcessDriver, roles_of

    if control is None:
        raise typer.BadParameter("the driver process needs --control")
    return lambda policy, calls, clock: ProcessDriver(
        control, roles_of(policy.spec), calls, clock.now
    )


def _ray_driver(config: IsthmusConfig) -> Callable[..., LocalRay]:
    from services.autoscaler.process_driver import roles_of
    from services.autoscaler.ray_driver import LocalRay
    from services.cli.up_ray import check_node_address, ray_pools
    from services.common.errors import ConfigError
    from services.runtime.ray_cluster import RayCluster

    address, namespace = config.ray.address, config.ray.namespace
    if not (address and namespace):
        raise ConfigError("the driver ray needs ray.address and ray.namespace")

    def make(policy: PoolAutoscalingPolicy, _calls: WorkerCalls, clock: EpochClock) -> LocalRay:
        pools = ray_pools(config, roles_of(policy.spec))
        cluster = RayCluster.connect(address, namespace, os.environ)
        check_node_address(config, cluster.node_address)
        return LocalRay(cluster, pools, clock.now)

    return make


def _kuberay_driver(config: IsthmusConfig) -> MakeDriver:
    from services.autoscaler.process_driver import roles_of
    from services.cli.up_ray import ray_pools
    from services.common.errors import ConfigError

    try:
        from services.autoscaler.kuberay_driver import Bundle, KubeRay
    except ModuleNotFoundError:
        raise ConfigError("the driver kuberay needs isthmus[kubernetes]") from None
    make_actors = _ray_driver(config)

    def make(policy: PoolAutoscalingPolicy, calls: WorkerCalls, clock: EpochClock) -> KubeRay:
        takes = {
            name: [Bundle(each, pool.placement.labels) for each in pool.placement.bundles()]
            for name, pool in ray_pools(config, roles_of(policy.spec)).items()
        }
        return KubeRay(make_actors(policy, calls, clock), takes)

    return make


def _kuberay_direct_driver(
    config: IsthmusConfig, api: KubeApi, cluster: str, group: list[str]
) -> MakeDriver:
    from services.autoscaler.kuberay_driver import KubeRayDirect

    if not cluster:
        raise typer.BadParameter("the driver kuberay-direct needs --ray-cluster")
    names, make_actors = _by_pool(group, "--group"), _ray_driver(config)

    def make(policy: PoolAutoscalingPolicy, calls: WorkerCalls, clock: EpochClock) -> KubeRayDirect:
        _check_pools(policy, names, "--group")
        actors = make_actors(policy, calls, clock)
        return KubeRayDirect(actors, api, cluster, names, actors.host_of)

    return make


def _deployment_driver(
    deployment: list[str], kubernetes: str, namespace: str, worker_port: int
) -> MakeDriver:
    names, api = _by_pool(deployment, "--deployment"), _kube_api(kubernetes, namespace)
    from services.autoscaler.deployment_driver import DeploymentDriver

    def make(
        policy: PoolAutoscalingPolicy, calls: WorkerCalls, clock: EpochClock
    ) -> DeploymentDriver:
        _check_pools(policy, names, "--deployment")
        return DeploymentDriver(api, names, calls, clock, worker_port)

    return make


def _by_pool(given: list[str], flag: str) -> dict[str, str]:
    names = dict(each.split("=", 1) for each in given if "=" in each)
    if len(names) != len(given) or not all(names.values()):
        raise typer.BadParameter(f"{flag} is POOL=NAME, once for each pool")
    return names


def _check_pools(policy: PoolAutoscalingPolicy, names: Mapping[str, str], flag: str) -> None:
    from services.common.errors import ConfigError

    pools = {pool.name for pool in policy.spec.pools}
    if pools != names.keys():
        told = ", ".join(sorted(pools))
        raise ConfigError(f"{flag} is needed for each pool of the policy: {told}")


def _kube_api(url: str, namespace: str) -> KubeApi:
    from services.common.errors import ConfigError

    try:
        from services.autoscaler.kube_api import KubeApi
    except ModuleNotFoundError:
        raise ConfigError("drivers of Kubernetes need isthmus[kubernetes]") from None

    if not url:
        return KubeApi.in_cluster(namespace=namespace)
    if not namespace:
        raise typer.BadParameter("--kubernetes needs --namespace")
    return KubeApi(url, namespace)


def _show(config: Path | None, model: str | None, redis: str | None) -> int:
    import asyncio

    from services.autoscaler.main import told_status

    loaded = settings.load_serving(config, {"model.name": model, "store.url": redis})
    status = asyncio.run(told_status(loaded, settings.resolve_model(loaded)))
    if not status:
        typer.echo("isthmus: no autoscaler has been at work on this model", err=True)
        return exits.FAILED
    typer.echo(status)
    return exits.OK


def _replay(policy: Path, recorded: Path) -> int:
    from services.autoscaler.policy_file import load_policy
    from services.autoscaler.record import replay
    from services.common.errors import ConfigError

    num_differences = 0
    try:
        with recorded.open("rb") as lines:
            for difference in replay(load_policy(policy).spec, lines):
                num_differences += 1
                for old, new in zip(
                    difference.recorded.pools, difference.decided.pools, strict=False
                ):
                    if old != new:
                        typer.echo(
                            f"line {difference.line}: {new.pool} {old.desired} -> {new.desired}: "
                            f"{new.reason}"
                        )
    except OSError as error:
        raise ConfigError(f"--replay: {recorded} cannot be read ({error.strerror})") from None
    typer.echo(f"{num_differences} decisions differ")
    return exits.FAILED if num_differences else exits.OK
