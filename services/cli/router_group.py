"""`isthmus router --processes N`: N routers on the same two ports, kept alive.

The kernel spreads connections over them (SO_REUSEPORT). Each has a name, an audit chain, a trace
file and a /metrics of its own, and all share the store, so they agree as replicas do. One that
dies is started again while the others take new connections.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli import exits
from services.cli.supervisor import StopSignals
from services.cli.unit import FAILED, READY, UnitState, is_port_free
from services.common.address import HeldPort, family_of
from services.common.clock import Clock, SystemClock
from services.common.config_source import without_settings
from services.common.errors import ConfigError
from services.runtime.process import PARENT_VARIABLE
from services.runtime.runtime_dir import RuntimeDir
from services.telemetry.logs import get_logger

if TYPE_CHECKING:
    from services.common.config import IsthmusConfig

log = get_logger(__name__)

_TICK_S = 0.1
_KILL_WAIT_S = 5.0
_PROBE_S = 0.05


def run_group(config: IsthmusConfig) -> int:
    """Run the processes until a signal; return the exit status."""
    runtime_dir = RuntimeDir.create(os.environ)
    held: list[HeldPort] = []
    try:
        members = plan_members(config, held)
        clock = SystemClock()
        group = RouterGroup([Member(one, runtime_dir.path) for one in members], clock)
        return group.run(config.router.drain_s)
    finally:
        for port in held:
            port.release()
        runtime_dir.remove()


def plan_members(config: IsthmusConfig, held: list[HeldPort]) -> list[IsthmusConfig]:
    """Give every process its configuration; ports that are drawn for them go to `held`.

    Raises ConfigError for a port that others have: sharing it with them would be silent.
    """
    router = config.router
    doors = {
        "grpc_port": _shared_port(router.grpc_host, router.grpc_port, "router.grpc_port", held),
        "http_port": _shared_port(router.http_host, router.http_port, "router.http_port", held),
    }
    name = router.router_id or f"router-{os.getpid()}"
    return [
        config.model_copy(
            update={
                "router": router.model_copy(
                    update={
                        **doors,
                        "router_id": f"{name}-{index}",
                        "metrics_port": _metrics_port(config, index, held),
                    }
                ),
                "telemetry": config.telemetry.model_copy(
                    update={"trace_file": _of_member(config.telemetry.trace_file, index)}
                ),
            }
        )
        for index in range(router.processes)
    ]


def _shared_port(host: str, port: int, setting: str, held: list[HeldPort]) -> int:
    if port:
        if not is_port_free(host, port):
            raise ConfigError(f"port {port} on {host} is in use: choose another with {setting}")
        return port
    held.append(HeldPort(host))
    return held[-1].number


def _metrics_port(config: IsthmusConfig, index: int, held: list[HeldPort]) -> int:
    """A port always: that it listens is how a process is known to be ready."""
    port = config.router.metrics_port
    if port:
        return port + index
    held.append(HeldPort(config.router.metrics_host))
    return held[-1].number


def _of_member(path: str, index: int) -> str:
    return f"{path}.{index}" if path else ""


class Member:
    """One process of the group."""

    def __init__(self, config: IsthmusConfig, runtime_dir: Path) -> None:
        self.name = config.router.router_id
        self.state = UnitState()
        self.exit_status: int | None = None
        self._metrics = (config.router.metrics_host, config.router.metrics_port or 0)
        self._path = runtime_dir / f"{self.name}.yaml"
        _write_private(self._path, config)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the current life."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process exists."""
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Begin a life; output goes where this process's goes."""
        argv = [sys.executable, "-P", "-m", "services.cli.main", "router"]
        argv += ["--config", str(self._path), "--member"]
        self._process = subprocess.Popen(
            argv, env=_environ(), stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.state.spawned()

    def tick(self, now: float) -> None:
        """Look at the process; start it again when due."""
        before = self.state.state
        status = None if self._process is None else self._process.poll()
        if status is not None:
            self.exit_status = status
        is_serving = True if before == READY else self._listens()
        if self.state.observe(now, status, is_serving):
            self.spawn()
        if self.state.state != before:
            level = log.info if self.state.state == READY else log.warning
            level("router_group.member", member=self.name, pid=self.pid,
                  state=self.state.state, reason=self.state.reason)  # fmt: skip

    def send(self, number: signal.Signals) -> None:
        """Signal the process if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)

    def _listens(self) -> bool:
        host, port = self._metrics
        with socket.socket(family_of(host)) as probe:
            probe.settimeout(_PROBE_S)
            return probe.connect_ex((host, port)) == 0


class RouterGroup:
    """Supervises the members. Main thread only: children die with the thread that starts them."""

    def __init__(self, members: Sequence[Member], clock: Clock) -> None:
        self.members = tuple(members)
        self._clock = clock
        self._signals = StopSignals()

    def run(self, drain_s: float) -> int:
        """Start all, keep them running until a signal, stop them; return the exit status."""
        with self._signals.installed():
            try:
                for member in self.members:
                    member.spawn()
                return self._watch()
            finally:
                self._stop(drain_s)

    def _watch(self) -> int:
        while not self._signals.count:
            self._signals.wait(_TICK_S)
            now = self._clock.now()
            for member in self.members:
                member.tick(now)
            if all(member.state.state == FAILED for member in self.members):
                statuses = {member.exit_status for member in self.members}
                # What all of them say of the configuration or the model is the group's answer.
                told = statuses.pop() if len(statuses) == 1 else None
                return told if told in (exits.USAGE, exits.MODEL) else exits.FAILED
        return exits.OK

    def _stop(self, drain_s: float) -> None:
        asked = self._signals.count
        for member in self.members:
            member.state.stopping()
            member.send(signal.SIGTERM)
            member.send(signal.SIGCONT)  # a stopped process takes no other signal
        deadline = self._clock.now() + drain_s + _KILL_WAIT_S
        while any(member.is_running for member in self.members):
            if self._clock.now() >= deadline or self._signals.count > asked:
                break
            self._signals.wait(_TICK_S / 2)
        for member in self.members:
            member.send(signal.SIGKILL)
            member.wait(_KILL_WAIT_S)


def _environ() -> dict[str, str]:
    return {**without_settings(os.environ), PARENT_VARIABLE: str(os.getpid())}


def _write_private(path: Path, config: IsthmusConfig) -> None:
    from services.common.config_source import dump_yaml

    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "w") as file:
        file.write(dump_yaml(config))
