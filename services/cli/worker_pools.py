"""The workers of a running `isthmus up` as pools: more are started, single ones leave."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from services.cli.unit import FAILED, READY, STARTING, STOPPED, STOPPING, WAITING, Unit
from services.cli.up_plan import WORKER_ROLES, PlannedProcess, with_role
from services.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_WORKERS = 64  # of one role
_NOT_SERVING = (STARTING, WAITING, FAILED)


class WorkerPools:
    """Belongs to the supervisor's thread: it spawns processes."""

    def __init__(
        self,
        units: list[Unit],
        make_plan: Callable[[str, int], PlannedProcess],
        make_unit: Callable[[PlannedProcess], Unit],
        runtime_dir: Path,
        kill_s: float,
    ) -> None:
        """Take over the workers among `units`, which is changed in place.

        Args:
            units: all processes that are supervised.
            make_plan: plans the worker of a role with that number in its name.
            make_unit: makes what was planned.
            runtime_dir: holds a directory for every worker.
            kill_s: after SIGTERM, until a worker is killed.
        """
        self._units = units
        self._make_plan = make_plan
        self._make_unit = make_unit
        self._runtime_dir = runtime_dir
        self._kill_s = kill_s
        self._since: dict[str, tuple[str, float]] = {}  # state of each, and since when
        self._draining: set[str] = set()
        self._fresh: set[str] = set()  # started here, and not ready for the first time
        self._leaving: dict[str, float] = {}  # by name: when it is killed

    # -- questions ---------------------------------------------------------------------------

    def describe(self, now: float) -> list[dict[str, object]]:
        """Return what a driver is told of each worker; those that end are left out."""
        return [
            {
                "id": unit.plan.name,
                "role": unit.plan.role,
                "state": self._state_of(unit),
                "age_s": round(now - self._since.get(unit.plan.name, ("", now))[1], 3),
                "grpc": unit.grpc,
            }
            for unit in self._workers()
            if unit.state.state not in (STOPPING, STOPPED)
        ]

    def _state_of(self, unit: Unit) -> str:
        if unit.plan.name in self._draining:
            return "draining"
        return "starting" if unit.state.state in _NOT_SERVING else "ready"

    def _workers(self) -> list[Unit]:
        return [unit for unit in self._units if unit.plan.role in WORKER_ROLES]

    def is_settled(self, unit: Unit) -> bool:
        """Say whether a process is as it should be: those that come and go are."""
        name = unit.plan.name
        return unit.state.state == READY or name in self._fresh or name in self._leaving

    # -- doing -------------------------------------------------------------------------------

    def start(self, role: str, count: int) -> None:
        """Start so many more workers. Raises ValueError."""
        if role not in WORKER_ROLES:
            raise ValueError(f"{role!r} is no role of workers")
        taken = {unit.plan.name for unit in self._units}
        num_there = sum(unit.plan.role == role for unit in self._workers())
        if not 0 < count <= MAX_WORKERS - num_there:
            raise ValueError(f"{num_there} {role} workers and {count} more: {MAX_WORKERS} at most")
        for index in range(MAX_WORKERS * 2):
            if not count:
                return
            plan = self._make_plan(role, index)
            if plan.name in taken:
                continue
            unit = self._make_unit(plan)
            unit.spawn()
            self._units.append(unit)
            self._fresh.add(unit.plan.name)
            count -= 1

    def cancel(self, names: list[str]) -> None:
        """End workers that do not serve yet; others are left alone."""
        for unit in self._workers():
            if unit.plan.name in names and unit.state.state in _NOT_SERVING:
                self._end(unit, 0.0)

    def drain(self, name: str) -> None:
        """Note that a worker is to leave: it is told so by whoever asks for it."""
        if any(unit.plan.name == name for unit in self._workers()):
            self._draining.add(name)

    def stop(self, name: str, now: float, grace_s: float | None) -> None:
        """End a worker, whatever it has; kill it if it does not in time."""
        for unit in self._workers():
            if unit.plan.name == name and name not in self._leaving:
                self._end(unit, now + (self._kill_s if grace_s is None else grace_s))

    def set_role(self, name: str, role: str) -> None:
        """Note that a worker has gone over to another pool: so it does when it is restarted."""
        if role not in WORKER_ROLES:
            raise ValueError(f"{role!r} is no role of workers")
        for unit in self._workers():
            if unit.plan.name == name:
                unit.plan = with_role(unit.plan, role)

    def _end(self, unit: Unit, kill_at: float) -> None:
        unit.close_probe()
        unit.state.stopping()
        unit.child.send(signal.SIGTERM)
        unit.child.send(signal.SIGCONT)  # a stopped process takes no other signal
        self._leaving[unit.plan.name] = kill_at

    def tick(self, now: float) -> bool:
        """Look after those that end, and note states; True = a worker has gone."""
        for unit in self._workers():
            if unit.plan.name in self._draining and unit.state.state in (WAITING, FAILED):
                # It was to leave and has died: another life of it would take work again.
                self._end(unit, now)
        gone = [unit for unit in self._workers() if self._has_gone(unit, now)]
        for unit in gone:
            self._forget(unit)
        for unit in self._workers():
            state = unit.state.state
            if self._since.get(unit.plan.name, ("", 0.0))[0] != state:
                self._since[unit.plan.name] = (state, now)
            if state != STARTING:
                self._fresh.discard(unit.plan.name)
        return bool(gone)

    def _has_gone(self, unit: Unit, now: float) -> bool:
        kill_at = self._leaving.get(unit.plan.name)
        if kill_at is None:
            return False
        if unit.child.poll() is None and unit.child.is_running:
            if now >= kill_at:
                unit.child.send(signal.SIGKILL)
            return False
        return True

    def _forget(self, unit: Unit) -> None:
        name = unit.plan.name
        unit.release_ports()
        unit.state.stopped()
        self._units.remove(unit)
        self._leaving.pop(name)
        self._since.pop(name, None)
        self._draining.discard(name)
        self._fresh.discard(name)
        shutil.rmtree(self._runtime_dir / unit.plan.directory, ignore_errors=True)
        log.info("up.worker_left", worker=name)
