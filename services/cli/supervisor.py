"""Keeps the processes of `isthmus up` alive, and takes them down in order."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from services.cli import exits
from services.cli.control_socket import ControlSocket
from services.cli.status_file import StatusFile
from services.cli.store_unit import StoreUnit
from services.cli.unit import FAILED, READY, Unit
from services.cli.up_plan import AUTOSCALER, WORKER_ROLES, PlannedProcess
from services.cli.up_view import View
from services.cli.worker_pools import WorkerPools
from services.common.clock import Clock

_TICK_S = 0.1
_LOG_CHECK_S = 10.0
_KILL_WAIT_S = 5.0
_SERVING = ("ready", "degraded")


class StopSignals:
    """SIGINT and SIGTERM as a counter that can be waited for."""

    def __init__(self) -> None:
        self.count = 0
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Take the signals over for the duration of a block."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._read_fd)
            os.close(self._write_fd)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        with contextlib.suppress(BlockingIOError):  # full: the reader wakes anyway
            os.write(self._write_fd, b"x")

    def wait(self, timeout_s: float) -> None:
        """Sleep, but not through a signal."""
        readable, _, _ = select.select([self._read_fd], [], [], timeout_s)
        if readable:
            os.read(self._read_fd, 4096)


class Supervisor:
    """Runs on the main thread only: the kernel ties children to the thread that starts them."""

    def __init__(
        self,
        *,
        units: Sequence[Unit],
        store: StoreUnit,
        status_file: StatusFile,
        view: View,
        clock: Clock,
        describe: Callable[[], dict[str, object]],
        drain_s: float,
    ) -> None:
        self._units = list(units)
        self._pools: WorkerPools | None = None
        self._control: ControlSocket | None = None
        self._store = store
        self._status_file = status_file
        self._view = view
        self._clock = clock
        self._describe = describe
        self._drain_s = drain_s
        self._state = "starting"
        self._signals = StopSignals()

    def scale_by(
        self,
        control: Path,
        make_plan: Callable[[str, int], PlannedProcess],
        make_unit: Callable[[PlannedProcess], Unit],
        runtime_dir: Path,
    ) -> None:
        """Let workers be started and stopped through a control socket from now on."""
        kill_s = self._drain_s + _KILL_WAIT_S
        self._pools = WorkerPools(self._units, make_plan, make_unit, runtime_dir, kill_s)
        self._control = ControlSocket(control, self._pools)

    def run(self, start_timeout_s: float) -> int:
        """Start everything, keep it running until a signal, stop it; return the exit status."""
        with self._signals.installed(), self._view:
            self._view.starting(self._units)
            status = exits.FAILED
            try:
                status = self._serve(start_timeout_s)
            finally:
                self._set_state("stopping")
                if self._signals.count:
                    self._view.stopping(self._drain_s)
                self._stop_all()
                self._set_state("stopped" if status == exits.OK else "failed")
                if self._signals.count:
                    self._view.stopped()
                self._view.refresh(self._clock.now(), self._units, self._store)
            return status

    def _serve(self, start_timeout_s: float) -> int:
        for unit in self._units:
            unit.spawn()
        self._publish()
        if not self._wait_until_ready(self._clock.now() + start_timeout_s):
            # Asked to stop while starting is no fault.
            return exits.OK if self._signals.count else exits.FAILED
        self._set_state("ready")
        self._view.announce(self._units)
        return self._watch()

    def _wait_until_ready(self, deadline: float) -> bool:
        while not self._signals.count:
            self._tick()
            if all(map(self._is_as_it_should_be, self._units)):
                return True
            lost = [unit for unit in self._units if unit.state.state == FAILED]
            if lost or self._clock.now() >= deadline:
                self._view.failed(lost or [u for u in self._units if u.state.state != READY])
                return False
            self._signals.wait(_TICK_S)
        return False

    def _watch(self) -> int:
        next_log_check = self._clock.now() + _LOG_CHECK_S
        while not self._signals.count:
            self._signals.wait(_TICK_S)
            self._tick()
            if all(unit.state.state == FAILED for unit in self._units):
                self._view.failed(self._units)
                return exits.FAILED
            if self._clock.now() >= next_log_check:
                next_log_check = self._clock.now() + _LOG_CHECK_S
                for unit in self._units:
                    unit.child.limit_log()
        return exits.OK

    def _tick(self) -> None:
        now = self._clock.now()
        changed = self._store.tick(now)
        if self._pools is not None and self._control is not None:
            changed = self._control.poll(now) or changed
            changed = self._pools.tick(now) or changed
        for unit in self._units:
            if unit.tick(now):
                changed = True
                self._view.changed(unit)
        if self._state in _SERVING:  # before the file is written: it must not contradict itself
            is_whole = all(map(self._is_as_it_should_be, self._units))
            self._state = "ready" if is_whole else "degraded"
        if changed:
            self._publish()
        self._view.refresh(now, self._units, self._store)

    def _is_as_it_should_be(self, unit: Unit) -> bool:
        if self._pools is not None:
            return self._pools.is_settled(unit)
        return unit.state.state == READY

    # -- stopping ----------------------------------------------------------------------------

    def _stop_all(self) -> None:
        """Routers before workers: they finish what they began while the workers still compute."""
        if self._control is not None:
            self._control.close()
        asked = self._signals.count  # one more than this, and there is no more patience
        for roles in ((AUTOSCALER,), ("router",), WORKER_ROLES):
            self._stop_group([unit for unit in self._units if unit.plan.role in roles], asked)
        self._store.stop()
        self._publish()

    def _stop_group(self, units: Sequence[Unit], asked: int) -> None:
        for unit in units:
            unit.close_probe()
            unit.state.stopping()
            unit.child.send(signal.SIGTERM)
            unit.child.send(signal.SIGCONT)  # a stopped process takes no other signal
        self._publish()
        deadline = self._clock.now() + self._drain_s + _KILL_WAIT_S
        while any(unit.child.is_running for unit in units) and self._clock.now() < deadline:
            if self._signals.count > asked:
                break
            self._signals.wait(_TICK_S / 2)
            self._view.refresh(self._clock.now(), self._units, self._store)
        for unit in units:
            unit.child.send(signal.SIGKILL)
        for unit in units:
            unit.child.wait(_KILL_WAIT_S)
            unit.release_ports()
            unit.state.stopped()

    # -- telling -----------------------------------------------------------------------------

    def _set_state(self, state: str) -> None:
        if state != self._state:
            self._state = state
            self._publish()

    def _publish(self) -> None:
        self._status_file.write(
            {
                "state": self._state,
                **self._describe(),
                "processes": [*self._store.describe(), *map(describe_unit, self._units)],
            }
        )


def describe_unit(unit: Unit) -> dict[str, object]:
    """A unit's entry in the status file."""
    return {
        "name": unit.plan.name,
        "role": unit.plan.role,
        "pid": unit.child.pid,
        "grpc": unit.grpc,
        "http": unit.http,
        "metrics": unit.metrics,
        "state": unit.state.state,
        "reason": unit.state.reason,
        "restarts": unit.state.num_restarts,
        "log": str(unit.child.log_path),
    }
