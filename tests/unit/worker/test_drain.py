"""A worker that leaves waits for what others still read of it, within its limit."""

from __future__ import annotations

import asyncio

from services.engine.api import EngineLoad
from services.worker.servicer import StaticStatus, WorkerServicer
from tests.support.shell_rig import ShellRig

STATUS = StaticStatus("cpu", "test", "always", lambda: 0)


async def test_drain_waits_for_lent_blocks_and_refuses_new_work() -> None:
    """RB-108: decode has yet to pull; the worker stays until the blocks are back."""
    rig = ShellRig().start()
    servicer = WorkerServicer(rig.shell, STATUS, rig.clock)
    rig.engine.load_value = EngineLoad(requests_open=1)  # its blocks are lent
    drain = asyncio.create_task(servicer.drain(10.0))
    await asyncio.sleep(0.2)
    assert not drain.done()
    rig.work()
    assert [item.code for item in rig.sent] == ["draining"]  # type: ignore[union-attr]
    rig.engine.load_value = EngineLoad(requests_open=0)
    await asyncio.wait_for(drain, 1.0)


async def test_drain_ends_at_its_limit() -> None:
    """RB-108: a reader that never comes does not hold the worker for ever."""
    rig = ShellRig().start()
    servicer = WorkerServicer(rig.shell, STATUS, rig.clock)
    rig.engine.load_value = EngineLoad(requests_open=1)
    drain = asyncio.create_task(servicer.drain(10.0))
    await asyncio.sleep(0.1)
    assert not drain.done()
    rig.clock.advance(10.1)
    await asyncio.wait_for(drain, 1.0)
