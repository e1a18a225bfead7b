"""The driver of processes against a real control socket; the processes themselves are twins."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.autoscaler.driver import DriverError
from services.autoscaler.observation import ReplicaState
from services.autoscaler.policy import OnDeadline
from services.autoscaler.process_driver import ProcessDriver, roles_of
from services.cli.control_socket import ControlSocket
from services.cli.unit import Unit
from services.cli.up_plan import PlannedProcess, plan_worker
from services.cli.worker_pools import MAX_WORKERS, WorkerPools
from services.common.clock import ManualClock
from services.common.errors import ConfigError
from tests.support.cluster import eventually
from tests.support.scaling_policy import make_policy

pytestmark = pytest.mark.integration

READY, STARTING, DRAINING = ReplicaState.READY, ReplicaState.STARTING, ReplicaState.DRAINING
KILL_S = 5.0


class Process:
    """A process that ends when it is told to, unless it is stubborn."""

    def __init__(self) -> None:
        self.pid = 1
        self.returncode: int | None = None
        self.is_stubborn = False
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode or 0

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)
        if sig == signal.SIGKILL or (sig == signal.SIGTERM and not self.is_stubborn):
            self.returncode = -sig


@dataclass
class Calls:
    """In place of WorkerCalls."""

    drained: list[str] = field(default_factory=list)
    joined: list[tuple[str, str]] = field(default_factory=list)
    may_join: asyncio.Event = field(default_factory=asyncio.Event)
    fails: bool = False

    async def drain(self, address: str) -> None:
        self.drained.append(address)

    async def join_pool(self, address: str, role: str, drain_s: float) -> None:
        await self.may_join.wait()
        if self.fails:
            raise DriverError("not empty in time")
        self.joined.append((address, role))

    async def close(self) -> None:
        """Nothing is held."""


class Rig:
    """Pools of twins under a supervisor's loop, and a driver that talks to it."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.folder = folder
        self.units: list[Unit] = []
        self.processes: dict[str, Process] = {}
        self.calls = Calls()
        self.pools = WorkerPools(self.units, self._plan, self._unit, folder, KILL_S)
        self.control = ControlSocket(folder / "control.sock", self.pools)
        calls: Any = self.calls
        self.driver = ProcessDriver(
            folder / "control.sock", roles_of(make_policy().spec), calls, self.clock.now
        )

    def _plan(self, role: str, index: int) -> PlannedProcess:
        return plan_worker(role, index, threads=1, runtime_dir=self.folder, tag="")

    def _unit(self, plan: PlannedProcess) -> Unit:
        (self.folder / plan.directory).mkdir()
        process = self.processes[plan.name] = Process()

        def launch(_argv: Sequence[str], _environ: Mapping[str, str], _log: int) -> Process:
            return process

        return Unit(plan, lambda *_: ["x"], os.environ, self.folder, launch)

    def turn(self) -> None:
        """One turn of the supervisor's loop."""
        self.control.poll(self.clock.now())
        self.pools.tick(self.clock.now())

    async def run(self) -> None:
        while True:
            self.turn()
            await asyncio.sleep(0.002)

    def ready(self, *names: str) -> None:
        for unit in self.units:
            if unit.plan.name in names:
                unit.state.observe(self.clock.now(), None, True)
        self.turn()

    async def states(self) -> dict[str, dict[str, ReplicaState]]:
        found = await self.driver.replicas()
        return {pool: {r.replica_id: r.state for r in all_} for pool, all_ in found.items()}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="isthmus-ctl-") as folder:
        made = Rig(Path(folder))
        loop = asyncio.create_task(made.run())
        yield made
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await made.driver.close()
        made.control.close()
        for unit in made.units:
            unit.close_probe()
            unit.release_ports()


async def test_workers_start_and_are_ready_when_they_serve(rig: Rig) -> None:
    await rig.driver.start("decode", 2)
    assert await rig.states() == {
        "prefill": {}, "decode": {"decode-0": STARTING, "decode-1": STARTING}
    }  # fmt: skip
    rig.ready("decode-1")
    rig.clock.advance(7.0)
    (first, second) = (await rig.driver.replicas())["decode"]
    assert (first.state, second.state) == (STARTING, READY)
    assert second.since == pytest.approx(rig.clock.now() - 7.0)


async def test_cancel_ends_what_starts_and_leaves_alone_what_serves(rig: Rig) -> None:
    """RB-104: nobody who serves is taken for somebody who starts."""
    await rig.driver.start("prefill", 2)
    rig.ready("prefill-0")
    await rig.driver.cancel(["prefill-0", "prefill-1"])
    await eventually(lambda: len(rig.units) == 1)
    assert (await rig.states())["prefill"] == {"prefill-0": READY}
    assert rig.processes["prefill-0"].signals == []


async def test_drained_worker_is_told_so_and_shown_until_it_is_stopped(rig: Rig) -> None:
    await rig.driver.start("decode", 1)
    rig.ready("decode-0")
    await rig.driver.replicas()
    for _ in range(2):  # may be repeated
        await rig.driver.drain("decode-0", 60.0, OnDeadline.MIGRATE)
    assert rig.calls.drained == [rig.units[0].grpc] * 2
    assert (await rig.states())["decode"] == {"decode-0": DRAINING}
    await rig.driver.stop("decode-0")
    assert (await rig.states())["decode"] == {}
    await eventually(lambda: not rig.units)
    assert not (rig.folder / "decode-0").exists()
    await rig.driver.stop("decode-0")  # gone: no error


