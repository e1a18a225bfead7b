"""One supervised process: a pure state machine, and the thin shell that acts on it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.cli import exits
from services.cli.dial import Dial, plaintext
from services.cli.probe import OPTIONS, HealthProbe
from services.cli.up_plan import PlannedProcess
from services.common.address import HeldPort, family_of, join_host_port
from services.runtime.process import (
    Child,
    GiveUp,
    Launch,
    RestartPolicy,
    describe_status,
    launch_program,
)

STARTING = "starting"
READY = "ready"
UNREADY = "unready"  # runs, but its health service does not say SERVING
WAITING = "waiting"  # died; starts again soon
FAILED = "failed"  # died too often
STOPPING = "stopping"  # asked to end
STOPPED = "stopped"


@dataclass(slots=True)
class UnitState:
    """What is known of a process and what to do next. Pure: told facts, returns "spawn"?"""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    state: str = STOPPED
    reason: str = ""
    num_restarts: int = 0
    _restart_at: float = 0.0

    def spawned(self) -> None:
        """A life began."""
        self.state, self.reason = STARTING, ""

    def observe(self, now: float, exit_status: int | None, is_serving: bool | None) -> bool:
        """Take in what was seen; True = start the process now.

        Args:
            now: monotonic seconds.
            exit_status: of the current life, None while it runs.
            is_serving: the last answer of its health service, None = no answer yet.
        """
        if self.state in (FAILED, STOPPING, STOPPED):
            return False
        if self.state == WAITING:
            if now < self._restart_at:
                return False
            self.num_restarts += 1
            return True
        if exit_status is not None:
            self._died(now, exit_status)
        elif is_serving:
            if self.state != READY:
                self.policy.ready(now)
                self.state, self.reason = READY, ""
        elif self.state == READY and is_serving is False:
            self.state, self.reason = UNREADY, "its health service does not answer SERVING"
        return False

    def _died(self, now: float, exit_status: int) -> None:
        # A wrong configuration stays wrong, and so does a model that cannot be read.
        if exit_status in (exits.USAGE, exits.MODEL):
            self.state, self.reason = FAILED, describe_status(exit_status)
            return
        decision = self.policy.ended(now, exit_status)
        self.reason = decision.reason
        if isinstance(decision, GiveUp):
            self.state = FAILED
        else:
            self.state, self._restart_at = WAITING, now + decision.delay_s

    def stopping(self) -> None:
        """The process is asked to end."""
        self.state = STOPPING

    def stopped(self) -> None:
        """The process was asked to end, and did."""
        self.state = STOPPED


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a process that was placed by somebody else listens."""

    host: str
    grpc_port: int
    http_port: int = 0


class Unit:
    """A router or worker process with its ports, log and health."""

    def __init__(
        self,
        plan: PlannedProcess,
        make_command: Callable[[PlannedProcess, int, int], list[str]],
        environ: Mapping[str, str],
        log_dir: Path,
        launch: Launch = launch_program,
        dial: Dial = plaintext,
        scheme: str = "http",
        where: Callable[[], Listening | None] | None = None,
    ) -> None:
        """`where` tells the addresses of one that draws its own ports, once it has."""
        self.plan = plan
        self.dial = dial
        self.scheme = scheme  # of its HTTP front door
        self.state = UnitState()
        self.grpc_port = 0
        self.http_port = 0
        self.child: Child = Child(plan.name, [], environ, log_dir / f"{plan.name}.log", launch)
        self._host = plan.grpc_host
        self._where = where
        self._make_command = make_command
        self._probe: HealthProbe | None = None
        self._held: list[HeldPort] = []

    @property
    def grpc(self) -> str:
        """Address of its gRPC server."""
        return join_host_port(self._host, self.grpc_port) if self.grpc_port else ""

    @property
    def http(self) -> str:
        """Address of its HTTP front door, empty for workers."""
        if self.plan.role != "router":
            return ""
        return join_host_port(self.plan.http_host, self.http_port)

    @property
    def metrics(self) -> str:
        """Address of its /metrics, empty if it serves none."""
        host = self.plan.http_host if self.plan.role == "router" else self._host
        return join_host_port(host, self.http_port) if self.http_port else ""

    def spawn(self) -> None:
        """Start a life; ports nobody asked for by number are drawn anew."""
        self.close_probe()
        self.release_ports()
        self.grpc_port = self.http_port = 0
        if self._where is None:
            self._draw_ports()
        self.child.argv = self._make_command(self.plan, self.grpc_port, self.http_port)
        self.child.spawn()
        self.state.spawned()
        if self._where is None:
            self._open_probe()

    def _draw_ports(self) -> None:
        self.grpc_port = self.plan.grpc_port or self._draw_port(self.plan.grpc_host)
        if self.plan.http_host:
            self.http_port = self.plan.http_port or self._draw_port(self.plan.http_host)

    def _open_probe(self) -> None:
        self._probe = HealthProbe(lambda: self.dial(self.grpc, OPTIONS))

    def _find(self) -> None:
        """Ask where the process listens, until it is known."""
        if self._where is None or self._probe is not None or self.state.state != STARTING:
            return
        found = self._where()
        if found is not None:
            self._host, self.grpc_port, self.http_port = (
                found.host, found.grpc_port, found.http_port,
            )  # fmt: skip
            self._open_probe()

    def tick(self, now: float) -> bool:
        """Look at the process, start it again when due; True = something changed."""
        before = (self.state.state, self.state.reason)
        self._find()
        serving = None if self._probe is None else self._probe.poll(now)
        if self.state.observe(now, self.child.poll(), serving):
            self.spawn()
        return before != (self.state.state, self.state.reason)

    def close_probe(self) -> None:
        """Let go of the channel."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def release_ports(self) -> None:
        """Let go of the ports that were drawn for the process."""
        for held in self._held:
            held.release()
        self._held.clear()

    def _draw_port(self, host: str) -> int:
        # Held, not only drawn: seconds pass until the process listens.
        held = HeldPort(host)
        self._held.append(held)
        return held.number


def is_port_free(host: str, port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
