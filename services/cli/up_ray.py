"""`isthmus up --runtime ray`: workers as Ray actors instead of child processes."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from services.autoscaler.ray_driver import RayPool
from services.cli.unit import Listening
from services.cli.up_plan import LOOPBACK, WORKER_ROLES, PlannedProcess
from services.cli.worker_pools import MAX_WORKERS
from services.common.config import IsthmusConfig
from services.common.config_source import Source, dump_yaml, iter_fields, validate
from services.models.catalog import NAMED_MODELS
from services.runtime.ray_actor import WorkerOrder
from services.runtime.ray_cluster import Placement, RayCluster, RayWorker, new_name

Program = tuple[str, tuple[str, ...]]
# Program, and its arguments ahead of a worker's own.
MODEL_PROGRAM: Program = ("services.cli.main:run", ("worker",))
SCRIPTED_PROGRAM: Program = ("services.chaos.scripted_worker:main", ())


class RayRuntime:
    """Ray, and what every worker started there is told."""

    def __init__(self, cluster: RayCluster, address: str, program: Program) -> None:
        self.cluster = cluster
        self.address = address
        self._program = program
        self._config: IsthmusConfig | None = None

    @classmethod
    def open(
        cls,
        config: IsthmusConfig,
        room: Mapping[str, float],
        runtime_dir: Path,
        program: Program = MODEL_PROGRAM,
    ) -> RayRuntime:
        """Start a Ray with `room`, or join the one that is configured; raises ConfigError."""
        namespace = config.ray.namespace or f"isthmus-{secrets.token_hex(4)}"
        if not config.ray.address:
            directory = runtime_dir / "ray"
            directory.mkdir(mode=0o700)
            cluster = RayCluster.start(namespace, directory, room, os.environ)
        else:
            cluster = RayCluster.connect(config.ray.address, namespace, os.environ)
            check_node_address(config, cluster.node_address)
        return cls(cluster, cluster.address, program)

    def use(self, config: IsthmusConfig, asked_for: str) -> None:
        """Take the merged configuration, and the model as it was asked for.

        Nodes of somebody's cluster do not have the directory that it was resolved to here. They
        look for it themselves, by its name or by a path that all of them have.
        """
        self._config = config if self.cluster.is_own else for_nodes(config, asked_for)

    def unit_launch(self, plan: PlannedProcess, log_path: Path) -> UnitLaunch:
        """Start this process as often as its supervisor wants to."""
        assert self._config is not None
        is_here = self.cluster.is_own
        has_metrics = self._config.worker.metrics_port is not None
        order = replace(
            order_of(self._config, self._program),
            host=LOOPBACK if is_here else "",
            metrics_port=plan.http_port if has_metrics else None,
            log_path=str(log_path) if is_here else "",
        )
        return UnitLaunch(self.cluster, plan.role, order, placement(self._config, plan.role))

    def describe(self) -> dict[str, object]:
        """Facts for the status file."""
        return {"address": self.address, "namespace": self.cluster.namespace}

    def close(self) -> None:
        """End our own Ray, or leave somebody's."""
        self.cluster.close()


class UnitLaunch:
    """Starts the lives of one unit, and tells where the current one listens."""

    def __init__(
        self, cluster: RayCluster, role: str, order: WorkerOrder, place: Placement
    ) -> None:
        self._cluster = cluster
        self._role = role
        self._order = order
        self._placement = place
        self._worker: RayWorker | None = None

    def __call__(self, argv: Sequence[str], _environ: Mapping[str, str], log_fd: int) -> RayWorker:
        """Begin a life with these flags (services.runtime.process.Launch)."""
        order = replace(self._order, arguments=(*self._order.arguments, *argv))
        notes = os.dup(log_fd)

        def note(line: str) -> None:
            os.write(notes, f"{line}\n".encode())

        self._worker = self._cluster.launch(new_name(self._role), order, self._placement, note)
        return self._worker

    def where(self) -> Listening | None:
        """Where the current life listens, once Ray has placed it."""
        if self._worker is None:
            return None
        self._worker.poll()
        begun = self._worker.begun
        if begun is None or begun.refused:
            return None
        return Listening(begun.host, begun.grpc_port, begun.metrics_port)


def for_nodes(config: IsthmusConfig, asked_for: str) -> IsthmusConfig:
    """The configuration with the model as every node is to look for it."""
    name = asked_for if asked_for in NAMED_MODELS else str(Path(asked_for).absolute())
    model = config.model.model_copy(update={"name": name})
    return config.model_copy(update={"model": model})


def order_of(config: IsthmusConfig, program: Program = MODEL_PROGRAM) -> WorkerOrder:
    """What every worker of this configuration is told, wherever it is started."""
    name = config.model.name
    return WorkerOrder(
        program=program[0],
        arguments=program[1],
        config_text=dump_yaml(config),
        host="",
        metrics_port=config.worker.metrics_port,
        model_path="" if name in NAMED_MODELS else name,
    )


def ray_pools(config: IsthmusConfig, roles: Mapping[str, str]) -> dict[str, RayPool]:
    """What Ray starts for each pool of a policy; `roles` has theirs by name."""
    order = order_of(for_nodes(config, config.model.name))
    return {name: RayPool(role, order, placement(config, role)) for name, role in roles.items()}


def slots(
    config: IsthmusConfig, plans: Sequence[PlannedProcess], *, may_grow: bool
) -> dict[str, float]:
    """Resources a Ray needs for these workers, or for as many as an autoscaler may want."""
    num = Counter(plan.role for plan in plans)
    total: dict[str, float] = {}
    for role in WORKER_ROLES:
        for name, amount in placement(config, role).resources.items():
            total[name] = total.get(name, 0.0) + amount * (MAX_WORKERS if may_grow else num[role])
    return {name: amount for name, amount in total.items() if amount}


def placement(config: IsthmusConfig, role: str) -> Placement:
    """What a worker of this role takes, as configured."""
    ray = config.ray
    is_prefill = role == "prefill"
    resources = ray.prefill_resources if is_prefill else ray.decode_resources
    labels = ray.prefill_labels if is_prefill else ray.decode_labels
    return Placement(
        {name: float(amount) for name, amount in _pairs(resources).items()},
        _pairs(labels),
        ray.gpus_per_worker,
    )


def _pairs(entries: Sequence[str]) -> dict[str, str]:
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def check_node_address(config: IsthmusConfig, host: str) -> None:
    """Judge binding to a node's address here, where somebody reads it; raises ConfigError."""
    values: dict[str, object] = {}
    for doc in iter_fields(IsthmusConfig):
        section, _, field = doc.key.partition(".")
        values[doc.key] = getattr(getattr(config, section), field)
    validate(Source({**values, "worker.bind_host": host}, {}), IsthmusConfig)
