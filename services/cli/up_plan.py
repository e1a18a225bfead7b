"""What `isthmus up` starts: one entry per process, decided before anything runs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

LOOPBACK = "127.0.0.1"
MODEL_WORKER = ("services.cli.main", "worker")
WORKER_ROLES = ("prefill", "decode")
AUTOSCALER = "autoscaler"
SCRIPTED_WORKER = ("services.chaos.scripted_worker",)  # everything but the model, for tests


@dataclass(frozen=True, slots=True)
class Counts:
    """How many processes of each kind."""

    routers: int
    prefill: int
    decode: int

    @property
    def workers(self) -> int:
        """Processes that compute."""
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class FrontDoors:
    """Where the first router listens; further routers take the next ports. 0 = any free."""

    grpc_host: str
    grpc_port: int
    http_host: str
    http_port: int


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """One router or worker: its flags without ports, and which ports it wants."""

    name: str
    role: str  # "router" | "prefill" | "decode" | "autoscaler"
    arguments: tuple[str, ...]
    grpc_host: str
    grpc_port: int  # 0 = any free, chosen at every start
    http_host: str = ""  # of a router's front door or a worker's /metrics; empty = no HTTP
    http_port: int = 0

    @property
    def directory(self) -> str:
        """Name of a worker's own directory."""
        return "-".join(self.name.split("-")[:2])

    def command(
        self,
        python: str,
        config_path: Path,
        grpc_port: int,
        http_port: int,
        worker: Sequence[str] = MODEL_WORKER,
    ) -> list[str]:
        """The command line with the ports filled in; `worker` is the program of workers."""
        is_worker = self.role in WORKER_ROLES
        program = worker if is_worker else ("services.cli.main", self.role)
        argv = [python, "-P", "-m", *program, "--config", str(config_path)]
        argv += [*self.arguments, "--grpc-port", str(grpc_port)]
        if not self.http_host:
            return argv
        flag = "--http-port" if self.role == "router" else "--metrics-port"
        return [*argv, flag, str(http_port)]


def plan_processes(
    counts: Counts,
    doors: FrontDoors,
    *,
    threads: int,
    runtime_dir: Path | None,
    tag: str,
    metrics_port: int | None = None,
    decode_dtype: str | None = None,
) -> tuple[PlannedProcess, ...]:
    """Name every process and give it its flags.

    Args:
        counts: how many of each.
        doors: addresses of the first router.
        threads: compute threads of each worker.
        runtime_dir: every worker gets a directory of its own below it; None = workers run on
            other machines, where they bind and keep what they find there.
        tag: appended to worker names when other machines share the store; may be empty.
        metrics_port: of the first worker's /metrics, further workers take the next ones;
            0 = any free, None = none.
        decode_dtype: of weights and KV of decode workers; None = what the configuration says.
    """
    dtype = () if decode_dtype is None else ("--dtype", decode_dtype)
    workers = (
        *_workers("prefill", range(counts.prefill), threads, runtime_dir, tag),
        *(
            replace(worker, arguments=(*worker.arguments, *dtype))
            for worker in _workers("decode", range(counts.decode), threads, runtime_dir, tag)
        ),
    )
    return (
        *(_with_metrics(worker, index, metrics_port) for index, worker in enumerate(workers)),
        *(_router(index, doors, tag) for index in range(counts.routers)),
    )


def plan_worker(
    role: str,
    index: int,
    *,
    threads: int,
    runtime_dir: Path | None,
    tag: str,
    metrics_port: int | None = None,
    decode_dtype: str | None = None,
) -> PlannedProcess:
    """Name one more worker, of that number in its role; its ports are any that are free."""
    (worker,) = _workers(role, range(index, index + 1), threads, runtime_dir, tag)
    if role == "decode" and decode_dtype is not None:
        worker = replace(worker, arguments=(*worker.arguments, "--dtype", decode_dtype))
    return _with_metrics(worker, 0, None if metrics_port is None else 0)


def plan_autoscaler(
    policy: Path, control: Path, tag: str, prometheus: str | None = None
) -> PlannedProcess:
    """Name the process that resizes the pools."""
    return PlannedProcess(
        name=f"{AUTOSCALER}{tag}",
        role=AUTOSCALER,
        arguments=(
            *("--policy", str(policy), "--control", str(control)),
            *(() if prometheus is None else ("--prometheus", prometheus)),
        ),
        grpc_host=LOOPBACK,
        grpc_port=0,
        http_host=LOOPBACK,
    )


def with_role(plan: PlannedProcess, role: str) -> PlannedProcess:
    """Return a worker that belongs to another pool from now on, under its old name."""
    at = plan.arguments.index("--role") + 1
    arguments = (*plan.arguments[:at], role, *plan.arguments[at + 1 :])
    return replace(plan, role=role, arguments=arguments)


def _workers(
    role: str, indexes: Iterable[int], threads: int, runtime_dir: Path | None, tag: str
) -> Iterator[PlannedProcess]:
    for index in indexes:
        name = f"{role}-{index}{tag}"
        here: tuple[str, ...] = ()
        if runtime_dir is not None:
            here = ("--bind-host", LOOPBACK, "--runtime-dir", str(runtime_dir / f"{role}-{index}"))
        yield PlannedProcess(
            name=name,
            role=role,
            arguments=("--role", role, "--worker-id", name, "--threads", str(threads), *here),
            grpc_host="" if runtime_dir is None else LOOPBACK,
            grpc_port=0,
        )


def _with_metrics(worker: PlannedProcess, index: int, metrics_port: int | None) -> PlannedProcess:
    if metrics_port is None:
        return worker
    port = metrics_port + index if metrics_port else 0
    return replace(worker, http_host=worker.grpc_host, http_port=port)


def _router(index: int, doors: FrontDoors, tag: str) -> PlannedProcess:
    name = f"router-{index}{tag}"
    return PlannedProcess(
        name=name,
        role="router",
        arguments=("--router-id", name),
        grpc_host=doors.grpc_host,
        grpc_port=doors.grpc_port + index if doors.grpc_port else 0,
        http_host=doors.http_host,
        http_port=doors.http_port + index if doors.http_port else 0,
    )


def fixed_ports(processes: Sequence[PlannedProcess]) -> tuple[tuple[str, int, str], ...]:
    """(host, port, flag or setting) of every port that was asked for by number."""
    wanted = []
    for process in processes:
        if not process.grpc_host:
            continue  # on another machine
        if process.grpc_port:
            wanted.append((process.grpc_host, process.grpc_port, "--grpc-port"))
        if process.http_port:
            is_router = process.role == "router"
            name = "--http-port" if is_router else "worker.metrics_port"
            wanted.append((process.http_host, process.http_port, name))
    return tuple(wanted)
