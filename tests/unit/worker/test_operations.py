"""What an operator does to a worker: drain and back, another pool, and what goes wrong with it."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import RequestError
from services.engine.api import EngineLoad
from services.worker.operations import WorkerOperations
from tests.support.cluster import eventually
from tests.support.shell_rig import FakeRegistration, ShellRig


class Rig(ShellRig):
    """A running shell with the operations on it."""

    def __init__(self) -> None:
        super().__init__()
        self.registration = FakeRegistration()
        self.operations = WorkerOperations(self.shell, self.registration, self.clock)
        self.start()


async def begin_change(rig: Rig, deadline_s: float) -> asyncio.Task[None]:
    """Let a worker with one open request change its pool; it waits for that one."""
    rig.engine.load_value = EngineLoad(requests_open=1)
    change = asyncio.create_task(rig.operations.join_pool("decode", deadline_s))
    await eventually(lambda: rig.shell.is_draining)
    return change


async def test_drained_worker_takes_work_again_after_undrain() -> None:
    rig = Rig()
    assert await rig.operations.drain(0.0)
    rig.work(request=1)
    assert [item.code for item in rig.sent] == ["draining"]  # type: ignore[union-attr]
    rig.operations.undrain()
    rig.work(request=2)
    assert len(rig.engine.requests) == 1
    assert rig.registration.announced == ["draining", "live"]


async def test_pool_changes_only_when_nothing_is_open() -> None:
    rig = Rig()
    change = await begin_change(rig, 30.0)
    assert rig.registration.announced == ["draining"]
    with pytest.raises(RequestError) as caught:
        await rig.operations.join_pool("prefill", 1.0)
    assert caught.value.spec.code == "duplicate_request"
    rig.engine.load_value = EngineLoad(requests_open=0)
    await asyncio.wait_for(change, 10)
    assert rig.registration.announced == ["draining", "decode", "live"]
    assert (rig.shell.role.prefill, rig.shell.role.decode) == (0.2, 1.0)
    assert not rig.shell.is_draining


async def test_pool_stays_when_the_worker_does_not_get_empty() -> None:
    """Half a change would be worse than none: it goes on as it was."""
    rig = Rig()
    before = rig.shell.role
    change = await begin_change(rig, 5.0)
    rig.clock.advance(5.1)
    with pytest.raises(RequestError) as caught:
        await asyncio.wait_for(change, 10)
    assert caught.value.spec.code == "deadline_exceeded"
    assert rig.registration.announced == ["draining", "live"]
    assert rig.shell.role is before
    assert not rig.shell.is_draining


async def test_change_of_pool_that_is_cut_off_leaves_the_worker_at_work() -> None:
    """A router that dies while it waits must not leave a worker drained for ever."""
    rig = Rig()
    change = await begin_change(rig, 5.0)
    change.cancel()
    await asyncio.gather(change, return_exceptions=True)
    assert not rig.shell.is_draining
    assert rig.registration.announced == ["draining", "live"]


async def test_drained_worker_that_changes_its_pool_stays_drained() -> None:
    rig = Rig()
    await rig.operations.drain(0.0)
    await rig.operations.join_pool("prefill", 1.0)
    assert rig.shell.is_draining
    assert rig.registration.announced == ["draining", "draining", "prefill"]


async def test_drain_that_comes_during_a_change_of_pool_outlasts_it() -> None:
    rig = Rig()
    change = await begin_change(rig, 30.0)
    assert not await rig.operations.drain(0.0)
    rig.engine.load_value = EngineLoad(requests_open=0)
    await asyncio.wait_for(change, 10)
    assert rig.shell.is_draining
    rig.operations.undrain()
    assert not rig.shell.is_draining


async def test_worker_that_leaves_is_not_called_back() -> None:
    rig = Rig()
    rig.engine.load_value = EngineLoad(requests_open=0)
    await rig.operations.leave()
    with pytest.raises(RequestError) as caught:
        rig.operations.undrain()
    assert caught.value.spec.code == "draining"
    with pytest.raises(RequestError):
        await rig.operations.join_pool("decode", 1.0)
    assert rig.registration.announced == ["draining"]


async def test_unknown_pool_is_refused_by_name() -> None:
    rig = Rig()
    with pytest.raises(RequestError) as caught:
        await rig.operations.join_pool("draft", 1.0)
    assert (caught.value.spec.code, caught.value.param) == ("invalid_argument", "role")
    assert not rig.shell.is_draining
