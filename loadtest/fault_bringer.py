"""Brings faults to the processes of one `isthmus up`, and to nothing else.

Who they are is read from the file its `--json-status` keeps, each time anew, and believed only of
processes that descend from the supervisor that file names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from pydantic import BaseModel, ValidationError

from loadtest.faults import BroughtFault, Fault
from services.common.bounded_file import read_bounded
from services.common.errors import ConfigError

_MAX_STATUS_BYTES = 1 << 20
_POLL_S = 0.1
_BACK_S = 120.0  # longest wait for a process to be ready again
_CLOCK_SLACK_S = 2.0  # the kernel's boot time has whole seconds
_READY = "ready"


class _Process(BaseModel):
    """An entry of the status file."""

    name: str
    role: str
    pid: int | None
    state: str
    grpc: str = ""
    http: str = ""
    restarts: int = 0


class _Status(BaseModel):
    """What is needed of the status file."""

    state: str
    pid: int
    started_unix_ms: int
    processes: list[_Process]


class FaultBringer:
    """Knows one cluster by its status file."""

    def __init__(self, status_file: Path, faults: Sequence[Fault], url: str) -> None:
        """Check what can be checked before the load.

        Raises:
            ConfigError: the file is none, nobody runs there, no router there is the target, or
                a fault is for a process that is not there.
        """
        self._file = status_file
        self._faults = sorted(faults, key=lambda fault: fault.at_s)
        status = self._read()
        try:
            _supervisor(status)
        except psutil.Error:
            raise ConfigError(f"--cluster {status_file}: that cluster runs no more") from None
        target = urlsplit(url).netloc
        doors = [door for p in status.processes if p.role == "router" for door in (p.grpc, p.http)]
        if target not in (door.partition("://")[2] or door for door in doors):
            raise ConfigError(
                f"--cluster {status_file}: {url} is no router of that cluster, which would be "
                "hurt and not measured"
            )
        known = {name for p in status.processes for name in (p.name, p.role)}
        for fault in self._faults:
            if fault.process not in known:
                raise ConfigError(
                    f"faults: there is no {fault.process} in {status_file}; there are: "
                    + ", ".join(sorted(known))
                )

    async def bring(self, clock: Callable[[], float], brought: list[BroughtFault]) -> None:
        """Do each when it is due, and note it; a cancelled one leaves nothing frozen."""
        async with asyncio.TaskGroup() as group:
            for fault in self._faults:
                while (left_s := fault.at_s - clock()) > 0:  # noqa: ASYNC110 - the clock may not run yet
                    await asyncio.sleep(min(left_s, _POLL_S))
                note = BroughtFault(fault, clock(), fault.process)
                brought.append(note)
                group.create_task(self._bring(note, clock))

    async def _bring(self, note: BroughtFault, clock: Callable[[], float]) -> None:
        fault = note.fault
        try:
            entry, process = await asyncio.to_thread(self._find, fault.process)
            note.process, note.at_s = entry.name, clock()
            if fault.action == "freeze":
                await _freeze(process, fault.for_s)
            elif fault.action == "kill":
                process.kill()
            else:
                process.terminate()
            await self._until_back(entry, note, clock)
        except (psutil.Error, ConfigError) as error:
            note.failure = str(error)

    def _find(self, wanted: str) -> tuple[_Process, psutil.Process]:
        """Return the process of that name, or the first of that role that is ready."""
        status = self._read()
        supervisor = _supervisor(status)
        found = [p for p in status.processes if wanted in (p.name, p.role) and p.state == _READY]
        if not found or found[0].pid is None:
            raise ConfigError(f"no {wanted} was ready")
        process = psutil.Process(found[0].pid)  # it knows when another process got the number
        if supervisor not in process.parents():
            raise ConfigError(f"{process.pid} is no process of the cluster in {self._file}")
        return found[0], process

    async def _until_back(
        self, before: _Process, note: BroughtFault, clock: Callable[[], float]
    ) -> None:
        is_same_life = note.fault.action == "freeze"
        for _ in range(round(_BACK_S / _POLL_S)):
            now = next((p for p in self._read().processes if p.name == before.name), None)
            is_new = now is not None and now.restarts > before.restarts
            if now is not None and now.state == _READY and (is_new or is_same_life):
                note.back_s = clock() - note.at_s
                return
            await asyncio.sleep(_POLL_S)

    def _read(self) -> _Status:
        raw = read_bounded("--cluster", self._file, _MAX_STATUS_BYTES)
        try:
            return _Status.model_validate_json(raw)
        except ValidationError:
            raise ConfigError(
                f"--cluster {self._file}: not a file that `isthmus up --json-status` keeps"
            ) from None


async def _freeze(process: psutil.Process, for_s: float) -> None:
    process.suspend()
    try:
        await asyncio.sleep(for_s)
    finally:
        process.resume()


def _supervisor(status: _Status) -> psutil.Process:
    """Return the process that keeps the file; NoSuchProcess if another one has its number."""
    process = psutil.Process(status.pid)
    if process.create_time() > status.started_unix_ms / 1000 + _CLOCK_SLACK_S:
        raise psutil.NoSuchProcess(status.pid)
    return process
