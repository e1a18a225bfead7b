"""A cluster under fire: store, router and workers that are started again at once, whatever happens.

Unlike `isthmus up` it waits for nothing between two lives of a worker, puts a proxy in front of
every KV port, and arms a fault point in a worker's next life.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
import psutil
from pydantic import SecretStr

from services.bench.result import BenchFailed
from services.chaos.forking import Forks
from services.chaos.scripted_worker import SPEED_VARIABLE
from services.chaos.tcp_proxy import TcpProxy
from services.common.address import HeldPort, split_host_port
from services.common.config import IsthmusConfig
from services.common.config_source import dump_yaml
from services.pb import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.registry.embedded import EmbeddedStore
from services.runtime.fault_points import VARIABLE
from services.runtime.process import Child, Launch, launch_program
from services.runtime.runtime_dir import RuntimeDir

HOST = "127.0.0.1"
RPC_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 8.0
Statuses = Mapping[str, worker_pb2.StatusResponse | None]
SCRIPTED: tuple[str, ...] = ("services.chaos.scripted_worker",)
MODEL: tuple[str, ...] = ("services.cli.main", "worker")
_PLANES = {
    "prefill": ("attach,memfd,zmq", "zmq"),
    "decode": ("memfd,zmq", "attach,memfd,zmq"),
}
CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True)
class RigPlan:
    """What the cluster is made of."""

    model_dir: Path
    prefill: int = 2
    decode: int = 2
    routers: int = 1
    program: Sequence[str] = SCRIPTED
    threads: int = 1
    speed: str = ""  # of scripted workers; empty = their default
    speeds: Mapping[str, str] = field(default_factory=dict)  # of single ones, by name
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # section -> field
    planes: Sequence[str] = ()  # of every worker; empty = a mix, so that pairs differ
    has_store_proxy: bool = False  # between the store and everybody


class RigWorker:
    """One worker through all its lives; ports and name stay, the incarnation does not."""

    def __init__(
        self,
        name: str,
        role: str,
        planes: str,
        plan: RigPlan,
        rig_dir: Path,
        launch: Launch = launch_program,
    ) -> None:
        self.name = name
        self.role = role
        grpc_port, kv_port = self._ports = (HeldPort(HOST), HeldPort(HOST))
        self.grpc = f"{HOST}:{grpc_port.number}"
        self.num_lives = 0
        self.point = ""  # armed in the current life, until it has fired
        self._plan = plan
        self.proxy = TcpProxy((HOST, kv_port.number), seed=kv_port.number, splits_messages=True)
        runtime_dir = rig_dir / name
        runtime_dir.mkdir(mode=0o700)
        self._environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("ISTHMUS_")},
            "ISTHMUS_WORKER__ROLE": role,
            "ISTHMUS_WORKER__WORKER_ID": name,
            "ISTHMUS_WORKER__GRPC_PORT": str(grpc_port.number),
            "ISTHMUS_WORKER__RUNTIME_DIR": str(runtime_dir),
            "ISTHMUS_TRANSFER__PLANES": planes,
            "ISTHMUS_TRANSFER__ZMQ_PORT": str(kv_port.number),
            "ISTHMUS_TRANSFER__ZMQ_ADVERTISE": f"{HOST}:{self.proxy.port}",
        }
        speed = plan.speeds.get(name, plan.speed)
        if speed:
            self._environ[SPEED_VARIABLE] = speed
        argv = [sys.executable, "-P", "-m", *plan.program, "--config", str(rig_dir / "rig.yaml")]
        self._argv, self._log = argv, rig_dir / f"{name}.log"
        self._launch = launch
        self.child = Child(name, argv, self._environ, self._log, launch)
        self.channel = grpc.aio.insecure_channel(self.grpc, options=CHANNEL_OPTIONS)

    def spawn(self, point: str = "") -> None:
        """Begin the next life, with a fault point armed, or none if it is empty."""
        self.point = point
        environ = {**self._environ, VARIABLE: point} if point else self._environ
        self.child = Child(self.name, self._argv, environ, self._log, self._launch)
        self.child.spawn()
        self.num_lives += 1

    def is_frozen(self) -> bool:
        """Whether the process has been stopped by a signal."""
        pid = self.child.pid
        if pid is None or not self.child.is_running:
            return False
        with suppress(psutil.Error):
            return psutil.Process(pid).status() == psutil.STATUS_STOPPED
        return False

    async def status(self) -> worker_pb2.StatusResponse | None:
        """Ask for its counters; None while it does not answer."""
        stub = worker_pb2_grpc.WorkerStub(self.channel)
        try:
            return await stub.Status(worker_pb2.StatusRequest(), timeout=RPC_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None

    def stop(self) -> None:
        """Ask the process to end; it may be frozen."""
        self.child.send(signal.SIGCONT)
        self.child.send(signal.SIGTERM)

    async def close(self) -> None:
        """Let go of its proxy, channel and ports, once the process has ended."""
        self.proxy.stop()
        await self.channel.close()
        for port in self._ports:
            port.release()


class RigRouter:
    """One router through all its lives, on the same ports."""

    def __init__(self, name: str, rig_dir: Path) -> None:
        self.name = name
        self._ports = grpc_port, http_port = HeldPort(HOST), HeldPort(HOST)
        self.grpc = f"{HOST}:{grpc_port.number}"
        self.http = f"{HOST}:{http_port.number}"
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("ISTHMUS_")},
            "ISTHMUS_ROUTER__ROUTER_ID": name,
            "ISTHMUS_ROUTER__GRPC_PORT": str(grpc_port.number),
            "ISTHMUS_ROUTER__HTTP_PORT": str(http_port.number),
        }
        argv = [sys.executable, "-P", "-m", "services.cli.main", "router"]
        argv += ["--config", str(rig_dir / "rig.yaml")]
        self.child = Child(name, argv, environ, rig_dir / f"{name}.log")
        self._channel: grpc.aio.Channel | None = None  # of the loop that asks first

    def spawn(self) -> None:
        """Begin the next life."""
        self.child.spawn()

    def metric(self, name: str, label: str = "") -> float:
        """Return one of its counters or gauges: all labels together, or those with that one."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=RPC_TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
        samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return sum(
            float(value)
            for key, _, value in samples
            if key.partition("{")[0] == name and label in key
        )

    async def status(self) -> admin_pb2.ClusterStatusResponse | None:
        """Ask how it sees the cluster; None while it does not answer."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.grpc, options=CHANNEL_OPTIONS)
        stub = admin_pb2_grpc.AdminStub(self._channel)
        try:
            return await stub.ClusterStatus(admin_pb2.ClusterStatusRequest(), timeout=RPC_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None

    async def num_live(self) -> int:
        """Workers it uses; 0 while it does not answer."""
        answer = await self.status()
        return sum(worker.state == "live" for worker in answer.workers) if answer else 0

    async def close(self) -> None:
        """Let go of its channel and ports, once the process has ended."""
        if self._channel is not None:
            await self._channel.close()
        for port in self._ports:
            port.release()


class Rig:
    """Starts on entry, ends on exit; enter it on the main thread (children die with it)."""

    def __init__(self, plan: RigPlan, first_point: Callable[[RigWorker], str]) -> None:
        """Prepare; `first_point` arms a worker's first life."""
        self._plan = plan
        self._first_point = first_point
        self.workers: list[RigWorker] = []
        self.routers: list[RigRouter] = []
        self.store_proxy: TcpProxy | None = None

    @property
    def model_dir(self) -> Path:
        """Where its model is."""
        return self._plan.model_dir

    @property
    def grpc(self) -> str:
        """Address of the first router."""
        return self.routers[0].grpc

    async def __aenter__(self) -> Self:
        """Start everything; `all_live` says when it is ready."""
        self._runtime = RuntimeDir.create(os.environ)
        path = self._runtime.path
        # A real model's worker has threads when it is loaded: no fork would be whole.
        self._forks = Forks() if self._plan.program == SCRIPTED else None
        try:
            self.store = EmbeddedStore.start(path, use_tcp=self._plan.has_store_proxy)
            if self._plan.has_store_proxy:
                self.store_proxy = TcpProxy(
                    split_host_port(self.store.url.removeprefix("redis://"))
                )
            self._write_config(path / "rig.yaml")
            for index in range(self._plan.routers):
                self.routers.append(RigRouter(f"router-{index}", path))
                self.routers[-1].spawn()
            for name, role, planes in _names(self._plan):
                self._begin_worker(name, role, planes)
        except BaseException:
            self._close_forks()
            self._runtime.remove()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every process and remove every file."""
        for worker in self.workers:
            worker.stop()
        for router in self.routers:
            router.child.send(signal.SIGCONT)
            router.child.send(signal.SIGTERM)
        for child in self._children():
            if not child.wait(STOP_TIMEOUT_S):
                child.send(signal.SIGKILL)
                child.wait(STOP_TIMEOUT_S)
        self._close_forks()
        for worker in self.workers:
            await worker.close()
        for router in self.routers:
            await router.close()
        self.store.stop()
        if self.store_proxy is not None:
            self.store_proxy.stop()
        self._runtime.remove()

    def add_worker(self, role: str) -> RigWorker:
        """Start one more worker of a role, under the first name that is free."""
        taken = {worker.name for worker in self.workers}
        index = next(i for i in count() if f"{role}-{i}" not in taken)
        return self._begin_worker(f"{role}-{index}", role, planes_of(self._plan, role, index))

    def _begin_worker(self, name: str, role: str, planes: str) -> RigWorker:
        launch = launch_program if self._forks is None else self._forks.launch
        worker = RigWorker(name, role, planes, self._plan, self._runtime.path, launch)
        self.workers.append(worker)
        worker.spawn(self._first_point(worker))
        return worker

    async def forget_worker(self, worker: RigWorker) -> None:
        """Let go of a worker whose process has ended."""
        self.workers.remove(worker)
        await worker.close()
        shutil.rmtree(self._runtime.path / worker.name, ignore_errors=True)

    def _close_forks(self) -> None:
        if self._forks is not None:
            self._forks.close()

    def _children(self) -> list[Child]:
        routers = [router.child for router in self.routers]
        return routers + [worker.child for worker in self.workers]

    def start_store_again(self) -> None:
        """Begin another life of the store, empty, at the same address; waits until it answers."""
        self.store.stop()
        port = 0 if self.store_proxy is None else self.store_proxy.target[1]
        self.store = EmbeddedStore.start(self._runtime.path, use_tcp=port > 0, port=port)

    def _write_config(self, path: Path) -> None:
        sections: dict[str, dict[str, object]] = {
            "model": {"name": str(self._plan.model_dir)},
            "store": {"url": SecretStr(self._store_url)},
            "router": {"drain_s": 0.5},
            "worker": {"threads": self._plan.threads, "drain_s": 0.5},
            "telemetry": {"log_level": "warning"},
        }
        for section, fields in self._plan.settings.items():
            sections.setdefault(section, {}).update(fields)
        config = IsthmusConfig.model_validate(sections)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "w") as file:
            file.write(dump_yaml(config))

    @property
    def _store_url(self) -> str:
        if self.store_proxy is None:
            return self.store.url
        return f"redis://{HOST}:{self.store_proxy.port}"

    @property
    def routers_are_running(self) -> bool:
        """Where routers are not attacked, the death of one is a finding."""
        return all(router.child.is_running for router in self.routers)

    def tails(self) -> str:
        """The last log lines of every process, for a failure's report."""
        return "\n".join(f"[{c.name}] {line}" for c in self._children() for line in c.tail(6))

    async def num_live(self) -> int:
        """Workers that every router uses."""
        return min(await asyncio.gather(*(router.num_live() for router in self.routers)))

    async def until_live(self, timeout_s: float) -> None:
        """Wait until every router uses every worker.

        Raises:
            BenchFailed: they do not in time, or a router has died meanwhile.
        """
        end = time.monotonic() + timeout_s
        while await self.num_live() < len(self.workers):
            if time.monotonic() > end or not self.routers_are_running:
                raise BenchFailed(f"not all workers live in {timeout_s} s\n{self.tails()}")
            await asyncio.sleep(0.05)

    async def statuses(self) -> Statuses:
        """Counters of every worker; None of one that does not answer."""
        answers = await asyncio.gather(*(worker.status() for worker in self.workers))
        return {w.name: status for w, status in zip(self.workers, answers, strict=True)}


def held(statuses: Statuses) -> dict[str, int]:
    """Blocks, transfers and requests that workers hold; not answering is not free."""
    counts = {
        name: 1
        if status is None
        else status.blocks_in_use + status.transfers_open + status.requests_open
        for name, status in statuses.items()
    }
    return {name: count for name, count in counts.items() if count}


def _names(plan: RigPlan) -> Sequence[tuple[str, str, str]]:
    """Name, role and planes of every worker."""
    return [
        (f"{role}-{index}", role, planes_of(plan, role, index))
        for role, count in (("prefill", plan.prefill), ("decode", plan.decode))
        for index in range(count)
    ]


def planes_of(plan: RigPlan, role: str, index: int) -> str:
    """Planes of one worker; in the mix pairs have zmq, memfd, or read in place."""
    return ",".join(plan.planes) or _PLANES[role][index % len(_PLANES[role])]
