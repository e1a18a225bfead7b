"""A worker that leaves waits for what others still read of it, within its limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from services.engine.api import EngineLoad
from services.pb import common_pb2, worker_pb2
from services.worker.operations import WorkerOperations
from services.worker.servicer import PROTO_MAX, PROTO_MIN, StaticStatus, WorkerServicer
from tests.support.shell_rig import FakeRegistration, ShellRig

STATUS = StaticStatus("cpu", "test", "always", lambda: 0)


async def test_drain_waits_for_lent_blocks_and_refuses_new_work() -> None:
    """RB-108: decode has yet to pull; the worker stays until the blocks are back."""
    rig = ShellRig().start()
    operations = WorkerOperations(rig.shell, FakeRegistration(), rig.clock)
    rig.engine.load_value = EngineLoad(requests_open=1)  # its blocks are lent
    drain = asyncio.create_task(operations.drain(10.0))
    await asyncio.sleep(0.2)
    assert not drain.done()
    rig.work()
    assert [item.code for item in rig.sent] == ["draining"]  # type: ignore[union-attr]
    rig.engine.load_value = EngineLoad(requests_open=0)
    await asyncio.wait_for(drain, 1.0)


async def test_drain_ends_at_its_limit() -> None:
    """RB-108: a reader that never comes does not hold the worker for ever."""
    rig = ShellRig().start()
    operations = WorkerOperations(rig.shell, FakeRegistration(), rig.clock)
    rig.engine.load_value = EngineLoad(requests_open=1)
    drain = asyncio.create_task(operations.drain(10.0))
    await asyncio.sleep(0.1)
    assert not drain.done()
    rig.clock.advance(10.1)
    await asyncio.wait_for(drain, 1.0)


async def test_links_are_ended_behind_their_last_frame_which_says_that_it_drains() -> None:
    """The server used to cut them off, and both sides logged a fault."""
    rig = ShellRig().start()
    operations = WorkerOperations(rig.shell, FakeRegistration(), rig.clock)
    servicer = WorkerServicer(rig.shell, STATUS, rig.clock, operations)

    async def frames() -> AsyncIterator[worker_pb2.RouterFrame]:
        yield worker_pb2.RouterFrame(
            attach=worker_pb2.Attach(
                router_id="r", router_incarnation=9, proto_min=PROTO_MIN, proto_max=PROTO_MAX
            )
        )
        await asyncio.Event().wait()

    link = servicer.Link(frames(), None)  # type: ignore[arg-type]  # only a fault needs the context
    assert (await anext(link)).HasField("welcome")
    await operations.drain(1.0)
    servicer.end_links()
    rest = [frame async for frame in link]
    assert rest[-1].load.state == common_pb2.WORKER_STATE_DRAINING