async def test_worker_that_does_not_end_is_killed_at_once_where_nobody_waits_for_it(
    rig: Rig,
) -> None:
    for name, on_deadline in (("decode-0", OnDeadline.MIGRATE), ("decode-1", OnDeadline.ABORT)):
        await rig.driver.start("decode", 1)
        rig.ready(name)
        rig.processes[name].is_stubborn = True
        await rig.driver.replicas()
        await rig.driver.drain(name, 60.0, on_deadline)
        await rig.driver.stop(name)
    rig.clock.advance(2.0)
    await eventually(lambda: [unit.plan.name for unit in rig.units] == ["decode-0"])
    rig.clock.advance(KILL_S)
    await eventually(lambda: not rig.units)


async def test_worker_that_dies_while_it_drains_is_not_started_again(rig: Rig) -> None:
    """A drain ends with the life of a worker: its next one would take work."""
    await rig.driver.start("decode", 1)
    rig.ready("decode-0")
    await rig.driver.replicas()
    await rig.driver.drain("decode-0", 60.0, OnDeadline.MIGRATE)
    rig.processes["decode-0"].returncode = 1
    rig.units[0].state.observe(rig.clock.now(), 1, None)
    await eventually(lambda: not rig.units)


async def test_names_of_workers_that_left_are_used_again(rig: Rig) -> None:
    await rig.driver.start("decode", 2)
    await rig.driver.stop("decode-0")
    await eventually(lambda: len(rig.units) == 1)
    await rig.driver.start("decode", 2)
    assert sorted((await rig.states())["decode"]) == ["decode-0", "decode-1", "decode-2"]


async def test_flipped_worker_drains_in_its_old_pool_and_serves_in_the_new(rig: Rig) -> None:
    await rig.driver.start("decode", 1)
    rig.ready("decode-0")
    await rig.driver.replicas()
    await rig.driver.flip("decode-0", "prefill")
    assert await rig.states() == {"prefill": {}, "decode": {"decode-0": DRAINING}}
    rig.calls.may_join.set()
    await eventually(lambda: rig.units[0].plan.role == "prefill")
    assert rig.calls.joined == [(rig.units[0].grpc, "prefill")]
    await eventually(lambda: all(task.done() for _, task in rig.driver._flips.values()))
    assert await rig.states() == {"prefill": {"decode-0": READY}, "decode": {}}
    assert "prefill" in rig.units[0].plan.arguments  # and so it is after a restart


async def test_worker_that_cannot_flip_serves_on_where_it_was(rig: Rig) -> None:
    await rig.driver.start("decode", 1)
    rig.ready("decode-0")
    await rig.driver.replicas()
    rig.calls.fails = True
    rig.calls.may_join.set()
    await rig.driver.flip("decode-0", "prefill")
    await eventually(lambda: all(task.done() for _, task in rig.driver._flips.values()))
    assert await rig.states() == {"prefill": {}, "decode": {"decode-0": READY}}


async def test_more_workers_than_a_machine_is_meant_for_are_refused(rig: Rig) -> None:
    with pytest.raises(DriverError, match="at most"):
        await rig.driver.start("decode", MAX_WORKERS + 1)
    assert rig.units == []


async def test_supervisor_that_is_gone_is_an_error_of_the_driver(rig: Rig) -> None:
    rig.control.close()
    with pytest.raises(DriverError, match="not there"):
        await rig.driver.replicas()


@pytest.mark.parametrize(
    "line", [b"{}\n", b"[]\n", b"nonsense\n", b'{"do": "start", "role": "router", "count": 1}\n',
             b'{"do": "cancel", "ids": 7}\n', b'{"do": "launch"}\n'],
)  # fmt: skip
async def test_requests_that_are_none_are_refused(rig: Rig, line: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(rig.folder / "control.sock"))
    writer.write(line)
    assert b"error" in await asyncio.wait_for(reader.readline(), 10.0)
    writer.close()
    assert rig.units == []


async def test_silent_connections_do_not_keep_others_out(rig: Rig) -> None:
    silent = [
        await asyncio.open_unix_connection(str(rig.folder / "control.sock")) for _ in range(20)
    ]
    await eventually(lambda: len(rig.control._open) == 16)
    rig.clock.advance(10.0)
    await eventually(lambda: rig.control._open.keys() == set() or len(rig.control._open) < 16)
    rig.clock.advance(10.0)
    assert await rig.states() == {"prefill": {}, "decode": {}}
    for _, writer in silent:
        writer.close()


def test_two_pools_of_one_role_are_refused() -> None:
    spec = make_policy().spec
    other = spec.pools[1].model_copy(update={"name": "other"})
    double = spec.model_copy(update={"pools": (spec.pools[1], other)})
    with pytest.raises(ConfigError, match="two pools of role decode"):
        roles_of(double)
