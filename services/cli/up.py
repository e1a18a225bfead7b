"""`isthmus up`: a whole cluster on this machine, from one command."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import settings
from services.cli.serve import ConfigFile, LogLevel, Mode, ModelName, StoreUrl

if TYPE_CHECKING:
    from services.cli.store_unit import StoreUnit
    from services.cli.supervisor import Supervisor
    from services.cli.unit import Unit
    from services.cli.up_plan import Counts, PlannedProcess
    from services.cli.up_ray import RayRuntime
    from services.cli.up_view import View
    from services.common.config import IsthmusConfig
    from services.runtime.process import Launch

_START_TIMEOUT_S = 150.0


class Dtype(StrEnum):
    """Types of weights and KV."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Runtime(StrEnum):
    """What keeps the workers' processes."""

    process = "process"
    ray = "ray"


class Engine(StrEnum):
    """What workers compute with."""

    model = "model"
    scripted = "scripted"  # services.chaos.scripted_worker: KV without a model, for tests


def up(
    config: ConfigFile = None,
    model: ModelName = None,
    routers: Annotated[int, typer.Option(min=1, max=16, help="Routers to start.")] = 1,
    prefill: Annotated[int, typer.Option(min=0, max=64, help="Prefill workers to start.")] = 1,
    decode: Annotated[int, typer.Option(min=0, max=64, help="Decode workers to start.")] = 1,
    router_processes: Annotated[
        int | None, typer.Option(min=1, max=64, help="Processes of each router, on its ports.")
    ] = None,
    redis: StoreUrl = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per worker; default: cores / workers.")
    ] = None,
    grpc_port: Annotated[int | None, typer.Option(help="First gRPC port; 0 = any free.")] = None,
    http_port: Annotated[int | None, typer.Option(help="First HTTP port; 0 = any free.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or cuda (untested).")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    decode_dtype: Annotated[
        Dtype | None, typer.Option(help="Another dtype for decode; KV is converted on its way.")
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks per worker.")] = None,
    force_mode: Annotated[Mode | None, typer.Option(help="Mode of every request.")] = None,
    json_status: Annotated[
        Path | None, typer.Option(help="Keep pids, roles, ports and states in this file.")
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the processes' logs here.")] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Resize the pools by this policy while they serve.")
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(help="Prometheus server that a policy's other figures are of.")
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until everything must be ready.")
    ] = _START_TIMEOUT_S,
    log_level: LogLevel = None,
    runtime: Annotated[
        Runtime, typer.Option(help="Workers as child processes, or as Ray actors.")
    ] = Runtime.process,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Ray cluster for the workers: HOST:PORT, or auto; needs --redis."),
    ] = None,
    engine: Annotated[Engine, typer.Option(hidden=True)] = Engine.model,
) -> int:
    """Start a store, routers and workers on this machine; Ctrl-C stops all of them."""
    loaded = settings.load_serving(
        config,
        {
            "model.name": model,
            "store.url": redis,
            "router.grpc_port": grpc_port,
            "router.http_port": http_port,
            "router.processes": router_processes,
            "router.force_mode": None if force_mode is None else force_mode.value,
            "worker.device": device,
            "worker.dtype": dtype,
            "worker.threads": threads,
            "worker.num_blocks": num_blocks,
            "telemetry.log_level": log_level,
            "ray.address": ray_address,
        },
    )
    from services.cli.up_plan import Counts

    counts = Counts(routers, prefill, decode)
    if not counts.workers:
        raise typer.BadParameter("at least one worker is needed: --prefill or --decode")
    from services.runtime.runtime_dir import RuntimeDir

    signal.signal(signal.SIGTERM, _leave)  # until the supervisor takes the signals over
    runtime_dir = RuntimeDir.create(os.environ)
    run = _Run(loaded, counts, runtime_dir.path, json_status, log_dir)
    try:
        runtime_dir.tell(json.dumps({"pid": os.getpid()}))  # to `isthmus down`
        run.decode_dtype = None if decode_dtype is None else decode_dtype.value
        run.policy, run.prometheus = policy, prometheus
        run.engine = engine
        run.uses_ray = runtime is Runtime.ray or ray_address is not None
        if engine is Engine.model or run.uses_ray:
            return run.supervisor().run(start_timeout)
        from services.chaos.forking import Forks

        with Forks() as forks:
            run.launch_scripted = forks.launch
            return run.supervisor().run(start_timeout)
    finally:
        run.close()
        runtime_dir.remove()


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Run:
    """Everything one `isthmus up` puts together before its supervisor starts."""

    def __init__(
        self,
        config: IsthmusConfig,
        counts: Counts,
        runtime_dir: Path,
        json_status: Path | None,
        log_dir: Path | None,
    ) -> None:
        self._config = config
        self._counts = counts
        self._runtime_dir = runtime_dir
        self._json_status = json_status
        self._log_dir = log_dir if log_dir is not None else runtime_dir / "logs"
        self._log_hint = (
            "run again with --log-dir DIR to keep the logs"
            if log_dir is None
            else f"logs: {log_dir}"
        )
        self._config_path = runtime_dir / "isthmus.yaml"
        self.launch_scripted: Launch | None = None  # None = workers compute with the model
        self.decode_dtype: str | None = None
        self.policy: Path | None = None  # None = pools keep their size
        self.prometheus: str | None = None
        self.engine = Engine.model
        self.uses_ray = False
        self._ray: RayRuntime | None = None

    def close(self) -> None:
        """End what was started besides the supervisor's processes."""
        if self._ray is not None:
            self._ray.close()

    def supervisor(self) -> Supervisor:
        """Resolve the model, start the store, plan the processes."""
        from services.cli.status_file import StatusFile
        from services.cli.supervisor import Supervisor
        from services.common.clock import SystemClock
        from services.common.model_manifest import read_manifest

        plans = self._plan()
        self._check_policy()
        # What takes a moment to check comes before a model that may have to be fetched.
        _check_ports(plans)
        settings.check_files(self._config)
        self._check_store()
        model_dir = settings.resolve_model(self._config)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._open_ray(plans)
        store = self._start_store()
        self._write_config(store.url, model_dir)
        clock = SystemClock()
        facts: dict[str, object] = {
            "pid": os.getpid(),
            "model": self._config.model.served_name or read_manifest(model_dir).name,
            "runtime_dir": str(self._runtime_dir),
            "log_dir": str(self._log_dir),
            "started_unix_ms": clock.unix_ms(),
        }
        if self._ray is not None:
            facts["ray"] = self._ray.describe()
        supervisor = Supervisor(
            units=[self._unit(plan) for plan in plans],
            store=store,
            status_file=StatusFile(self._json_status),
            view=self._view(),
            clock=clock,
            describe=lambda: facts,
            drain_s=max(self._config.router.drain_s, self._config.worker.drain_s),
        )
        if self.policy is not None:
            supervisor.scale_by(self._control, self._plan_worker, self._unit, self._runtime_dir)
        return supervisor

    def _plan(self) -> tuple[PlannedProcess, ...]:
        from services.cli.up_plan import FrontDoors, plan_autoscaler, plan_processes
        from services.runtime.threads import available_cores, default_threads

        router = self._config.router
        # Nobody here knows the cores of another machine: 0 = all that the worker finds.
        threads_here = (
            0 if self._is_on_cluster else default_threads(available_cores(), self._counts.workers)
        )
        self._threads = self._config.worker.threads or threads_here
        # Workers of another machine may have the same store: names must not meet.
        self._tag = f"-{secrets.token_hex(3)}" if self._has_foreign_store else ""
        plans = plan_processes(
            self._counts,
            FrontDoors(router.grpc_host, router.grpc_port, router.http_host, router.http_port),
            threads=self._threads,
            runtime_dir=self._workers_dir,
            tag=self._tag,
            metrics_port=self._config.worker.metrics_port,
            decode_dtype=self.decode_dtype,
        )
        if self.policy is None:
            return plans
        own = (self.policy.absolute(), self._control, self._tag)
        return (*plans, plan_autoscaler(*own, self.prometheus))

    def _plan_worker(self, role: str, index: int) -> PlannedProcess:
        from services.cli.up_plan import plan_worker

        return plan_worker(
            role,
            index,
            threads=self._threads,
            runtime_dir=self._workers_dir,
            tag=self._tag,
            metrics_port=self._config.worker.metrics_port,
            decode_dtype=self.decode_dtype,
        )

    @property
    def _workers_dir(self) -> Path | None:
        """Where workers of this machine have their directories."""
        return None if self._is_on_cluster else self._runtime_dir

    @property
    def _control(self) -> Path:
        return self._runtime_dir / "control.sock"

    def _check_policy(self) -> None:
        """A policy that is wrong is told of before anything starts."""
        if self.policy is None:
            return
        from services.autoscaler.policy_file import load_policy
        from services.autoscaler.process_driver import roles_of
        from services.autoscaler.prometheus import prometheus_reader
        from services.cli.up_view import policy_line

        policy = load_policy(self.policy).spec
        roles_of(policy)
        prometheus_reader(self.prometheus, self.policy)
        if line := policy_line(policy):
            typer.echo(line, err=True)

    @property
    def _is_on_cluster(self) -> bool:
        """Whether workers run on nodes of somebody's Ray cluster."""
        return self.uses_ray and bool(self._config.ray.address)

    @property
    def _has_foreign_store(self) -> bool:
        """Whether flag, environment or file name a store of the user's own."""
        return "url" in self._config.store.model_fields_set

    def _check_store(self) -> None:
        from services.cli.store_unit import ping_store
        from services.common.errors import ConfigError

        if self._is_on_cluster and not self._has_foreign_store:
            raise ConfigError(
                "workers on other nodes need a store they can reach: give --redis (store.url)"
            )

        if self._has_foreign_store:
            ping_store(self._config.store.url.get_secret_value())

    def _open_ray(self, plans: Sequence[PlannedProcess]) -> None:
        if not self.uses_ray:
            return
        from services.cli.up_ray import MODEL_PROGRAM, SCRIPTED_PROGRAM, RayRuntime, slots

        program = MODEL_PROGRAM if self.engine is Engine.model else SCRIPTED_PROGRAM
        may_grow = self.policy is not None
        self._ray = RayRuntime.open(
            self._config, slots(self._config, plans, may_grow=may_grow), self._runtime_dir, program
        )

    def _start_store(self) -> StoreUnit:
        from services.cli.store_unit import StoreUnit

        if self._has_foreign_store:
            url = self._config.store.url.get_secret_value()
            return StoreUnit.external(url, self._runtime_dir)
        return StoreUnit.start(self._runtime_dir)

    def _write_config(self, store_url: str, model_dir: Path) -> None:
        """Give the children one file; it is private because the address may hold a password."""
        from pydantic import SecretStr

        from services.common.config_source import dump_yaml

        config = self._config.model_copy(
            update={
                "store": self._config.store.model_copy(update={"url": SecretStr(store_url)}),
                "model": self._config.model.model_copy(update={"name": str(model_dir)}),
            }
        )
        if self._ray is not None:
            self._ray.use(config, self._config.model.name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(self._config_path, flags, 0o600), "w") as file:
            file.write(dump_yaml(config))

    def _unit(self, plan: PlannedProcess) -> Unit:
        from services.cli.dial import dial_router, dial_worker, plaintext
        from services.cli.unit import Unit
        from services.cli.up_plan import AUTOSCALER
        from services.common.config_source import without_settings
        from services.runtime.process import launch_program

        tls = self._config.tls
        launch: Launch = launch_program
        where = None
        dial = dial_worker(tls)
        if plan.role == "router":
            dial = dial_router(tls)
        elif plan.role == AUTOSCALER:
            dial = plaintext
        else:
            (self._runtime_dir / plan.directory).mkdir(mode=0o700)
            launch = self.launch_scripted or launch_program
            if self._ray is not None:
                on_ray = self._ray.unit_launch(plan, self._log_dir / f"{plan.name}.log")
                launch, where = on_ray, on_ray.where
        return Unit(
            plan,
            self._command,
            without_settings(os.environ),
            self._log_dir,
            launch,
            dial,
            "https" if tls.cert_file else "http",
            where,
        )

    def _command(self, plan: PlannedProcess, grpc_port: int, http_port: int) -> list[str]:
        from services.cli.up_plan import MODEL_WORKER, SCRIPTED_WORKER, WORKER_ROLES

        if self._ray is not None and plan.role in WORKER_ROLES:
            return list(plan.arguments)  # the actor adds what only its node knows
        worker = SCRIPTED_WORKER if self.launch_scripted else MODEL_WORKER
        return plan.command(sys.executable, self._config_path, grpc_port, http_port, worker)

    def _view(self) -> View:
        from services.cli.up_view import LiveView, PlainView

        if sys.stdout.isatty():
            return LiveView(self._log_hint)
        return PlainView(sys.stdout, self._log_hint)


def _check_ports(plans: Sequence[PlannedProcess]) -> None:
    from services.cli.unit import is_port_free
    from services.cli.up_plan import fixed_ports
    from services.common.errors import ConfigError

    for host, port, name in fixed_ports(plans):
        if not is_port_free(host, port):
            raise ConfigError(f"port {port} on {host} is in use: choose another with {name}")
