"""`isthmus router` and `isthmus worker`: flags to configuration, then the process itself."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import settings
from services.runtime.grpc_polling import poll_where_it_is_awaited

if TYPE_CHECKING:
    from services.common.config import IsthmusConfig


class Role(StrEnum):
    """Pool of a worker."""

    prefill = "prefill"
    decode = "decode"


class Mode(StrEnum):
    """How a request is run."""

    remote = "REMOTE"
    local = "LOCAL"
    stay = "STAY"


ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration file.")]
StoreUrl = Annotated[
    str | None,
    typer.Option("--redis", help="Address of the store. Prefer the file or the environment "
                 "when it holds a password: flags are visible to other users."),
]  # fmt: skip
ModelName = Annotated[
    str | None,
    typer.Option("--model", help="Name, directory or .gguf file."),
]
LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning, error.")]
# Of processes that resize or keep others.
KubernetesUrl = Annotated[
    str, typer.Option(help="URL of `kubectl proxy`; left out: the account of our own pod.")
]
SideHost = Annotated[str, typer.Option(help="Address of the health service and /metrics.")]
HealthPort = Annotated[
    int, typer.Option(min=0, max=65_535, help="Port of the health service; 0 = any.")
]
SideMetricsPort = Annotated[
    int | None, typer.Option(help="Port of /metrics; 0 = any, not given = none.")
]


def router(
    config: ConfigFile = None,
    model: ModelName = None,
    redis: StoreUrl = None,
    grpc_host: Annotated[str | None, typer.Option(help="Address of the gRPC front door.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port of the gRPC front door.")] = None,
    http_host: Annotated[str | None, typer.Option(help="Address of the HTTP front door.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of the HTTP front door.")] = None,
    force_mode: Annotated[
        Mode | None,
        typer.Option(help="Run every request in this mode."),
    ] = None,
    router_id: Annotated[str | None, typer.Option(help="Name of this replica.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, max=64, help="Processes that share the two ports.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="First port of the processes' own /metrics; 0 = any.")
    ] = None,
    log_level: LogLevel = None,
    member: Annotated[bool, typer.Option("--member", hidden=True)] = False,
) -> int:
    """Run a router: the gRPC and OpenAI front doors, and the choice of workers."""
    loaded = settings.load_serving(
        config,
        {
            "model.name": model,
            "store.url": redis,
            "router.grpc_host": grpc_host,
            "router.grpc_port": grpc_port,
            "router.http_host": http_host,
            "router.http_port": http_port,
            "router.force_mode": None if force_mode is None else force_mode.value,
            "router.router_id": router_id,
            "router.processes": processes,
            "router.metrics_port": metrics_port,
            "telemetry.log_level": log_level,
        },
    )
    set_up_logs(loaded, {"router_id": loaded.router.router_id})
    if loaded.router.processes > 1 and not member:
        from services.cli.router_group import run_group

        settings.check_files(loaded)
        return run_group(loaded)
    poll_where_it_is_awaited(os.environ)
    from services.gateway.main import run_router
    from services.models.catalog import resolve

    cache_dir = Path(loaded.model.cache_dir) if loaded.model.cache_dir else None
    more = tuple(_further(entry, cache_dir) for entry in loaded.router.more_models)
    return run_router(loaded, resolve(loaded.model.name, cache_dir), more)


def worker(
    context: typer.Context,
    config: ConfigFile = None,
    role: Annotated[Role | None, typer.Option(help="Pool of this worker.")] = None,
    model: ModelName = None,
    redis: StoreUrl = None,
    worker_id: Annotated[str | None, typer.Option(help="Name of this worker.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads; 0 = one per core.")] = None,
    bind_host: Annotated[str | None, typer.Option(help="Address to bind.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port of the gRPC server; 0 = any.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of /metrics; 0 = any, not given = none.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or cuda (untested).")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16 (not bit-stable).")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks; 0 = by free memory.")] = None,
    runtime_dir: Annotated[Path | None, typer.Option(help="Directory for sockets.")] = None,
    log_level: LogLevel = None,
) -> int:
    """Run a prefill or decode worker."""
    loaded = settings.load_serving(
        config,
        {
            "worker.role": None if role is None else role.value,
            "model.name": model,
            "store.url": redis,
            "worker.worker_id": worker_id,
            "worker.threads": threads,
            "worker.bind_host": bind_host,
            "worker.grpc_port": grpc_port,
            "worker.metrics_port": metrics_port,
            "worker.device": device,
            "worker.dtype": dtype,
            "worker.num_blocks": num_blocks,
            "worker.runtime_dir": None if runtime_dir is None else str(runtime_dir),
            "telemetry.log_level": log_level,
        },
    )
    static: dict[str, object] = {"worker_id": loaded.worker.worker_id, "role": loaded.worker.role}
    set_up_logs(loaded, static)
    from services.runtime.threads import apply_threads

    apply_threads(os.environ, loaded.worker.threads)  # before the next line loads torch
    from services.common.errors import ConfigError
    from services.worker.main import run_worker

    try:
        from services.worker.model_backend import load_model_backend
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("a worker needs torch: install isthmus[worker]") from None

    return run_worker(loaded, load_model_backend, context.obj)


def _further(entry: str, cache_dir: Path | None) -> tuple[str, Path]:
    """Read `MODEL` or `NAME=MODEL`; an empty name is the model's own."""
    from services.models.catalog import resolve

    name, has_name, model = entry.partition("=")
    return (name, resolve(model, cache_dir)) if has_name else ("", resolve(entry, cache_dir))


def set_up_logs(config: IsthmusConfig, static: dict[str, object]) -> None:
    """Write logs as configured, with these fields in every line."""
    from services.telemetry.logs import setup_logging

    setup_logging(
        config.telemetry.log_level,
        config.telemetry.log_format,
        static={key: value for key, value in static.items() if value},
        secrets=_secrets(config),
    )


def _secrets(config: IsthmusConfig) -> list[str]:
    """Values no log line may show, wherever they turn up."""
    from urllib.parse import unquote, urlsplit

    secrets: list[str] = []
    for setting in (config.store.url, config.store.loader_url):
        url = setting.get_secret_value()
        password = urlsplit(url).password
        secrets += [url, unquote(password), password] if password else []
    return secrets
